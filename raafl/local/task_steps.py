"""Run the steps of one task: the user's own, in Lightning's order, with the method's hooks around them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from raafl.core.algorithm import Hook, Local, Task, Training
from raafl.core.local import SkippedBatch
from raafl.core.payload import Bundles
from raafl.core.types import Assignment
from raafl.data.federated import ClientData
from raafl.errors import BadInput
from raafl.local.context import TaskContext
from raafl.local.evaluation.record import widened
from raafl.local.options import FabricOptions
from raafl.local.proximal import ProximalTerm
from raafl.local.rng import RngStream
from raafl.local.sparse_gradients import backward_of
from raafl.local.trainable import TrainableSubmodel
from raafl.optimizers import step_scheduler
from raafl.submodel import FlatTensors, Submodels

if TYPE_CHECKING:
    from lightning.fabric import Fabric


class Stopped(Exception):
    """Raised to end a task early, because its result is no longer needed."""


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """A task together with the module that trains it."""

    assignment: Assignment  # assignment of the task
    received: FlatTensors  # values of the submodel's tensors, as the client received them; not changed
    down: Bundles  # tensors that the method sends in addition to the submodel, by name; not changed
    data: ClientData  # data of the client, or this process's share of it
    context: TaskContext  # stop event, link to the server, and processes of the task
    built: TrainableSubmodel  # module of the task's submodel, with its optimizer


class TaskSteps:
    """Runner of the training steps of tasks, on one device and with one method."""

    submodels: Submodels
    local: Local
    training: Training
    options: FabricOptions
    fabric: Fabric
    _mixed = False
    _generator: torch.Generator

    def length(self, assignment: Assignment) -> tuple[int | None, int | None]:
        """Return the number of epochs and the number of steps of a task, one of which is None."""
        epochs, steps = assignment.num_epochs, assignment.num_steps
        if epochs is None and steps is None:
            epochs, steps = self.training.num_epochs, self.training.num_steps
        return (epochs, None) if steps is None else (None, steps)

    def announce(self, built: TrainableSubmodel, assignment: Assignment, data: ClientData) -> None:
        """Set a task's length in the object that stands in for the module's Lightning Trainer.

        Call it before `TrainableSubmodel.reset`, which rebuilds an optimizer or scheduler that reads this length.
        """
        epochs, steps = self.length(assignment)
        per_epoch, accumulate = data.num_batches(self.training.batch_size), self.options.accumulate_grad_batches
        num_whole, rest = divmod(steps or 0, per_epoch) if epochs is None else (epochs, 0)
        num_steps = num_whole * math.ceil(per_epoch / accumulate) + math.ceil(rest / accumulate)
        clip_val = self.options.gradient_clip_val
        built.trainer.stage("training")
        built.trainer.set(
            current_epoch=0,
            global_step=0,
            is_last_batch=False,
            num_training_batches=per_epoch,
            estimated_stepping_batches=num_steps,
            max_epochs=num_whole + bool(rest),
            max_steps=-1 if steps is None else num_steps,
            accumulate_grad_batches=accumulate,
            gradient_clip_val=clip_val,
            precision=self.options.precision,
        )

    def _steps(self, task: PreparedTask) -> tuple[int, float | None, dict[str, Any]]:
        """Do the local steps; return the number of optimizer steps, the mean loss (None without any), and the hook's answer."""
        context, progress, data = task.context, task.context.progress, task.data
        epochs, steps = self.length(task.assignment)
        per_epoch = data.num_batches(self.training.batch_size)
        num_batches = steps if steps is not None else per_epoch * (epochs or 1)
        loop = _Loop(self, task, per_epoch, num_batches)
        loop.hook = self._hook(task, num_batches, loop)
        progress.place = "batch 0"
        try:
            loop.begin()
            for batch, num_samples in data.batches(self._generator, self.training.batch_size, epochs, steps):
                if context.process_group is None and context.is_stopped:
                    raise Stopped
                task.built.recorder.weight = float(num_samples)
                loop.run(batch)
                progress.place = f"batch {loop.num_batches}"
            progress.place = "after its last batch"
            loop.end()
            return loop.num_steps, loop.mean_loss, loop.hook.finish()
        finally:
            loop.hook.close()

    def _hook(self, task: PreparedTask, num_batches: int, loop: _Loop) -> Hook:
        built, group = task.built, task.context.process_group
        pull = ProximalTerm.towards(task.received, built.module) if self.local.prox else None
        seen = Task(
            task.assignment,
            self.submodels,
            built.module,
            built.optimizer,
            task.received,
            num_batches,
            self._generator,
            loss=lambda batch, index: self._loss(built, loop, batch, index % loop.per_epoch),
            backward=backward_of(
                lambda loss, _: self._backward(built, loss),
                built.module,
                built.optimizer,
                self.local,
                self.options.gradient_clip_val,
                1 if group is None else group.size,
            ),
            update=lambda: self._update(task, pull),
            down=task.down,
            up=built.up,
            draws=lambda seed: RngStream(self.fabric.device, seed),
            link=task.context.link,
            receive=task.context.receive,
        )
        return self.local.hook(seen)

    def _loss(self, built: TrainableSubmodel, loop: _Loop, batch: object, index: int) -> Tensor:
        with self.fabric.strategy.precision.forward_context() if self._mixed else nullcontext():
            answer = built.module.training_step(batch, index)  # type: ignore[operator]
        if answer is None:
            raise SkippedBatch
        if not isinstance(answer, Mapping):
            return answer  # type: ignore[no-any-return]
        if built.hooks is not None and "on_train_batch_end" in built.hooks.overridden:  # else its graph would live on
            loop.extra = {name: value for name, value in answer.items() if name != "loss"}
        loss: Tensor = answer["loss"]
        return loss

    def _backward(self, built: TrainableSubmodel, loss: Tensor) -> None:
        if built.hooks is None or "backward" not in built.hooks.overridden:
            self.fabric.strategy.backward(loss, None)
        else:
            built.hooks.call("backward", loss if self._scaler is None else self._scaler.scale(loss))

    @property
    def _scaler(self) -> Any:  # of 16-mixed
        return getattr(self.fabric.strategy.precision, "scaler", None)

    def _update(self, task: PreparedTask, pull: ProximalTerm | None) -> None:
        built, group = task.built, task.context.process_group
        optimizer, clip_val, hooks = built.optimizer, self.options.gradient_clip_val, built.hooks
        if self._scaler is not None:  # processes of one client have averaged scaled gradients: all see the same inf
            self._scaler.unscale_(optimizer)
        if pull is not None:
            pull.add_to_gradients(self.local.prox)
        if hooks is not None:
            hooks.before_step(optimizer, clip_val)
        elif clip_val is not None:
            torch.nn.utils.clip_grad_norm_(built.module.parameters(), clip_val)
        self.fabric.strategy.optimizer_step(optimizer)
        if hooks is None or not hooks.keeps_gradients:
            optimizer.zero_grad()
        if group is not None:
            group.stepped()


