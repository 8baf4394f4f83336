"""Predict the cost of training a submodel from its small module on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raafl.errors import USER_ERRORS
from raafl.rng import seeded, undisturbed
from raafl.rules import Rules
from raafl.submodel.cost import Cost
from raafl.submodel.cost.ledger import Launches, Ledger, launches_of, storage_key
from raafl.submodel.cut.layers import persistent_buffers
from raafl.submodel.flat import FlatTensors
from raafl.submodel.isolated_run import call, draw, loss_of, one_line, settle, uncached
from raafl.submodel.nested_batch import batch_tensors, meta_batch, num_samples, repeated
from raafl.submodel.spec import FULL, Spec, SpecError

if TYPE_CHECKING:
    from raafl.submodel.flat import Layout

Make = Callable[..., Any]
Begin = Callable[[Spec], "_Run"]
"""Builds the small module of a submodel, with a batch."""
Followed = tuple["Step", int]
"""A step, and the bytes of module and batch."""
OnValues = Callable[[], "Followed | None"]
"""Function that traces a step with random values; returns None if the step cannot run so."""

_SLOTS = 2
"""Number of values that an optimizer is assumed to store per trained one if its step cannot run on the meta device."""


_MOST_FLOPS = 2e11
"""Largest number of FLOPs of a step that is traced with random values: a few seconds of one core."""

_BY_PARAMETERS = "6 FLOPs count for each parameter that trains, and no activations"


class MethodSteps(Protocol):
    """Protocol of the steps of a method's task; `raafl.core.local.Hook` is the implementation."""

    def loss(self, batch: Any, index: int) -> Tensor:
        """Return the loss of a batch."""

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of ``loss``."""

    def update(self) -> None:
        """Make one optimiser step."""

    def stepped(self) -> None:
        """Do what belongs on Python's side of a step."""

    def finish(self) -> object:
        """Do what follows the last step."""

    def close(self) -> None:
        """Undo the changes to the module."""


class MethodTask(Protocol):
    """Protocol of a method's task before its first step."""

    # tensors that the task has received or will send, which the costs of the transfers include already
    received_and_sent: list[Tensor]
    # an update with tensors beside the trained values sends a copy of these: its size in bytes; 0 = no copy
    answer_bytes: int

    def steps(
        self, optimizer: Optimizer, backward: Callable[[Tensor], None], update: Callable[[], None]
    ) -> MethodSteps:
        """Return the steps of the task."""


class Method(Protocol):
    """Protocol of a method whose tasks do more than the user's own step; see `raafl.core.own_steps.OwnSteps`.

    Attributes:
        rescale: whether it multiplies the activations of narrowed layers, as `Submodels.shrink` does.
    """

    rescale: bool

    def begin(self, spec: Spec, module: nn.Module, loss: Callable[[Any, int], Tensor]) -> MethodTask:
        """Return a task of the method on a small module, before its first step.

        Args:
            spec: submodel that the module is.
            module: small module, on the meta device or with values.
            loss: function that runs the user's own step.
        """


@dataclass(frozen=True, slots=True)
class Step:
    """FLOPs, memory and traffic of one training step, not counting the module and the batch themselves."""

    flops: float | None  # FLOPs of forward and backward pass; None = they could not be run
    moved_bytes: int  # bytes that all operations move, weighted by time (see `raafl.submodel.cost.kernels.traffic`)
    peak_bytes: int  # largest number of bytes alive at once, from the second step on
    padding_flops: float = 0.0  # FLOPs of forward and backward pass on padded channels
    # operations in forward and backward pass, weighted as `Ledger.launches`, plus the kinds of operations in the
    # optimizer's step
    num_kernels: float = 0.0
    guessed: str = ""  # which part is only estimated, and why; "" = none
    launches: Launches | None = None  # kernels that a GPU launches; None = the passes could not be run
    pool_bytes: int = 0  # largest memory that the step allocates and frees again


