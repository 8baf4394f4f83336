"""Admit axes by proof: a shrunk model does to a batch what the whole one does with the dropped units zeroed.

Outputs, loss, gradients and buffers of one training step are compared in double precision and training mode, with dropout as
identity. Values are drawn from a fixed seed, so that the model's values, torch's random state and the caller's buffers stay
unchanged, and a replay admits the same axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, count, product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from raafl.errors import USER_ERRORS
from raafl.submodel.axes import Axis
from raafl.submodel.cut.copying import persistent_buffers
from raafl.submodel.declared import within
from raafl.submodel.extract import CopyPlan
from raafl.submodel.find.trace import MOST_VALUES
from raafl.submodel.flat import FlatTensors, is_merged
from raafl.submodel.frozen import select
from raafl.submodel.isolated_run import loss_of, one_line, seeded, settle, undisturbed, watch_outputs
from raafl.submodel.module_state import ModuleState
from raafl.submodel.nested_batch import mapped
from raafl.submodel.prove.narrow import narrowed, num_values, random_values, shortened
from raafl.submodel.prove.noise import NOISE, Quiet
from raafl.submodel.spec import FULL, Spec
from raafl.submodel.user_caches import uncached

if TYPE_CHECKING:
    from raafl.submodel.submodels import Submodels

TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Largest difference, as a share of the largest value; float32 is for code that does not run in double precision."""

FORCED = 1e-6
"""The tolerance where code turns doubles into float32 in between."""

LARGE = 2_000_000
"""Parameters of a model beyond which a narrow copy of it is proven, and axes are cut all together only: a start stays short."""

TINY = 1e-30
"""Stands for zero where code divides by what is dropped, as weight norm does by the length of each unit's weights."""

_EDGES = ("LayerNorm", "RMSNorm")


@dataclass
class _Step:
    """What one training step came to."""

    outputs: list[tuple[str, list[Tensor]]] = field(default_factory=list)
    loss: Tensor | None = None
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    forced: bool = False
    noisy: bool = False


def refuted(submodels: Submodels, module: nn.Module, batch: object) -> dict[str, str]:
    """Check that each axis can really be shrunk; return the axes that failed, each with the reason.

    A model from which units were removed must compute the same outputs and gradients as the whole model with these
    units set to zero. First all axes are cut at once, to one unit and to a random half. Then subsets of the axes are
    cut, chosen such that any two axes are told apart by a subset with only one of them. Wrong axes are found by
    bisection, or one by one if they fail only together. For a model with more than `LARGE` values, a narrow copy with
    the same axes is checked instead; if none can be made, the model itself is checked, without the subsets.

    Args:
        submodels: submodels of the model, which must not have been used before.
        module: model with or without values; its buffers are read.
        batch: batch of real data, of which a few samples are enough.
    """
    if not submodels.axes:
        return {}
    too_large = f"not proven: the model has more than {MOST_VALUES:,} parameters, so no step is run"
    found = dict.fromkeys(submodels.axes, too_large)
    with undisturbed(), torch.enable_grad():
        for (one, built, some), dtype in product(_candidates(submodels, module, batch), TOLERANCES):
            answer = _proven(partial(_Proof, one, built, some, dtype), module)
            if isinstance(answer, dict):
                return answer
            found = dict.fromkeys(submodels.axes, f"not proven: {answer}")
    return found


def _proven(begun: Callable[[], _Proof], module: nn.Module) -> dict[str, str] | str:
    """Return the axes that a proof refutes, each with the reason; or the reason for which nothing can be compared."""
    problem = ""
    for is_cold in (True, False):  # code that does not run without what it has stored has stored constants
        with uncached(module, is_cold=is_cold) as hidden:
            proof = begun()
            problem = proof.begin() or ""
            if not problem:
                return proof.refuted()
        if not hidden.any:
            break
    return problem


def _candidates(submodels: Submodels, module: nn.Module, batch: object) -> Iterator[tuple[Submodels, nn.Module, Any]]:
    """Yield the models on which the axes may be proven, and the batch; the next is tried where a step on these does not run."""
    is_small = num_values(submodels) <= MOST_VALUES
    if num_values(submodels) > LARGE and (narrow := narrowed(submodels, module, batch)) is not None:
        if not is_small:
            yield *narrow, shortened(batch)
        yield *narrow, batch
    if is_small:
        yield submodels, module, batch