class _Loop:
    """The batches of one task, with where it is among them.

    `per_epoch`: batches of an epoch.
    `num_batches`: done.
    `num_steps`: optimizer steps made; a step all of whose batches were skipped is none.
    `mean_loss`: over the batches that had one; None = there was none.
    `extra`: what training_step returned beside the last loss.
    """

    hook: Hook  # the method's

    def __init__(self, steps: TaskSteps, task: PreparedTask, per_epoch: int, num_expected: int) -> None:
        self._steps, self._built, self._context = steps, task.built, task.context
        self.per_epoch, self._num_expected = per_epoch, num_expected
        self.extra: dict[str, Any] = {}
        self.num_batches = self.num_steps = self._num_losses = self._num_due = 0
        self._total: Tensor | float = 0.0
        self._outputs: dict[str, Any] = {}  # what on_train_batch_end is given; empty for a skipped batch
        self._has_gradient = self._skips_epoch = (
            False  # since the last step; after on_train_batch_start has returned -1
        )
        self._epoch_began = False

    @property
    def epoch(self) -> int:
        """Index of the current epoch, from 0."""
        return self.num_batches // self.per_epoch

    @property
    def index(self) -> int:
        """Index of the current batch in the epoch, from 0."""
        return self.num_batches % self.per_epoch

    @property
    def mean_loss(self) -> float | None:
        return float(self._total) / self._num_losses if self._num_losses else None

    def begin(self) -> None:
        """Call the module's hooks that precede the first batch."""
        self._call("on_fit_start")
        self._call("on_train_start")

    def end(self) -> None:
        """Call the module's hooks that follow the last batch."""
        if self._epoch_began:  # steps have ended within an epoch
            self._end_epoch(is_whole=False)
        self._call("on_train_end")
        self._call("on_fit_end")

    def run(self, batch: object) -> None:
        """Train on one batch of data."""
        if not self._epoch_began:
            self._begin_epoch()
        is_last = self.index + 1 == self.per_epoch
        self._built.trainer.set(is_last_batch=is_last)
        if not self._skips_epoch:
            batch = self._built.transfer(batch, self._steps.fabric.device)
            self._skips_epoch = self._call("on_train_batch_start", batch, self.index) == -1
            if self._skips_epoch and self._context.process_group is not None:
                raise BadInput(self._not_together("on_train_batch_start returns -1, to skip the rest of the epoch"))
            if self._skips_epoch:
                self._schedule("step", self.index, plateau=False)
            else:
                self._train(batch, is_last)
        if is_last:
            self._end_epoch(is_whole=True)
        self.num_batches += 1

    def _train(self, batch: object, is_last: bool) -> None:
        index = self.index
        is_due = (index + 1) % self._steps.options.accumulate_grad_batches == 0 or is_last
        is_due = is_due or self.num_batches + 1 == self._num_expected
        hooks = self._built.hooks
        if is_due and hooks is not None and "optimizer_step" in hooks.overridden:
            hooks.optimizer_step(
                self._built.optimizer, self.epoch, index, lambda: self._compute(batch, is_due), self._update
            )
        else:
            self._compute(batch, is_due)
            if is_due:
                self._update()
        outputs, self._outputs = self._outputs, {}
        if is_due:
            self._num_due += 1
            self._built.trainer.set(global_step=self._num_due)
            self._schedule("step", index, plateau=False)
        if is_last:
            self._schedule("epoch", self.epoch, plateau=False)
        self._call("on_train_batch_end", outputs, batch, index)
        if is_due:
            self._schedule("step", index, plateau=True)

    def _compute(self, batch: object, is_due: bool) -> Tensor | None:
        """Compute loss and gradients of a batch; return the loss, None where the batch is skipped."""
        process_group, hooks, module = self._context.process_group, self._built.hooks, self._built.module
        accumulate = self._steps.options.accumulate_grad_batches
        is_first = self.index % accumulate == 0
        try:
            loss = self.hook.loss(batch, self.num_batches)
        except SkippedBatch:
            if process_group is not None:
                raise BadInput(self._not_together("training_step returns None, to skip a batch")) from None
            if hooks is not None and is_first:  # as Lightning: the rest of the window must not add to the last step's
                hooks.zero_grad(self._built.optimizer, self.epoch, self.index)
            return None
        loss = loss if process_group is None else process_group.weighed(loss)
        self._total = self._total + widened(loss)
        self._num_losses += 1
        loss = loss / accumulate if accumulate > 1 else loss
        if hooks is not None:
            if is_first:
                hooks.zero_grad(self._built.optimizer, self.epoch, self.index)
            hooks.call("on_before_backward", loss)
        with process_group.summing(module) if process_group is not None and is_due else nullcontext():
            self.hook.backward(loss)
        self._has_gradient = True
        if process_group is not None and is_due and process_group.average(self._context.is_stopped):
            raise Stopped  # all together
        if hooks is None:  # nobody asks for either
            return None
        hooks.call("on_after_backward")
        self._outputs, self.extra = {"loss": loss.detach(), **self.extra}, {}
        return loss.detach()

    def _update(self) -> None:
        if self._has_gradient:
            self.num_steps += 1
            self.hook.update()
        self._has_gradient = False

    def _schedule(self, interval: str, index: int, *, plateau: bool) -> None:
        """Step the schedulers that are due, those that go by a metric or the others."""
        for schedule in self._built.schedulers:
            if (schedule.monitor is None) == plateau or not schedule.is_due(interval, index):
                continue
            metric = None
            if schedule.monitor is not None:
                metric = self._built.recorder.latest.metrics().get(schedule.monitor)
                if metric is None:  # said before the run
                    continue
            if self._built.hooks is None or "lr_scheduler_step" not in self._built.hooks.overridden:
                step_scheduler(schedule.scheduler, metric)
            else:
                self._built.hooks.call("lr_scheduler_step", schedule.scheduler, metric)

    def _begin_epoch(self) -> None:
        self._epoch_began, self._skips_epoch = True, False
        self._built.trainer.set(current_epoch=self.epoch)
        self._built.recorder.latest.begin_epoch()
        self._call("on_train_epoch_start")

    def _end_epoch(self, *, is_whole: bool) -> None:
        self._call("on_train_epoch_end")
        if is_whole:
            if self._skips_epoch:
                self._schedule("epoch", self.epoch, plateau=False)
            self._schedule("epoch", self.epoch, plateau=True)
        self._built.trainer.set(current_epoch=self.epoch + 1)
        self._epoch_began = False

    def _call(self, name: str, *args: object) -> object:
        return None if self._built.hooks is None else self._built.hooks.call(name, *args)

    def _not_together(self, what: str) -> str:
        kind = type(self._built.module).__name__
        return f"{kind}.{what}, but this client spans several processes: join with one process, without torchrun"
