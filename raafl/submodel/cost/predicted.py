"""Predict the cost of training a submodel from its small module on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from raafl.errors import USER_ERRORS
from raafl.submodel.cut.copying import persistent_buffers
from raafl.submodel.flat import FlatTensors
from raafl.submodel.isolated_run import (
    call,
    draw,
    loss_of,
    one_line,
    seeded,
    settle,
    undisturbed,
)
from raafl.submodel.nested_batch import batch_tensors, meta_batch, num_samples, repeated
from raafl.submodel.spec import FULL, Spec, SpecError
from raafl.submodel.user_caches import uncached

if TYPE_CHECKING:
    from raafl.submodel.cost.ledger import Ledger
    from raafl.submodel.flat import Layout

Make = Callable[..., Any]

_SLOTS = 2
"""Values that an optimiser is taken to keep for each trained one, as Adam does, where its step cannot run on the meta device."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted cost of training one submodel with one batch size.

    Attributes:
        params: number of parameters in the submodel.
        flops_per_sample: FLOPs of matrix products, convolutions and the like in the forward and backward pass of one
            sample; in a step without any, as in matrix factorisation, FLOPs of elementwise operations.
        peak_bytes: largest memory of a client's tensors during a task: received values, frozen parameters that the
            client has, the module, the batch, activations, gradients, temporaries and the optimiser's state. The
            libraries' own memory is not included.
        down_bytes: number of bytes that a client receives.
        up_bytes: number of bytes that a client sends.
        moved_bytes_per_sample: bytes that all operations of a step read and write, per sample, including the
            optimiser's; each operation's bytes are scaled to its time.
        padding_flops_per_sample: additional FLOPs of convolutions on padded channels, per sample.
        num_exchanges: number of round trips to the server during a task, such as one per batch in split learning.
        kernels_per_sample: number of operations of a step, without views, per sample. The optimiser counts one
            operation of each kind, since on a GPU it updates all parameters at once.
        guessed: description of what is only estimated, and why the step could not be traced; "" = nothing.
    """

    params: int
    flops_per_sample: float
    peak_bytes: int
    down_bytes: int
    up_bytes: int
    moved_bytes_per_sample: float = 0.0
    padding_flops_per_sample: float = 0.0
    num_exchanges: int = 0
    kernels_per_sample: float = 0.0
    guessed: str = ""


_MOST_FLOPS = 2e11
"""Of a step that is followed on drawn values: a few seconds of a processor's core."""

_BY_PARAMETERS = "6 FLOPs count for each parameter that trains, and no activations"


@dataclass(frozen=True, slots=True)
class Step:
    """FLOPs, memory and traffic of one training step, not counting the module and the batch themselves.

    Attributes:
        flops: FLOPs of forward and backward pass; None = they could not be run.
        moved_bytes: bytes that all operations move, weighted by time (see `raafl.submodel.cost.kernels.traffic`).
        peak_bytes: largest memory that is alive at once, from the second step on.
        padding_flops: FLOPs of forward and backward pass on padded channels.
        num_kernels: number of operations in forward and backward pass, plus the number of different operations in the
            optimiser's step.
        guessed: description of what is only estimated, and why; "" = nothing.
    """

    flops: float | None
    moved_bytes: int
    peak_bytes: int
    padding_flops: float = 0.0
    num_kernels: int = 0
    guessed: str = ""


def predict(
    make: Make, spec: Spec, example_batch: object, batch_size: int, layouts: Mapping[str, Layout], names: frozenset[str],
    idle_bytes: int, is_whole: bool = True,
) -> Cost:  # fmt: skip
    """Predict the cost of training a submodel by running one step without values, on the meta device.

    `training_step`, its backward pass and the optimiser's step are run, and the memory in use is tracked. A step that
    needs values, for example to assign samples to experts, is run on random ones instead. If that also fails, the cost
    is estimated: the FLOPs are three times those of a forward pass, and all gradients are assumed to be in memory
    together with all activations. Without an example batch, the estimate is 6 FLOPs for each trained parameter, and no
    memory for activations.

    Args:
        make: function that builds a submodel's module, on the meta device or in a given storage.
        spec: submodel to train.
        example_batch: a batch of the data, of any size; None = there is none.
        batch_size: batch size whose cost is predicted.
        layouts: layouts of the tensors that are ``present``, ``sent`` and ``trained``.
        names: names of the parameters among these tensors.
        idle_bytes: bytes of frozen parameters that the client has in memory but does not use in this submodel.
        is_whole: whether the submodel's step is the whole model's, and may be run on random values.

    Raises:
        SpecError: the step works with the whole model but fails with ``spec``.
    """
    trained, down_bytes = layouts["trained"], layouts["sent"].num_bytes
    from raafl.submodel.find.trace import LARGE

    params = sum(entry.numel for entry in layouts["present"].entries if entry.name in names)
    batch = None if example_batch is None else meta_batch(example_batch, batch_size)

    def on_values() -> tuple[Step, int] | None:
        if not is_whole or sum(entry.numel for entry in layouts["present"].entries) > LARGE:
            return None
        return _on_values(lambda: make(spec, FlatTensors.zeros(layouts["present"])), example_batch, batch_size)

    with undisturbed():
        step, held_bytes = _cold_step(make, spec, batch, on_values)
    flops = step.flops
    if flops is None:
        flops = 6.0 * batch_size * sum(entry.numel for entry in trained.entries if entry.name in names)
    samples = max(batch_size, 1)
    peak = down_bytes + idle_bytes + held_bytes + step.peak_bytes
    return Cost(
        params, flops / samples, peak, down_bytes, trained.num_bytes, step.moved_bytes / samples,
        step.padding_flops / samples, kernels_per_sample=step.num_kernels / samples, guessed=step.guessed,
    )  # fmt: skip