def predict(
    make: Make,
    spec: Spec,
    example_batch: object,
    batch_size: int,
    layouts: Mapping[str, Layout],
    names: frozenset[str],
    idle_bytes: int,
    rules: Rules,
    is_whole: bool = True,
    method: Method | None = None,
) -> Cost:
    """Predict the cost of training a submodel by running one step without values, on the meta device.

    `training_step`, its backward pass and the optimiser's step are run, and the memory in use is tracked. A step that
    needs values, for example to assign samples to experts, is run on random ones instead, or in a large model with two
    numbers in place of what it reads, if its cost is the same for both. If that also fails, the cost
    is estimated: the FLOPs are three times those of a forward pass, and all gradients are assumed to be in memory
    together with all activations. Without an example batch, the estimate is 6 FLOPs for each trained parameter, and no
    memory for activations.

    `example_batch`: a batch of the data, of any size; None = there is none.
    `method`: method whose steps are followed in place of the user's own; None = the user's own.

    Raises:
        SpecError: the step works with the whole model but fails with ``spec``.
        Exception: of a method, whatever its steps raise that cannot be followed.
    """
    trained, down_bytes = layouts["trained"], layouts["sent"].num_bytes
    from raafl.submodel.cost.ledger import LARGE

    params = sum(entry.numel for entry in layouts["present"].entries if entry.name in names)
    batch = None if example_batch is None else meta_batch(example_batch, batch_size)

    def begin(spec: Spec, module: Any, batch: object) -> _Run:
        return _Run(module, batch, rules) if method is None else _TaskRun(method, spec, module, batch, rules)

    def on_values() -> tuple[Step, int] | None:
        if not is_whole or sum(entry.numel for entry in layouts["present"].entries) > LARGE:
            return None

        def drawn(batch: object) -> _Run:
            module = make(spec, FlatTensors.zeros(layouts["present"]))
            _draw_values(module)
            return begin(spec, module, batch)

        return _on_values(drawn, example_batch, batch_size)

    with undisturbed():
        follow = _follow if method is None else _follow_method
        step, held_bytes = _cold(follow, lambda spec: begin(spec, make(spec), batch), spec, on_values)
    flops = step.flops
    if flops is None:
        looked_up = frozenset() if batch is not None else _looked_up(make(spec))  # every real task has a batch
        flops = 6.0 * batch_size * sum(e.numel for e in trained.entries if e.name in names - looked_up)
    samples = max(batch_size, 1)
    peak = down_bytes + idle_bytes + held_bytes + step.peak_bytes
    return Cost(
        params,
        flops / samples,
        peak,
        down_bytes,
        trained.num_bytes,
        step.moved_bytes / samples,
        step.padding_flops / samples,
        kernels_per_sample=step.num_kernels / samples,
        guessed=step.guessed,
        launches=None if step.launches is None else step.launches.times(1 / samples),
        pool_bytes=step.pool_bytes,
    )


def _cold(
    follow: Callable[[Begin, Spec, OnValues], Followed], begin: Begin, spec: Spec, on_values: OnValues
) -> Followed:
    """Predict a step with the user code's caches hidden, since they may contain tensors of earlier steps."""
    module = begin(spec).module
    found = failure = None
    with uncached(module) as hidden:
        try:
            found = follow(begin, spec, on_values)
        except USER_ERRORS as error:
            failure = error
    # the step may need a dict that was hidden, such as a table of constants
    if hidden.any and (found is None or found[0].guessed):
        with uncached(module, is_cold=False):
            return follow(begin, spec, on_values)
    if found is None:
        assert failure is not None
        raise failure
    return found


def _looked_up(module: nn.Module) -> frozenset[str]:
    """Return the names of embedding weights, of which a step reads single rows only."""
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    others = {
        id(p) for part in module.modules() if not isinstance(part, nn.Embedding) for p in part.parameters(recurse=False)
    }
    return frozenset(name for name, p in module.named_parameters() if id(p) in tables - others)