class _Proof:
    """The whole model with drawn values, beside which small ones are held."""

    def __init__(self, submodels: Submodels, module: nn.Module, batch: object, dtype: torch.dtype) -> None:
        self.submodels, self.dtype = submodels, dtype
        # NaN in the data says nothing of the axes, and would hide all that is to be compared
        self.batch = mapped(batch, lambda x: x.to(dtype).nan_to_num(0, 0, 0) if x.is_floating_point() else x)
        self.values = random_values(submodels, module)
        self.spanned = {axis.name for axis in submodels.axes.values() if _norm_spans(submodels.module, axis)}
        self.spanned |= set() if submodels.discovered is None else submodels.discovered.spanned
        self.halves = frozenset({torch.float16, torch.bfloat16} & set(submodels.layout().dtypes))
        self.generator = torch.Generator().manual_seed(11)
        self.noise = NOISE

    def begin(self) -> str | None:
        """Run the whole model once; return a reason for which it cannot be compared with a smaller one, or None."""
        try:
            self.whole = self._made(FULL, self.values)
            self.state = ModuleState(self.whole, self.submodels)
            self.first = self._step(self.whole, self.noise[0])
        except USER_ERRORS as error:
            return f"its training step does not run on random values: {one_line(error)}"
        step = self.first
        if step.loss is None or not all(torch.isfinite(x).all() for x in _tensors(step)):
            return "its training step gives numbers that are not finite, whatever is cut: correct the step first"
        if step.noisy and not self._finite(self.noise[1]):  # nothing is left of what is divided by the number kept, say
            self.noise = NOISE[:1] * 2
        if not self.spanned & self.submodels.axes.keys():  # nothing is held against it any more
            self.first = _Step()
        return None

    def _finite(self, noise: float) -> bool:
        """Check that the whole model's step runs with this in the place of noise, and gives finite numbers."""
        try:
            return all(bool(torch.isfinite(x).all()) for x in _tensors(self._step(self.whole, noise)))
        except USER_ERRORS:
            return False

    def refuted(self) -> dict[str, str]:
        """Compare smaller models with the whole one; return the axes that cannot be shrunk, each with the reason."""
        rest, found = list(self.submodels.axes), dict[str, str]()
        while failing := self._failing(rest):
            wrong = dict(self._halved(failing))
            if not wrong:
                return found | self._one_by_one(rest)
            found |= wrong
            rest = [name for name in rest if name not in wrong]
        return found

    def _halved(self, failing: list[str]) -> Iterator[tuple[str, str]]:
        """Yield those of axes that fail together that fail alone, and why: a half that holds is not looked into."""
        middle = len(failing) // 2
        for half in (failing[:middle], failing[middle:]):
            if half and (problem := self._problem(half)) is not None:
                if len(half) == 1:
                    yield half[0], f"not proven: {problem}"
                else:
                    yield from self._halved(half)

    def _one_by_one(self, names: Sequence[str]) -> dict[str, str]:
        """Return the axes that fail though halves of them hold -> the reason: alone, or beside those before them."""
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
        """Return axes that fail together, of all and of subsets that separate them; empty = they hold."""
        if self._problem(names) is not None:
            return names
        subsets = () if num_values(self.submodels) > LARGE else _separating(names)
        return next((part for part in subsets if self._differs(self._spec(part, _half), self.noise[1]) is not None), [])

    def _problem(self, names: Sequence[str]) -> str | None:
        """Compare a model with these axes cut, to one unit or to random ones, with the whole; None = alike."""
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
        whole = self._masked(plan, 0.0, noise)
        if whole.loss is not None and not torch.isfinite(whole.loss).all():
            whole = self._masked(plan, TINY, noise)
        if not all(torch.isfinite(x).all() for x in _tensors(whole)):
            whole = self._masked(plan, 0.0, noise, buffers=False)
        return self._compared(equal, small, whole)

    def _masked(self, plan: CopyPlan, instead: float, noise: float, *, buffers: bool = True) -> _Step:
        """Do a step of the whole model with ``instead`` in the place of what is dropped.

        Without ``buffers`` those are left as they are: they may place or scale a unit's inputs, as the knots of a spline do,
        by whose distances is divided, and a unit is gone with its parameters.
        """
        kept = FlatTensors.zeros(self.values.layout)
        plan.cover_(kept, True)  # a number cannot be added to a buffer of booleans
        tensors = dict(self.whole.named_parameters()) | persistent_buffers(self.whole)
        with torch.no_grad():
            for name, is_kept in kept.items():
                if not buffers and name not in self.submodels.parameter_names:
                    tensors[name].copy_(self.values[name])
                    continue
                value = tensors[name].copy_(is_kept * self.values[name])
                if instead and is_merged(value.dtype):
                    value.masked_fill_(is_kept == 0, instead)
        return self._step(self.whole, noise)

    def _runs(self, spec: Spec, noise: float) -> str | None:
        """Check a step where a norm spans an axis, so that results are others: shapes, finiteness."""
        try:
            small = self._step(self._made(spec, self.submodels.plan(spec, "present").gather(self.values)), noise)
        except USER_ERRORS as error:
            return f"its training step does not run: {one_line(error)}"
        if not all(torch.isfinite(x).all() for x in _tensors(small)):
            return "its training step gives numbers that are not finite"
        return next(self._outputs(spec, small, self.first, math.inf), None)

    def _made(self, spec: Spec, values: FlatTensors) -> nn.Module:
        present = values.clone() if spec.is_full else values
        module = self.submodels.shrink(spec, present=present).module
        module = module.double() if self.dtype == torch.float64 else module.float()  # what is complex stays so
        _settle(module)
        return module

    def _step(self, module: nn.Module, noise: float) -> _Step:
        if module is self.whole:  # the small ones are new
            self.state.restore()
        module.zero_grad(set_to_none=True)
        done, mode = _Step(), Quiet(noise, self.halves, self.dtype)
        seeded(5)  # both steps are to draw the same
        handles = watch_outputs(
            module,
            lambda path, given: done.outputs.append((path, [x.detach().clone() for x in given if is_merged(x.dtype)])),
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

    def _compared(self, spec: Spec, small: _Step, whole: _Step) -> str | None:
        tolerance = FORCED if whole.forced and self.dtype == torch.float64 else TOLERANCES[self.dtype]
        assert small.loss is not None and whole.loss is not None
        if problem := _apart("the loss", small.loss, whole.loss, tolerance, 1e-6):
            return problem
        if problem := next(self._outputs(spec, small, whole, tolerance), None):
            return problem
        selections, present = self.submodels.selections(spec), self.submodels.layout(spec).by_name
        largest = max(
            (float(g.abs().max()) for g in whole.gradients.values() if g is not None and g.numel()), default=0.0
        )
        for name, ours in small.gradients.items():
            theirs = whole.gradients[name]
            if ours is None and theirs is None:
                continue
            shape = present[name].shape if name in present else ()
            given = torch.zeros(shape, dtype=self.dtype) if ours is None else ours
            full = torch.zeros_like(given) if theirs is None else select(theirs, selections.get(name, {}))
            if problem := _apart(f"the gradient of '{name}'", given, full, tolerance, 1e-3 * largest):
                return problem
        for name, buffer in small.buffers.items():
            other = select(whole.buffers[name], selections.get(name, {}))
            if problem := _apart(f"buffer '{name}'", buffer, other, tolerance, 1e-3):
                return problem
        return None

    def _outputs(self, spec: Spec, small: _Step, whole: _Step, tolerance: float) -> Iterator[str]:
        """Yield where what the training step sees of the model differs: what modules give that hold all of an axis."""
        axes = [self.submodels.axes[name] for name, _ in spec.kept]
        if [path for path, _ in small.outputs] != [path for path, _ in whole.outputs]:
            yield "other layers are called"
            return
        for (path, ours), (_, theirs) in zip(small.outputs, whole.outputs, strict=True):
            if not any(all(within(m.name, (path,)) for m in axis.members) for axis in axes):
                continue
            if [x.shape for x in ours] != [x.shape for x in theirs] and not any(_crosses(axis, path) for axis in axes):
                yield f"the output of '{path or 'the model'}' has another shape"
            for one, other in zip(ours, theirs, strict=False):
                if one.shape == other.shape and (
                    p := _apart(f"the output of '{path or 'the model'}'", one, other, tolerance, 1e-6)
                ):
                    yield p


def _crosses(axis: Axis, path: str) -> bool:
    """Check whether an axis lies in a module and outside it as well, so that what the module gives may be cut."""
    return 0 < sum(within(member.name, (path,)) for member in axis.members) < len(axis.members)


def _settle(module: nn.Module) -> None:
    """Make a small copy run without dropout, and without a trainer, in training mode."""
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
    """Check whether a norm takes its statistics across the axis: such a model is not the whole one with units zeroed."""
    owners = {member.name.rpartition(".")[0] for member in axis.members}
    return any(type(module.get_submodule(path)).__name__.endswith(_EDGES) for path in owners)


def _one(size: int, generator: torch.Generator) -> list[int]:
    return [int(torch.randint(size, (1,), generator=generator))]


def _half(size: int, generator: torch.Generator) -> list[int]:
    return torch.randperm(size, generator=generator)[: max(1, size // 2)].tolist()


def _separating(names: Sequence[str]) -> Iterator[list[str]]:
    """Yield subsets such that of any two names there is one with the first alone, and one with the second.

    Each name is in half of the subsets, no two in the same half: so none is wherever another is. No fewer subsets do
    (Sperner's theorem).
    """
    num = next(num for num in count() if math.comb(num, num // 2) >= len(names)) if len(names) > 1 else 0
    halves = dict(zip(names, combinations(range(num), num // 2), strict=False))
    for place in range(num):
        yield [name for name in names if place in halves[name]]


def _apart(what: str, one: Tensor, other: Tensor, tolerance: float, floor: float) -> str | None:
    """Return in words that two tensors differ by more than ``tolerance`` of the largest value, or of ``floor``."""
    if one.shape != other.shape:
        return f"{what} has the shape {tuple(one.shape)}, not {tuple(other.shape)}"
    if not one.numel():
        return None
    if not bool(torch.isfinite(one).all() and torch.isfinite(other).all()):  # max(0, nan) is 0
        same = torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)) and math.isinf(tolerance)
        return None if same else f"{what} is not finite"
    scale = max(float(other.abs().max()), floor)
    gap = float((one - other).abs().max())
    return f"{what} differs by {gap / scale:.2g}" if gap > tolerance * scale else None


def _tensors(step: _Step) -> Iterator[Tensor]:
    if step.loss is not None:
        yield step.loss
    yield from (g for g in step.gradients.values() if g is not None)
