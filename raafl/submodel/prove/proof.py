"""Admit axes by proof: a shrunk model does to a batch what the whole one does with the dropped units zeroed.

Outputs, loss, gradients and buffers of one training step are compared in double precision and training mode, with dropout as
identity. Values are drawn from a fixed seed, so that the model's values, torch's random state and the caller's buffers stay
unchanged, and a replay admits the same axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, count, product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from raafl.errors import USER_ERRORS
from raafl.rng import seeded, undisturbed
from raafl.submodel.cut.layers import persistent_buffers, select
from raafl.submodel.declared import within
from raafl.submodel.extract import CopyPlan
from raafl.submodel.find.trace import MOST_VALUES
from raafl.submodel.flat import FlatTensors, is_merged
from raafl.submodel.isolated_run import loss_of, one_line, settle, uncached, unwrapped, watch_outputs
from raafl.submodel.module_state import ModuleState
from raafl.submodel.nested_batch import mapped
from raafl.submodel.prove.narrow import narrowed, num_values, random_values, shortened
from raafl.submodel.spec import FULL, Axis, Runs, Spec

if TYPE_CHECKING:
    from raafl.submodel.submodels import Submodels

LARGE = 2_000_000
"""Number of parameters above which the proof uses a narrow copy, and cuts all axes together only, to keep starts short."""

TINY = 1e-30
"""Value that replaces zero where code divides by dropped units, as weight norm does."""

_EDGES = ("LayerNorm", "RMSNorm")


def refuted(
    submodels: Submodels, module: nn.Module, batch: object, *, measures_rounding: bool = True
) -> dict[str, str]:
    """Check that each axis can really be shrunk; return the axes that failed, each with the reason.

    A model from which units were removed must compute the same outputs and gradients as the whole model with these
    units set to zero. First all axes are cut at once, to one unit and to a random half. Then subsets of the axes are
    cut, chosen such that any two axes are told apart by a subset with only one of them. Wrong axes are found by
    bisection, or one by one if they fail only together. For a model with more than `LARGE` values, a narrow copy with
    the same axes is checked instead; if none can be made, the model itself is checked, without the subsets.
    """
    if not submodels.axes:
        return {}
    too_large = f"not proven: the model has more than {MOST_VALUES:,} parameters, so no step is run"
    found = dict.fromkeys(submodels.axes, too_large)
    with undisturbed(), torch.enable_grad():
        for (one, built, some), dtype in product(_candidates(submodels, module, batch), TOLERANCES):
            answer = _proven(partial(_Proof, one, built, some, dtype, measures_rounding), module)
            if isinstance(answer, dict):
                return answer
            found = dict.fromkeys(submodels.axes, f"not proven: {answer}")
    return found


def _proven(begun: Callable[[], _Proof], module: nn.Module) -> dict[str, str] | str:
    """Return the axes that cannot shrink, each with the reason; or the reason for which nothing could be compared."""
    problem = ""
    for is_cold in (True, False):  # caches are hidden first; code that fails without them may store constants there
        with uncached(module, is_cold=is_cold) as hidden:
            proof = begun()
            problem = proof.begin() or ""
            if not problem:
                return proof.refuted()
        if not hidden.any:
            break
    return problem


def _candidates(submodels: Submodels, module: nn.Module, batch: object) -> Iterator[tuple[Submodels, nn.Module, Any]]:
    """Yield models on which the proof can run, as (submodels, module, batch); the next is tried if a step on one fails."""
    is_small = num_values(submodels) <= MOST_VALUES
    if num_values(submodels) > LARGE and (narrow := narrowed(submodels, module, batch)) is not None:
        if not is_small:
            yield *narrow, shortened(batch)
        yield *narrow, batch
    if is_small:
        yield submodels, module, batch


class _Proof:
    """Comparison of submodels with the whole model, on random values."""

    def __init__(
        self, submodels: Submodels, module: nn.Module, batch: object, dtype: torch.dtype, measures_rounding: bool = True
    ) -> None:
        self.submodels, self.dtype = submodels, dtype
        # NaN in a batch would make all results NaN, which cannot be compared
        self.batch = mapped(batch, lambda x: x.to(dtype).nan_to_num(0, 0, 0) if x.is_floating_point() else x)
        self.values = random_values(submodels, module)
        self.spanned = {axis.name for axis in submodels.axes.values() if _norm_spans(submodels.module, axis)}
        self.spanned |= set() if submodels.discovered is None else submodels.discovered.spanned
        self.halves = frozenset({torch.float16, torch.bfloat16} & set(submodels.layout().dtypes))
        self.generator = torch.Generator().manual_seed(11)
        self.noise, self.measures_rounding = NOISE, measures_rounding

    def begin(self) -> str | None:
        """Run the whole model's step; return the reason for which submodels cannot be compared with it, None if they can."""
        try:
            self.whole = self._made(FULL, self.values)
            self.state = ModuleState(self.whole, self.submodels)
            self.first = self._step(self.whole, self.noise[0])
        except USER_ERRORS as error:
            return f"its training step does not run on random values: {one_line(error)}"
        step = self.first
        if step.loss is None or not all(torch.isfinite(x).all() for x in step.loss_and_gradients()):
            return "its training step gives numbers that are not finite, whatever is cut: correct the step first"
        # random numbers of 0.9 may drop all elements, whose mean is then a division by 0
        if step.noisy and not self._finite(self.noise[1]):
            self.noise = NOISE[:1] * 2
        self.uncut = largest_of(step.gradients) if self.measures_rounding else {}
        if not self.spanned & self.submodels.axes.keys():  # only axes that a norm spans need this
            self.first = StepOutcome()
        return None

    def _finite(self, noise: float) -> bool:
        """Check whether the whole model's step is finite if each random number is ``noise``."""
        try:
            return all(bool(torch.isfinite(x).all()) for x in self._step(self.whole, noise).loss_and_gradients())
        except USER_ERRORS:
            return False

    def refuted(self) -> dict[str, str]:
        """Compare submodels with the whole model; return the axes that cannot shrink, each with the reason."""
        rest, found = list(self.submodels.axes), dict[str, str]()
        while failing := self._failing(rest):
            wrong = dict(self._halved(failing))
            if not wrong:
                return found | self._one_by_one(rest)
            found |= wrong
            rest = [name for name in rest if name not in wrong]
        return found

    def _halved(self, failing: list[str]) -> Iterator[tuple[str, str]]:
        """Halve a set of axes that fails together, and yield each axis that fails alone, with the reason."""
        middle = len(failing) // 2
        for half in (failing[:middle], failing[middle:]):
            if half and (problem := self._problem(half)) is not None:
                if len(half) == 1:
                    yield half[0], f"not proven: {problem}"
                else:
                    yield from self._halved(half)

    def _one_by_one(self, names: Sequence[str]) -> dict[str, str]:
        """Test each axis alone and then with those accepted before; return the failing axes, each with the reason."""
        found: dict[str, str] = {}
        together: list[str] = []
        for name in names:
            if (problem := self._problem([name])) is not None:
                found[name] = f"not proven: {problem}"
            elif together and (problem := self._problem([*together, name])) is not None:
                found[name] = f"not proven together with other axes: {problem}"
            else:
                together.append(name)
        return found

    def _failing(self, names: list[str]) -> list[str]:
        """Test all axes together, then subsets that separate each two; return the first set that fails, [] if none does."""
        if self._problem(names) is not None:
            return names
        subsets = () if num_values(self.submodels) > LARGE else _separating(names)
        return next((part for part in subsets if self._differs(self._spec(part, _half), self.noise[1]) is not None), [])

    def _problem(self, names: Sequence[str]) -> str | None:
        """Compare submodels that keep one unit, or a random half, of each of these axes; return a difference, None without one."""
        one, half = self.noise
        return self._differs(self._spec(names, _one), one) or self._differs(self._spec(names, _half), half)

    def _spec(self, names: Sequence[str], choose: Callable[[int, torch.Generator], list[int]]) -> Spec:
        return Spec.select({name: choose(self.submodels.axes[name].size, self.generator) for name in names})

    def _differs(self, spec: Spec, noise: float) -> str | None:
        spec = self.submodels.normal(spec)
        equal = Spec.select({name: kept for name, kept in spec.kept if name not in self.spanned})
        if equal != spec and (problem := self._runs(spec, noise)) is not None:
            return problem
        if equal.is_full:
            return None
        plan = self.submodels.plan(equal, "present")
        try:
            small = self._step(self._made(equal, plan.gather(self.values)), noise)
        except USER_ERRORS as error:
            return f"its training step does not run: {one_line(error)}"
        masked = partial(self._masked, plan, 0.0, noise)
        whole = masked()
        if whole.loss is not None and not torch.isfinite(whole.loss).all():
            masked = partial(self._masked, plan, TINY, noise)
            whole = masked()
        if not all(torch.isfinite(x).all() for x in whole.loss_and_gradients()):
            masked = partial(self._masked, plan, 0.0, noise, buffers=False)
            whole = masked()
        problem = next(self._differences(equal, small, whole, Rounding()), None)
        if problem is None or not self.measures_rounding:
            return problem
        return next(self._differences(equal, small, whole, self._rounding(equal, whole, masked)), None)

    def _masked(
        self,
        plan: CopyPlan,
        instead: float,
        noise: float,
        *,
        buffers: bool = True,
        moved: Callable[[Tensor], object] | None = None,
    ) -> StepOutcome:
        """Run the whole model's step with elements that the submodel lacks set to ``instead``, and ``moved`` on each parameter."""
        kept = FlatTensors.zeros(self.values.layout)
        plan.cover_(kept, True)  # unlike an addition, this works for boolean buffers, too
        tensors = dict(self.whole.named_parameters()) | persistent_buffers(self.whole)
        with torch.no_grad():
            for name, is_kept in kept.items():
                if not buffers and name not in self.submodels.parameter_names:
                    tensors[name].copy_(self.values[name])
                    continue
                value = tensors[name].copy_(is_kept * self.values[name])
                if instead and is_merged(value.dtype):
                    value.masked_fill_(is_kept == 0, instead)
            if moved is not None:
                for parameter in self.whole.parameters():
                    moved(parameter)
        return self._step(self.whole, noise)

    def _runs(self, spec: Spec, noise: float) -> str | None:
        """Check only shapes and finiteness of a submodel's step; return the problem, None without one."""
        # values are not compared: for axes that a norm spans, those of submodel and masked model rightly differ
        try:
            small = self._step(self._made(spec, self.submodels.plan(spec, "present").gather(self.values)), noise)
        except USER_ERRORS as error:
            return f"its training step does not run: {one_line(error)}"
        if not all(torch.isfinite(x).all() for x in small.loss_and_gradients()):
            return "its training step gives numbers that are not finite"
        return next(self._outputs(spec, small, self.first, Bound(math.inf)), None)

    def _made(self, spec: Spec, values: FlatTensors) -> nn.Module:
        present = values.clone() if spec.is_full else values
        module = self.submodels.shrink(spec, present=present).module
        # unlike `to`, both keep complex parameters complex
        module = module.double() if self.dtype == torch.float64 else module.float()
        _settle(module)
        return module

    def _step(self, module: nn.Module, noise: float) -> StepOutcome:
        if module is self.whole:  # a submodel is new, and needs no reset
            self.state.restore()
        module.zero_grad(set_to_none=True)
        done, mode = StepOutcome(), Quiet(noise, self.halves, self.dtype)
        seeded(5)  # draw the same random numbers in the steps of both models
        handles = watch_outputs(
            module,
            lambda path, given: done.outputs.append(
                (path, [unwrapped(x.detach().clone()) for x in given if is_merged(x.dtype)])
            ),
        )
        try:
            with mode:
                loss = loss_of(module, self.batch)
                loss.backward()
        finally:
            for handle in handles:
                handle.remove()
        done.loss, done.forced, done.noisy = loss.detach(), mode.forced, mode.noisy
        done.gradients = {
            name: p.grad.to_dense() if p.grad is not None and p.grad.is_sparse else p.grad
            for name, p in module.named_parameters()
        }
        done.buffers = {n: b.clone() for n, b in persistent_buffers(module).items() if is_merged(b.dtype)}
        return done

    def _rounding(self, spec: Spec, whole: StepOutcome, masked: Callable[..., StepOutcome]) -> Rounding:
        """Measure the effect of rounding on a masked step, by repeating it with slightly changed parameters."""
        eps = torch.finfo(torch.float32 if whole.forced else self.dtype).eps
        generator, selections = torch.Generator().manual_seed(13), self.submodels.selections(spec)
        found = Rounding(CAPS[self.dtype])
        for _ in range(DRAWS):
            moved = masked(moved=partial(_moved_, MOVED * eps, generator))
            found.add(whole.named(selections), moved.named(selections))
        return found

    def _differences(self, spec: Spec, small: StepOutcome, whole: StepOutcome, rounding: Rounding) -> Iterator[str]:
        """Describe each difference between two steps that exceeds the tolerance and the effect of ``rounding``."""
        tolerance = FORCED if whole.forced and self.dtype == torch.float64 else TOLERANCES[self.dtype]
        assert small.loss is not None and whole.loss is not None
        yield from apart("the loss", small.loss, whole.loss, Bound(tolerance, 1e-6, rounding))
        yield from self._outputs(spec, small, whole, Bound(tolerance, 1e-6, rounding))
        selections, present = self.submodels.selections(spec), self.submodels.layout(spec).by_name
        largest = max(largest_of(whole.gradients).values(), default=0.0)
        least = LEAST * torch.finfo(self.dtype).eps * max(self.uncut.values(), default=0.0)
        for name, ours in small.gradients.items():
            theirs = whole.gradients[name]
            if ours is None and theirs is None:
                continue
            shape = present[name].shape if name in present else ()
            given = torch.zeros(shape, dtype=self.dtype) if ours is None else ours
            full = torch.zeros_like(given) if theirs is None else select(theirs, selections.get(name, {}))
            # a normalised vector cut to one unit has rounding errors as gradient: use the scale of the uncut model's
            floor = 1e-3 * max(largest, self.uncut.get(name, 0.0))
            yield from apart(f"the gradient of '{name}'", given, full, Bound(tolerance, floor, rounding, least))
        for name, buffer in small.buffers.items():
            other = select(whole.buffers[name], selections.get(name, {}))
            yield from apart(f"buffer '{name}'", buffer, other, Bound(tolerance, 1e-3, rounding))

    def _outputs(self, spec: Spec, small: StepOutcome, whole: StepOutcome, bound: Bound) -> Iterator[str]:
        """Describe the differences in outputs of those modules that contain a whole axis, such as the model."""
        axes = [self.submodels.axes[name] for name, _ in spec.kept]
        if [path for path, _ in small.outputs] != [path for path, _ in whole.outputs]:
            yield "other layers are called"
            return
        for (path, ours), (_, theirs) in zip(small.outputs, whole.outputs, strict=True):
            if not any(all(within(m.name, (path,)) for m in axis.members) for axis in axes):
                continue
            if [x.shape for x in ours] != [x.shape for x in theirs] and not any(_crosses(axis, path) for axis in axes):
                yield f"{output_of(path)} has another shape"
            for one, other in zip(ours, theirs, strict=False):
                if one.shape == other.shape:
                    yield from apart(output_of(path), one, other, bound)