def _follow(begin: Begin, spec: Spec, on_values: OnValues) -> Followed:
    """Predict the cost of a step, and estimate what cannot be run; return the cost, and the bytes of module and batch."""
    found, failure = _without_values(begin, spec, on_values)
    if found is not None:
        return found
    if failure is not None and (followed := on_values() or _whatever_it_reads(begin, spec)) is not None:
        return followed
    run = begin(spec)
    if failure is not None and spec != FULL and _runs_whole(begin):
        raise SpecError(
            f"{type(run.module).__name__}.training_step runs with the whole model, but not with {spec}: "
            f"{' '.join(str(failure).split())}: declare in `submodel_axes` which dimensions must shrink together"
        ) from failure
    why, instead = "there is no example batch", _BY_PARAMETERS
    if failure is not None:
        why = _not_followed(failure)
        try:
            step, instead = run.forward(), "three times its forward pass counts"
        except USER_ERRORS:
            run = begin(spec)
            step = run.update()
    else:
        step = run.update()
    return replace(step, guessed="; ".join(filter(None, (f"{why}: {instead}", step.guessed)))), run.held_bytes


def _follow_method(begin: Begin, spec: Spec, on_values: OnValues) -> Followed:
    """Predict the cost of a step of a method's task; return it with the bytes of module and batch, or raise the step's error."""
    found, failure = _without_values(begin, spec, on_values)
    found = found or on_values() or (None if failure is None else _whatever_it_reads(begin, spec))
    if found is None:
        raise failure or NotImplementedError("there is no example batch")
    return found


def _without_values(begin: Begin, spec: Spec, on_values: OnValues) -> tuple[Followed | None, BaseException | None]:
    """Run a step on the meta device; return its cost and the bytes of module and batch, or else None and the error."""
    failure: BaseException | None = None
    # tensors that the user's code creates go to the meta device by default; code that reads their values needs the CPU
    for default in ("meta", "cpu"):
        run = begin(spec)
        if run.batch is None:
            return None, None
        try:
            step = run.step(default)
        except USER_ERRORS as error:
            failure = error
        else:
            if not run.ledger.asked:
                return (step, run.held_bytes), None
            return on_values() or (_with_some(begin, spec, default, step), run.held_bytes), None
    return None, failure


def _whatever_it_reads(begin: Begin, spec: Spec) -> Followed | None:
    """Run a step that reads values without values, for two numbers in their place; None if it fails or its cost depends on them.

    So a loss that is logged costs what it does, while a size that is computed from data stays unknown.
    """
    for default in ("meta", "cpu"):
        with suppress(*USER_ERRORS):
            one, other = (_with_stand_in(begin(spec), default, number) for number in (1, 2))
            return one if one == other else None
    return None


def _with_stand_in(run: _Run, default: str, number: int) -> Followed | None:
    """Run a step with a number in place of what it reads; None if it asks for conditions, or an older rule leaves it a guess."""
    if not run.rules.follows_reads:
        return None
    run.ledger.stand_in = number
    step = run.step(default)
    return None if run.ledger.asked else (step, run.held_bytes)


def _on_values(drawn: Callable[[object], _Run], example_batch: object, batch_size: int) -> Followed | None:
    """Run a step on random values and ``batch_size`` repeated samples; None if that fails or would take too long."""
    num = num_samples(example_batch)

    def followed(size: int) -> Followed:
        run = drawn(repeated(example_batch, size))
        return run.step("cpu", every=True), run.held_bytes

    try:
        if batch_size > num > 0:
            few, _ = followed(num)
            if few.flops is None or few.flops * batch_size / num > _MOST_FLOPS:
                return None
        return None if num == 0 else followed(batch_size)
    except USER_ERRORS:
        return None


