"""Run the steps of one task: the user's own, in Lightning's order, with the method's hooks around them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from raafl.core.algorithm import Hook, Task
from raafl.core.local import SkippedBatch
from raafl.core.payload import Bundles
from raafl.core.types import Assignment
from raafl.data.federated import ClientData
from raafl.errors import BadInput
from raafl.local.context import TaskContext
from raafl.local.evaluation.record import widened
from raafl.local.proximal import ProximalTerm
from raafl.local.rng import RngStream
from raafl.local.sparse_gradients import backward_of
from raafl.local.trainable import TrainableSubmodel
from raafl.optimizers import step_scheduler
from raafl.submodel import FlatTensors

if TYPE_CHECKING:
    from raafl.local.train import LocalTrainer


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
    """The training steps of one task: the batches, the method's hook, and the module's own hooks around them.

    `per_epoch`: batches of an epoch.
    `num_batches`: done.
    `num_steps`: optimizer steps made; a step all of whose batches were skipped is none.
    """

    def __init__(self, trainer: LocalTrainer, task: PreparedTask) -> None:
        self._trainer, self._task = trainer, task
        self._built, self._context = task.built, task.context
        self._epochs, self._steps = trainer.length(task.assignment)
        self.per_epoch = task.data.num_batches(trainer.training.batch_size)
        self._num_expected = self._steps if self._steps is not None else self.per_epoch * (self._epochs or 1)
        self.num_batches = self.num_steps = self._num_losses = self._num_due = 0
        self._total: Tensor | float = 0.0
        self._extra: dict[str, Any] = {}  # what training_step returned beside the last loss
        self._outputs: dict[str, Any] = {}  # what on_train_batch_end is given; empty for a skipped batch
        self._has_gradient = False  # since the last step
        self._skips_epoch = False  # after on_train_batch_start has returned -1
        self._epoch_began = False
        self._pull = ProximalTerm.towards(task.received, task.built.module) if trainer.local.prox else None
        self._hook = self._make_hook()

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
        """Mean over the batches that had a loss; None = there was none."""
        return float(self._total) / self._num_losses if self._num_losses else None

    def run(self) -> dict[str, Any]:
        """Make all steps; return the hook's plain data for the server."""
        progress, task = self._context.progress, self._task
        progress.place = "batch 0"
        try:
            self._call("on_fit_start")
            self._call("on_train_start")
            batches = task.data.batches(
                self._trainer.generator, self._trainer.training.batch_size, self._epochs, self._steps
            )
            for batch, num_samples in batches:
                if self._context.process_group is None and self._context.is_stopped:
                    raise Stopped
                self._built.recorder.weight = float(num_samples)
                self._run_batch(batch)
                progress.place = f"batch {self.num_batches}"
            progress.place = "after its last batch"
            if self._epoch_began:  # steps have ended within an epoch
                self._end_epoch(is_whole=False)
            self._call("on_train_end")
            self._call("on_fit_end")
            return self._hook.finish()
        finally:
            self._hook.close()

    # ---- what the method's hook may call ----

    def _make_hook(self) -> Hook:
        trainer, task, built, group = self._trainer, self._task, self._built, self._context.process_group
        seen = Task(
            task.assignment,
            trainer.submodels,
            built.module,
            built.optimizer,
            task.received,
            self._num_expected,
            trainer.generator,
            loss=self._loss,
            backward=backward_of(
                lambda loss, _: self._backward(loss),
                built.module,
                built.optimizer,
                trainer.local,
                trainer.options.gradient_clip_val,
                1 if group is None else group.size,
            ),
            update=self._step,
            down=task.down,
            up=built.up,
            draws=lambda seed: RngStream(trainer.fabric.device, seed),
            link=self._context.link,
            receive=self._context.receive,
        )
        return trainer.local.hook(seen)

    def _loss(self, batch: object, index: int) -> Tensor:
        with self._trainer.forward_context():
            answer = self._built.module.training_step(batch, index % self.per_epoch)  # type: ignore[operator]
        if answer is None:
            raise SkippedBatch
        if not isinstance(answer, Mapping):
            return answer  # type: ignore[no-any-return]
        hooks = self._built.hooks
        if hooks is not None and "on_train_batch_end" in hooks.overridden:  # else its graph would live on
            self._extra = {name: value for name, value in answer.items() if name != "loss"}
        loss: Tensor = answer["loss"]
        return loss

    def _backward(self, loss: Tensor) -> None:
        hooks, scaler = self._built.hooks, self._trainer.scaler
        if hooks is None or "backward" not in hooks.overridden:
            self._trainer.fabric.strategy.backward(loss, None)
        else:
            hooks.call("backward", loss if scaler is None else scaler.scale(loss))

    def _step(self) -> None:
        """Make an optimizer step from the gradients that are there."""
        trainer, built, group = self._trainer, self._built, self._context.process_group
        optimizer, clip_val, hooks = built.optimizer, trainer.options.gradient_clip_val, built.hooks
        if trainer.scaler is not None:  # processes of one client have averaged scaled gradients: all see the same inf
            trainer.scaler.unscale_(optimizer)
        if self._pull is not None:
            self._pull.add_to_gradients(trainer.local.prox)
        if hooks is not None:
            hooks.before_step(optimizer, clip_val)
        elif clip_val is not None:
            torch.nn.utils.clip_grad_norm_(built.module.parameters(), clip_val)
        trainer.fabric.strategy.optimizer_step(optimizer)
        if hooks is None or not hooks.keeps_gradients:
            optimizer.zero_grad()
        if group is not None:
            group.stepped()

    # ---- batches ----

    def _run_batch(self, batch: object) -> None:
        """Train on one batch of data."""
        if not self._epoch_began:
            self._begin_epoch()
        is_last = self.index + 1 == self.per_epoch
        self._built.trainer.set(is_last_batch=is_last)
        if not self._skips_epoch:
            batch = self._built.transfer(batch, self._trainer.fabric.device)
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
        is_due = (index + 1) % self._trainer.options.accumulate_grad_batches == 0 or is_last
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
        accumulate = self._trainer.options.accumulate_grad_batches
        is_first = self.index % accumulate == 0
        try:
            loss = self._hook.loss(batch, self.num_batches)
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
            self._hook.backward(loss)
        self._has_gradient = True
        if process_group is not None and is_due and process_group.average(self._context.is_stopped):
            raise Stopped  # all together
        if hooks is None:  # nobody asks for either
            return None
        hooks.call("on_after_backward")
        self._outputs, self._extra = {"loss": loss.detach(), **self._extra}, {}
        return loss.detach()

    def _update(self) -> None:
        if self._has_gradient:
            self.num_steps += 1
            self._hook.update()
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