def _moved_(share: float, generator: torch.Generator, parameter: Tensor) -> None:
    """Multiply each value of a parameter, in place and at random, by 1 + ``share`` or 1 - ``share``."""
    if is_merged(parameter.dtype):
        signs = 2 * torch.randint(2, parameter.shape, generator=generator, dtype=parameter.dtype.to_real()) - 1
        parameter.mul_(1 + share * signs)


def _crosses(axis: Axis, path: str) -> bool:
    """Check whether an axis has dimensions inside and outside of a module, so that the module's output may shrink."""
    return 0 < sum(within(member.name, (path,)) for member in axis.members) < len(axis.members)


def _settle(module: nn.Module) -> None:
    """Prepare a module for steps in training mode without a Trainer and without dropout."""
    settle(module)
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        elif isinstance(part, nn.MultiheadAttention | nn.RNNBase):
            part.dropout = 0.0
        elif isinstance(part, nn.RReLU):
            part.lower = part.upper = (part.lower + part.upper) / 2
        elif type(part).__name__ in ("StochasticDepth", "DropPath"):
            part.eval()


def _norm_spans(module: nn.Module, axis: Axis) -> bool:
    """Check whether a norm computes statistics over the axis, for which zeroed units differ from absent ones."""
    owners = {member.name.rpartition(".")[0] for member in axis.members}
    return any(type(module.get_submodule(path)).__name__.endswith(_EDGES) for path in owners)