def _draw_values(module: nn.Module) -> None:
    """Fill a module with values on which its step can run: random parameters, buffers of 1."""
    seeded(5)
    draw(module, 0)
    for buffer in persistent_buffers(module).values():  # the buffers' true values are not known here
        if buffer.is_floating_point() or buffer.dtype == torch.bool:
            buffer.fill_(1)  # 1 and not 0, since code may divide by a buffer


def _with_some(begin: Begin, spec: Spec, default: str, step: Step) -> Step:
    """Repeat a step with each condition on tensor values taken as true; return its cost, or ``step`` if that fails."""
    run = begin(spec)
    run.ledger.some = True
    try:
        return run.step(default)
    except NotImplementedError as error:  # the step reads values, such as an expert's number of samples
        guess = begin(spec).update()
        return replace(guess, guessed=f"{_not_followed(error)}: {_BY_PARAMETERS}")
    except USER_ERRORS:  # the user's code may raise an error, as the condition is not really true
        return step


def _not_followed(error: BaseException) -> str:
    return f"the training step cannot be followed without values ({one_line(error)})"


def _runs_whole(begin: Begin) -> bool:
    for default in ("meta", "cpu"):
        try:
            begin(FULL).step(default)
            return True
        except USER_ERRORS:
            continue
    return False


class _Run:
    """Training step of a submodel whose cost is counted, on the meta device or with values."""

    def __init__(self, module: Any, batch: object, rules: Rules, known: list[Tensor] | None = None) -> None:
        """Create a ledger that counts no memory of the module, the batch and the tensors ``known``."""
        from raafl.submodel.cost.fused import FusedKernels

        self.module, self.batch, self.rules = module, batch, rules
        settle(self.module)
        held = [*self.module.parameters(), *self.module.buffers(), *batch_tensors(batch)]
        held = [x for x in held if x.layout == torch.strided]  # sparse tensors have no storage
        self.held_bytes = sum({storage_key(x): x.untyped_storage().nbytes() for x in held}.values())
        self.trains = [p for p in self.module.parameters() if p.requires_grad]
        self.gradient_bytes = sum(p.numel() * p.itemsize for p in self.trains)
        self.ledger: Ledger = Ledger([*held, *(known or [])], rules)
        self.fused = FusedKernels(rules, self.ledger)

    def step(self, default: str, every: bool = False) -> Step:
        """Run forward, backward and optimizer step; return their FLOPs, memory and traffic."""

        def passes() -> None:
            with uncached(self.module, is_cold=False), torch.device(default):
                loss = loss_of(self.module, self.batch)
                if loss.requires_grad:
                    _backward(loss)

        peak_bytes = self._peak_of(passes)
        if every:
            self._give_gradients()
        work = self.ledger
        return self._updated(work.task_flops, work.moved_bytes, peak_bytes, work.padding_flops, work.launches)

    def forward(self) -> Step:
        """Estimate a training step: three times the cost of a forward pass, plus the optimizer's step."""
        peak_bytes = self._peak_of(lambda: call(self.module, self.batch)) + self.gradient_bytes
        work = self.ledger
        return self._updated(
            3.0 * work.task_flops, 3 * work.moved_bytes, peak_bytes, 3.0 * work.padding_flops, 3.0 * work.launches, 3.0
        )

    def update(self) -> Step:
        """Estimate a step of which only the optimizer's part can run; its passes count as three reads of all parameters."""
        values = sum(p.numel() * p.itemsize for p in self.module.parameters())
        return self._updated(None, 3 * values, self.gradient_bytes)

    def _updated(
        self,
        flops: float | None,
        moved_bytes: int,
        pass_bytes: int,
        padding_flops: float = 0.0,
        num_kernels: float = 0.0,
        num_passes: float = 1.0,
    ) -> Step:
        """Add the optimizer's step to the cost of the passes; its state takes memory during the passes, too."""
        passes = self.ledger.take_launched()
        if all(parameter.grad is None for parameter in self.trains):  # no backward pass was run
            self._give_gradients()
        gradients, guessed = self.ledger.live_bytes, ""
        try:
            update_bytes = self._peak_of(self._optimise)
            state, before = self.ledger.live_bytes - gradients, self.ledger.moved_bytes
            self.ledger.kernels.clear()
            self.ledger.take_launched()
            self._peak_of(self._optimise_again)  # run again, since the optimizer's state exists only now
            moved_bytes += self.ledger.moved_bytes - before
            num_kernels += len(self.ledger.kernels)
        except USER_ERRORS as error:
            state = _SLOTS * self.gradient_bytes
            update_bytes = gradients + state
            moved_bytes += 3 * self.gradient_bytes + 2 * state
            guessed = _of_optimiser(one_line(error))
        peak_bytes, pool_bytes = max(pass_bytes + state, update_bytes), max(pass_bytes, update_bytes - state)
        launches = launches_of(passes, self.ledger.take_launched(), num_passes) if passes else None
        return Step(flops, moved_bytes, peak_bytes, padding_flops, num_kernels, guessed, launches, pool_bytes)

    def _give_gradients(self) -> None:
        """Create a gradient for each trained parameter without one."""
        for parameter in self.trains:
            if parameter.grad is None:
                with self.ledger:
                    parameter.grad = torch.empty_like(parameter)

    def _optimise(self) -> None:
        with torch.device("cpu"):  # optimizers have their step counters on the CPU
            self._configure()
        self._optimise_again()

    def _configure(self) -> None:
        if not self.trains:  # no parameter is trained, or only by the method; an optimizer refuses an empty list
            self.optimizers: list[Optimizer] = [_no_optimiser()]
            return
        self.optimizers = _optimizers(self.module.configure_optimizers())

    def _optimise_again(self) -> None:
        with torch.device("cpu"), _fused_without_values() if self.rules.follows_reads else nullcontext():
            for optimizer in self.optimizers:
                optimizer.step()

    def _peak_of(self, call: Callable[[], Any]) -> int:
        """Return the largest number of bytes alive at once during a call."""
        self.ledger.peak_bytes = self.ledger.live_bytes
        with self.ledger, self.fused:
            call()
        return self.ledger.peak_bytes