def _cold_step(
    make: Make, spec: Spec, batch: object, on_values: Callable[[], tuple[Step, int] | None]
) -> tuple[Step, int]:
    """Return what `_step` does, as if no step had run before, whose tensors the user's code may have cached."""
    run = _Run(make(spec), batch)
    found = failure = None
    with uncached(run.module) as hidden:
        try:
            found = _step(run, make, spec, batch, on_values)
        except SpecError as error:
            failure = error
    if hidden.any and (found is None or found[0].guessed):  # it may have been no cache, but a table of constants
        with uncached(run.module, is_cold=False):
            return _step(_Run(make(spec), batch), make, spec, batch, on_values)
    if found is None:
        assert failure is not None
        raise failure
    return found


def _step(
    run: _Run, make: Make, spec: Spec, batch: object, on_values: Callable[[], tuple[Step, int] | None]
) -> tuple[Step, int]:
    """Return a step of the submodel, run as far as it can be, and the bytes of module and batch.

    Args:
        run: step to follow first.
        make: function that builds a submodel's module.
        spec: submodel to train.
        batch: batch without values; None = there is none.
        on_values: function that runs the step on drawn values; None is its answer where it cannot.
    """
    failure: BaseException | None = None
    # tensors that the user's code makes without saying where are best on the meta device as well, but not always
    for default in ("meta", "cpu") if batch is not None else ():
        try:
            step = run.step(default)
        except USER_ERRORS as error:
            run, failure = _Run(make(spec), batch), error
        else:
            if not run.ledger.asked:
                return step, run.held_bytes
            return on_values() or (_with_some(make, spec, batch, default, step), run.held_bytes)
    if failure is not None and (followed := on_values()) is not None:
        return followed
    if failure is not None and spec != FULL and _runs_whole(make, batch):
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
            run = _Run(make(spec), batch)
            step = run.update()
    else:
        step = run.update()
    return replace(step, guessed="; ".join(filter(None, (f"{why}: {instead}", step.guessed)))), run.held_bytes


def _on_values(zeroed: Callable[[], Any], example_batch: object, batch_size: int) -> tuple[Step, int] | None:
    """Follow a step on drawn values and the example's samples over and over; None = it does not run, or takes too long."""
    num = num_samples(example_batch)
    try:
        if batch_size > num > 0:
            few, _ = _followed(zeroed(), example_batch, num)
            if few.flops is None or few.flops * batch_size / num > _MOST_FLOPS:
                return None
        return None if num == 0 else _followed(zeroed(), example_batch, batch_size)
    except USER_ERRORS:
        return None


def _followed(module: nn.Module, example_batch: object, batch_size: int) -> tuple[Step, int]:
    """Draw a module's values, and follow its step on so many of the example's samples, each as often as need be."""
    seeded(5)
    draw(module, 0)
    for buffer in persistent_buffers(module).values():  # whose values are not known here
        if buffer.is_floating_point() or buffer.dtype == torch.bool:
            buffer.fill_(1)  # code may divide by it
    run = _Run(module, repeated(example_batch, batch_size))
    return run.step("cpu", every=True), run.held_bytes


def _with_some(make: Make, spec: Spec, batch: object, default: str, step: Step) -> Step:
    """Follow a step once more that has asked whether any of some values are so, as if they were; return it, or ``step``."""
    run = _Run(make(spec), batch)
    run.ledger.some = True
    try:
        return run.step(default)
    except NotImplementedError as error:  # such as how many samples an expert gets
        guess = _Run(make(spec), batch).update()
        return replace(guess, guessed=f"{_not_followed(error)}: {_BY_PARAMETERS}")
    except USER_ERRORS:  # the user's own, for values that are not as they should be
        return step


def _not_followed(error: BaseException) -> str:
    return f"the training step cannot be followed without values ({one_line(error)})"


def _runs_whole(make: Make, batch: object) -> bool:
    for default in ("meta", "cpu"):
        try:
            _Run(make(FULL), batch).step(default)
            return True
        except USER_ERRORS:
            continue
    return False