def _one(size: int, generator: torch.Generator) -> list[int]:
    return [int(torch.randint(size, (1,), generator=generator))]


def _half(size: int, generator: torch.Generator) -> list[int]:
    return torch.randperm(size, generator=generator)[: max(1, size // 2)].tolist()


def _separating(names: Sequence[str]) -> Iterator[list[str]]:
    """Yield subsets such that for each two of the ``names`` some subset has the first and not the second."""
    num = next(num for num in count() if math.comb(num, num // 2) >= len(names)) if len(names) > 1 else 0
    halves = dict(zip(names, combinations(range(num), num // 2), strict=False))
    for place in range(num):
        yield [name for name in names if place in halves[name]]


@dataclass
class StepOutcome:
    """Outcome of one training step."""

    outputs: list[tuple[str, list[Tensor]]] = field(default_factory=list)
    loss: Tensor | None = None
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    forced: bool = False
    noisy: bool = False

    def named(self, selections: Mapping[str, Mapping[int, Runs]]) -> Iterator[tuple[str, Tensor]]:
        """Yield all that is compared, as messages name it."""
        if self.loss is not None:
            yield "the loss", self.loss
        yield from ((output_of(path), tensor) for path, given in self.outputs for tensor in given)
        for name, gradient in self.gradients.items():
            if gradient is not None:
                yield f"the gradient of '{name}'", select(gradient, selections.get(name, {}))
        for name, buffer in self.buffers.items():
            yield f"buffer '{name}'", select(buffer, selections.get(name, {}))

    def loss_and_gradients(self) -> Iterator[Tensor]:
        """Yield the loss and the gradients, which have to be finite."""
        if self.loss is not None:
            yield self.loss
        yield from (g for g in self.gradients.values() if g is not None)


def output_of(path: str) -> str:
    """Name the output of the module at a path, for messages."""
    return f"the output of '{path or 'the model'}'"


def largest_of(gradients: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Return the largest absolute value in each gradient, by the name of its parameter."""
    return {name: float(g.abs().max()) for name, g in gradients.items() if g is not None and g.numel()}


DRAWN = ("rand", "rand_like", "uniform_", "randn", "randn_like", "normal_", "exponential_")
"""Random functions; the proof replaces their results by one number, so that all units get the same."""

NOISE = (0.5, 0.9)
"""Constants that replace random numbers, if axes are cut to one unit and to a half; 0.9 passes `rand_like(x) > 0.75`, too."""


class Quiet(TorchFunctionMode):
    """Context for comparing a small model with the whole one: dropout, noise and casts to half precision are disabled.

    It records whether any of them occurred.

    `noisy`: whether the code has drawn any random number.
    `forced`: whether the code has cast double-precision values to single precision.
    """

    forced = noisy = False

    def __init__(
        self, noise: float, halves: frozenset[torch.dtype] = frozenset(), wide: torch.dtype = torch.float64
    ) -> None:
        """Replace each random number by ``noise``, and casts to the dtypes ``halves`` by casts to ``wide``."""
        super().__init__()
        self.noise, self.halves, self.wide = noise, halves, wide

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if "dropout" in name and args:
            return args[0]
        if name == "scaled_dot_product_attention":
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        answer = func(*args, **kwargs)
        if name in ("to", "type", "bfloat16", "half") and isinstance(answer, Tensor) and answer.dtype in self.halves:
            return args[0].to(answer.device, self.wide)  # the proof runs the layers in this dtype
        if name in DRAWN:  # random numbers of another shape would differ for the same units
            answer.fill_(self.noise)
            self.noisy = True
        elif name in ("bernoulli", "bernoulli_"):
            chance = kwargs.get("p", args[1] if len(args) > 1 else args[0] if name == "bernoulli" else 0.5)
            answer.copy_(torch.as_tensor(chance) >= 0.5)  # the likelier outcome replaces a random draw
        if name in ("to", "float", "type") and isinstance(answer, Tensor) and answer.dtype == torch.float32:
            self.forced |= args[0].dtype == torch.float64
        return answer


# Check whether two steps differ by more than rounding explains.
#
# A difference of up to a fixed share of the largest value is allowed. Beyond it the step's rounding error is measured:
# some models amplify it, such as deep ones with batch norms, and a gradient that should be 0 is nothing else.

TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Largest difference, as a share of the largest value; float32 is for code that does not run in double precision."""

FORCED = 1e-6
"""Tolerance if code converts doubles to float32 in between."""

CAPS = {torch.float64: 1e-4, torch.float32: 1e-2}
"""Largest difference that may count as rounding, as a share of the largest value."""

DRAWS = 3
"""Number of steps by which rounding errors are measured."""

MOVED = 1
"""Number of units in the last place by which each parameter is perturbed, at random up or down, to measure rounding."""

TIMES = 32
"""Factor between the allowed difference and the measured effect of these perturbations."""

LEAST = 64
"""Allowed difference of each gradient, in units in the last place of the whole model's largest gradient."""


@dataclass
class Rounding:
    """Measured effect of rounding on the tensors of a step; without arguments, rounding that was not measured."""

    cap: float = 0.0  # largest share of a tensor's largest value that rounding may excuse
    # largest absolute change of each tensor, by its name in messages
    changes: dict[str, float] = field(default_factory=dict)

    def add(self, one: Iterable[tuple[str, Tensor]], other: Iterable[tuple[str, Tensor]]) -> None:
        """Add the changes between two runs of the same step."""
        for (what, before), (_, after) in zip(one, other, strict=False):
            if before.shape == after.shape and before.numel():
                self.changes[what] = max(self.changes.get(what, 0.0), float((before - after).abs().max()))

    def allows(self, what: str, gap: float, scale: float) -> bool:
        """Check whether rounding explains a difference."""
        return gap <= min(TIMES * self.changes.get(what, 0.0), self.cap * scale)


@dataclass(frozen=True, slots=True)
class Bound:
    """Largest difference that is allowed between two tensors."""

    tolerance: float  # allowed share of the largest value
    floor: float = 1e-6  # least value to which the share refers
    rounding: Rounding = field(default_factory=Rounding)  # measured effect of rounding, which may excuse more
    least: float = 0.0  # absolute difference that is always allowed


def apart(what: str, one: Tensor, other: Tensor, bound: Bound) -> Iterator[str]:
    """Yield in words that two tensors differ by more than allowed, if they do."""
    if one.shape != other.shape:
        yield f"{what} has the shape {tuple(one.shape)}, not {tuple(other.shape)}"
        return
    if not one.numel():
        return
    if not bool(torch.isfinite(one).all() and torch.isfinite(other).all()):  # explicit, since max(0, nan) is 0
        same = torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)) and math.isinf(bound.tolerance)
        if not same:
            yield f"{what} is not finite"
        return
    scale = max(float(other.abs().max()), bound.floor)
    gap = float((one - other).abs().max())
    if gap > max(bound.tolerance * scale, bound.least) and not bound.rounding.allows(what, gap, scale):
        yield f"{what} differs by {gap / scale:.2g}" if scale else f"{what} is not 0"