class _TaskRun(_Run):
    """Two steps of a method's task whose costs are counted, with the memory that persists between them."""

    def __init__(self, method: Method, spec: Spec, module: Any, batch: object, rules: Rules) -> None:
        """Begin the method's task for a submodel; no step is run yet."""
        self.task = method.begin(spec, module, lambda batch, index: _some_loss(module, batch))
        super().__init__(module, batch, rules, self.task.received_and_sent)
        self.held_bytes += self.task.answer_bytes
        self.unknown: list[str] = []

    def step(self, default: str, every: bool = False) -> Step:
        """Run two steps; return FLOPs and traffic of the second, and the peak memory of both."""
        try:
            with self.ledger, torch.device("cpu"):
                self._configure()
        except USER_ERRORS as error:
            self.unknown.append(one_line(error))
            self.optimizers = [_no_optimiser()]
        with self.ledger, self.fused, uncached(self.module, is_cold=False), torch.device(default):
            steps = self.task.steps(self.optimizers[0], _backward_if_any, self._update)
        try:
            for index in range(2):
                found = self._step(steps, index, default, every)
            self._finish(steps, default)
        finally:
            steps.close()
        peak_bytes, state_bytes = self.ledger.peak_bytes, _SLOTS * self.gradient_bytes
        found = replace(found, pool_bytes=peak_bytes - _state_bytes(self.optimizers))
        if not self.unknown:
            return replace(found, peak_bytes=peak_bytes)
        return replace(
            found,
            peak_bytes=peak_bytes + state_bytes,
            guessed=_of_optimiser(self.unknown[0]),
            moved_bytes=found.moved_bytes + 3 * self.gradient_bytes + 2 * state_bytes,
        )

    def _step(self, steps: MethodSteps, index: int, default: str, every: bool) -> Step:
        ledger = self.ledger
        ledger.take_launched()
        flops, arithmetic, padding_flops, moved_bytes, launches = (
            ledger.flops,
            ledger.arithmetic,
            ledger.padding_flops,
            ledger.moved_bytes,
            ledger.launches,
        )
        with ledger, self.fused, uncached(self.module, is_cold=False), torch.device(default):
            steps.backward(steps.loss(self.batch, index))
        if every:
            self._give_gradients()
        launches = ledger.launches - launches
        flops = ledger.flops - flops or ledger.arithmetic - arithmetic
        ledger.kernels.clear()
        passes = ledger.take_launched()
        with ledger, self.fused, torch.device("cpu"):
            steps.update()
            steps.stepped()
        return Step(
            flops,
            ledger.moved_bytes - moved_bytes,
            0,
            ledger.padding_flops - padding_flops,
            launches + len(ledger.kernels),
            launches=launches_of(passes, ledger.take_launched()),
        )

    def _finish(self, steps: MethodSteps, default: str) -> None:
        with (
            suppress(*USER_ERRORS),
            self.ledger,
            self.fused,
            uncached(self.module, is_cold=False),
            torch.device(default),
        ):
            steps.finish()  # errors are ignored: the hook's end may read values, and needs less memory than a step

    def _update(self) -> None:
        try:
            self._optimise_again()
        except USER_ERRORS as error:
            self.unknown.append(one_line(error))
        for parameter in self.trains:
            parameter.grad = None