class _Run:
    """One step of the small module, on the meta device or with values."""

    def __init__(self, module: Any, batch: object) -> None:
        from raafl.submodel.cost.fused import FusedKernels
        from raafl.submodel.cost.ledger import Ledger, storage_key

        self.module, self.batch = module, batch
        settle(self.module)
        held = [*self.module.parameters(), *self.module.buffers(), *batch_tensors(batch)]
        held = [x for x in held if x.layout == torch.strided]  # the storage of another cannot be asked for
        self.held_bytes = sum({storage_key(x): x.untyped_storage().nbytes() for x in held}.values())
        self.trains = [p for p in self.module.parameters() if p.requires_grad]
        self.gradient_bytes = sum(p.numel() * p.itemsize for p in self.trains)
        self.ledger: Ledger = Ledger(held)
        self.fused = FusedKernels()

    def step(self, default: str, every: bool = False) -> Step:
        """Run a training step, its backward pass and the optimiser's step; return their FLOPs, memory and traffic.

        Args:
            default: device on which the user's code creates new tensors.
            every: whether to give a gradient to parameters without one, since other samples would reach them, as in a
                mixture of experts.
        """

        def passes() -> None:
            with uncached(self.module, is_cold=False), torch.device(default):
                loss = loss_of(self.module, self.batch)
                if loss.requires_grad:
                    _backward(loss)

        peak_bytes = self._peak_of(passes)
        if every:
            self._give_gradients()
        work = self.ledger
        return self._updated(work.task_flops, work.moved_bytes, peak_bytes, work.padding_flops, work.kernels.total())

    def forward(self) -> Step:
        """Estimate the cost of a training step from a forward pass, counted three times, and the optimiser's step."""
        peak_bytes = self._peak_of(lambda: call(self.module, self.batch)) + self.gradient_bytes
        work = self.ledger
        times = 3 * work.kernels.total()
        return self._updated(3.0 * work.task_flops, 3 * work.moved_bytes, peak_bytes, 3.0 * work.padding_flops, times)

    def update(self) -> Step:
        """Estimate the cost of a training step of which only the optimiser's step can be run.

        The forward and backward pass count as three reads of all parameters.
        """
        values = sum(p.numel() * p.itemsize for p in self.module.parameters())
        return self._updated(None, 3 * values, self.gradient_bytes)

    def _updated(
        self, flops: float | None, moved_bytes: int, pass_bytes: int, padding_flops: float = 0.0, num_kernels: int = 0
    ) -> Step:
        """Return the step with its update, whose state is there throughout from the second step on."""
        if all(parameter.grad is None for parameter in self.trains):  # there was no backward pass
            self._give_gradients()
        gradients, guessed = self.ledger.live_bytes, ""
        try:
            update_bytes = self._peak_of(self._optimise)
            state, before = self.ledger.live_bytes - gradients, self.ledger.moved_bytes
            self.ledger.kernels.clear()
            self._peak_of(self._optimise_again)  # with its state there
            moved_bytes += self.ledger.moved_bytes - before
            num_kernels += len(self.ledger.kernels)
        except USER_ERRORS as error:
            state = _SLOTS * self.gradient_bytes
            update_bytes = gradients + state
            moved_bytes += 3 * self.gradient_bytes + 2 * state
            why = f"the optimiser's step cannot be followed without values ({one_line(error)})"
            guessed = f"{why}: {_SLOTS} values are assumed for each trained one"
        return Step(flops, moved_bytes, max(pass_bytes + state, update_bytes), padding_flops, num_kernels, guessed)

    def _give_gradients(self) -> None:
        """Give those parameters a gradient that have none."""
        for parameter in self.trains:
            if parameter.grad is None:
                with self.ledger:
                    parameter.grad = torch.empty_like(parameter)

    def _optimise(self) -> None:
        with torch.device("cpu"):  # where optimisers count their steps
            self.optimizers = _optimizers(self.module.configure_optimizers())
        self._optimise_again()

    def _optimise_again(self) -> None:
        with torch.device("cpu"):
            for optimizer in self.optimizers:
                optimizer.step()

    def _peak_of(self, call: Callable[[], Any]) -> int:
        """Return the most bytes alive at once during a call."""
        self.ledger.peak_bytes = self.ledger.live_bytes
        with self.ledger, self.fused:
            call()
        return self.ledger.peak_bytes


def _backward(loss: torch.Tensor) -> None:
    """Run the backward pass within the modes that are entered: `Tensor.backward` leaves them, and checkpointed blocks run anew."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _optimizers(answer: object) -> list[Optimizer]:
    """Return the optimisers in an answer of `configure_optimizers`; raises `TypeError` where there are none."""
    if isinstance(answer, Mapping):
        answer = answer.get("optimizer")
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], list):
        answer = answer[0]
    found = [answer] if isinstance(answer, Optimizer) else answer
    if not isinstance(found, list | tuple) or not found or not all(isinstance(one, Optimizer) for one in found):
        raise TypeError("configure_optimizers returns no optimizer: return one")
    return list(found)