def _state_bytes(optimizers: list[Optimizer]) -> int:
    """Return the bytes that all optimizers' state takes."""
    values = [x for one in optimizers for state in one.state.values() for x in state.values() if isinstance(x, Tensor)]
    return sum(x.numel() * x.itemsize for x in values)


def _no_optimiser() -> Optimizer:
    return torch.optim.SGD([torch.zeros(0, requires_grad=True)], lr=0.0)


def _some_loss(module: Any, batch: object) -> Tensor:
    """Return the loss of a training step; raise `NotImplementedError` if the step returns None."""
    loss = loss_of(module, batch)
    if loss is None:
        raise NotImplementedError("training_step returns None")
    return loss  # type: ignore[no-any-return]


def _backward_if_any(loss: Tensor) -> None:
    if loss.requires_grad:
        _backward(loss)


def _of_optimiser(why: str) -> str:
    return f"the optimiser's step cannot be followed without values ({why}): {_SLOTS} values are assumed for each trained one"


def _backward(loss: torch.Tensor) -> None:
    """Run the backward pass so that active torch modes also see recomputed blocks, unlike in `Tensor.backward`."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


@contextmanager
def _fused_without_values() -> Iterator[None]:
    """Let fused optimizers take tensors without values in this context; torch has a list of devices that it checks them by."""
    optimizer: Any = import_module("torch.optim.optimizer")
    devices = optimizer._get_fused_kernels_supported_devices
    optimizer._get_fused_kernels_supported_devices = lambda: [*devices(), "meta"]
    try:
        yield
    finally:
        optimizer._get_fused_kernels_supported_devices = devices


def _optimizers(answer: object) -> list[Optimizer]:
    """Return the optimizers that `configure_optimizers` has returned; raise `TypeError` if there are none."""
    if isinstance(answer, list | tuple) and len(answer) == 1:
        answer = answer[0]
    answer = answer.get("optimizer") if isinstance(answer, Mapping) else answer
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], list):
        answer = answer[0]
    found = [answer] if isinstance(answer, Optimizer) else answer
    if not isinstance(found, list | tuple) or not found or not all(isinstance(one, Optimizer) for one in found):
        raise TypeError("configure_optimizers returns no optimizer: return one")
    return list(found)
