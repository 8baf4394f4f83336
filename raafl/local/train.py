"""Train one task on a client: a pure function of (assignment, received payload, the client's data)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn

from raafl.core.algorithm import Hook, Local, Task, Training
from raafl.core.local import SkippedBatch
from raafl.core.options import FabricOptions
from raafl.core.payload import Bundles
from raafl.core.types import Assignment, Update
from raafl.data.federated import ClientData, Sized
from raafl.errors import BadInput
from raafl.local.context import ALONE, Stopped, TaskContext
from raafl.local.evaluate import LOSS, MAX_LOGGED
from raafl.local.record import addend
from raafl.local.trainable import ProximalTerm, TrainableSubmodel, backward_of
from raafl.module_hooks import backward, step, step_scheduler, zero_grad
from raafl.rng import RngStream, current, seed_everything
from raafl.submodel import FlatTensors, Spec, Submodels

if TYPE_CHECKING:
    from raafl.local.client_group import Shards
    from raafl.submodel.frozen import FrozenBase

__all__ = ["FabricOptions", "LocalTrainer", "Stopped", "TrainableSubmodel"]

MAX_BUILT = 16
"""Largest number of small modules that a process which trains for many clients keeps built."""


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """A task together with the module that trains it."""

    assignment: Assignment  # the task's id, client, submodel, seed and length
    received: FlatTensors  # values of the submodel as the client received them, which training leaves unchanged
    down: Bundles  # tensors that the method sends beside the submodel, by name, which training leaves unchanged
    data: ClientData  # data of the client, or the share of this process
    context: TaskContext  # stop event, link to the server, and processes of the task
    built: TrainableSubmodel  # module of the submodel, with its optimizer


class LocalTrainer:
    """Trainer that runs the tasks of any clients. It reuses submodels' modules, but no task influences the next one.

    Attributes:
        shards: processes over which each module is sharded; None = this process holds whole modules.
        capture: `raafl.local.captured.Capture`, which trains tasks with steps that are CUDA graphs; None = eager steps.
        feed: `raafl.local.device_data.Feed`, which brings batches to a GPU; None = they are moved as they come.
    """

    def __init__(
        self,
        submodels: Submodels,
        local: Local,
        sends: Literal["values", "delta"],
        training: Training,
        options: FabricOptions | None = None,
        *,
        max_built: int = 1,
        pools: bool = False,
    ) -> None:
        """Create a trainer on a single device, with Fabric.

        `sends`: what the merge needs, "values" or "delta". `training`: length of a task, unless its assignment gives
        one.
        `max_built`: number of submodels whose modules are kept; a rank that may hold only its fragment keeps one.
        `pools`: whether `raafl.parts.protect.assembly` merges running statistics, which are then sent in its form.
        """
        from lightning.fabric import Fabric
        from lightning.fabric.plugins.environments.lightning import LightningEnvironment

        self.submodels, self.local, self.sends, self.training = submodels, local, sends, training
        self.pools = pools
        self.options = options or FabricOptions()
        self.fabric = Fabric(
            accelerator=self.options.accelerator,
            devices=1 if self.options.device is None else [self.options.device],
            precision=self.options.precision,  # type: ignore[arg-type]
            # by default Fabric looks for a cluster, and with mpi4py installed starts an MPI daemon beside each process
            plugins=[LightningEnvironment()],
        )
        self._strategy = self.fabric.strategy
        self.shards: Shards | None = None
        self.payload = local.payload(submodels)
        self._pooling = submodels.pooling() if pools else None
        self._mixed = self.options.precision not in ("32-true", "32")
        self._built: OrderedDict[Spec, TrainableSubmodel] = OrderedDict()
        self._max_built = max_built
        self.generator = torch.Generator()
        self._checked: WeakSet[FrozenBase] = WeakSet()
        self.capture: Any = None
        self.feed: Any = None

    def run(
        self, assignment: Assignment, received: FlatTensors, data: ClientData, context: TaskContext = ALONE
    ) -> Update:
        """Train a task and return the update. Its tensors are valid until the next call of `run`.

        Args:
            assignment: assignment of the task.
            received: values in the layout ``payload.layout(spec, "sent")``; not changed.
            data: data of the client.
            context: stop event, link to the server, and processes of the task.

        Raises:
            BadInput: training writes to a frozen parameter, or changes state that cannot be reset.
            Stopped: the stop event of ``context`` was set.
        """
        with current(self.fabric.device):
            run = self.run_once if self.capture is None else self.capture.run
            return run(assignment, received, data, context)

    def run_once(
        self, assignment: Assignment, received: FlatTensors, data: ClientData, context: TaskContext, make: Any = None
    ) -> Update:
        """Train a task; see `run`. ``make(trainer, task)`` returns its `TaskSteps`; None = they are eager."""
        process_group, context.progress.place = context.process_group, "before its first batch"
        data = data if process_group is None else process_group.begin(assignment, received, data)
        built = self.built(assignment.spec)
        received, down = self.payload.split(received, assignment.spec, "sent")
        task = PreparedTask(assignment, received, down, data, context, built)
        self.announce(built, assignment, data)
        built.reset(received, assignment.seed, assignment.lr_scale)
        # before seeding: the data set may draw random numbers when its classes are read
        masking: AbstractContextManager[list[int]] = nullcontext([])
        if self.local.masked:
            from raafl.core.masked_loss import masked

            masking = masked(built.module, data.classes(), built.masks)
        seed_everything(
            assignment.seed if process_group is None else process_group.seed(assignment.seed), self.fabric.device
        )
        self.generator.manual_seed(assignment.seed)
        precision: Any = self._strategy.precision
        # a scaler adapts over time, so each task gets a new one, and depends on no earlier task
        if self.scaler is not None:
            precision.scaler = torch.amp.GradScaler(self.fabric.device.type)
        with masking as classes:
            steps: TaskSteps = (make or TaskSteps)(self, task)
            extra = steps.run()
            loss = steps.mean_loss
        if process_group is not None:
            loss = process_group.finish(built.module, 0.0 if loss is None else float(loss), built.recorder)
        return self.build_update(task, steps.num_steps, loss, extra, classes)

    def build_update(
        self, task: PreparedTask, num_steps: int, loss: Tensor | float | None, extra: dict[str, Any], classes: list[int]
    ) -> Update:
        """Build the update of a task after its last step.

        `loss` is None where every batch was skipped; `extra` is what the hook returned; a masked loss kept `classes`.
        """
        built, assignment, data = task.built, task.assignment, task.data
        extra |= {"classes": classes} if classes else {}  # `raafl.core.masked_loss.CLASSES`, not imported
        built.gather()
        built.check_fixed_statistics()
        losses, metrics = {} if loss is None else {LOSS: loss}, dict[str, float]()
        if data.test is not None and task.context.link is None and self.local.evaluates_on_client(assignment.extra):
            metrics, losses = {name: float(x) for name, x in losses.items()} | built.recorder.means(MAX_LOGGED), {}
            from raafl.local.own_test import measure_part

            metrics |= measure_part(self, task, data.test)
        self._check_base(built)
        built.state.check()
        return self.answer(task, num_steps, losses, metrics, extra)

    def answer(self, task: PreparedTask, num_steps: int, losses: Any, metrics: dict[str, float], extra: Any) -> Update:
        """Build the update from the values in the task's module, the losses, the logged values, and the metrics known so far."""
        built, assignment = task.built, task.assignment
        with self._statistics_sent(built.trained):
            if self.sends == "delta":
                for dtype, buffer in built.trained.buffers.items():
                    buffer.sub_(task.received.buffers[dtype][: buffer.numel()].to(buffer.device))
        ids = assignment.id, assignment.client, assignment.incarnation
        update = Update(*ids, built.answer(), task.data.num_samples, num_steps, metrics, extra=extra)
        # read results once, after all work is queued, so that a GPU is waited for only once
        read, is_finite = built.recorder.finish(losses, MAX_LOGGED, update.tensors)
        update.metrics, update.refusal = metrics | read, None if is_finite else "non-finite"
        return update

    def announce(self, built: TrainableSubmodel, assignment: Assignment, data: ClientData) -> None:
        """Set a task's length in the object that stands in for the module's Lightning Trainer.

        Call it before `TrainableSubmodel.reset`, which rebuilds an optimizer or scheduler that reads this length.
        """
        epochs, steps = self.training.length(assignment)
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

    @property
    def pools_statistics(self) -> bool:
        """Whether running statistics are sent in the form that merges add up, such as second moments."""
        return self._pooling is not None

    @property
    def scaler(self) -> Any:
        """Scaler of losses in 16-mixed precision; None in others."""
        return getattr(self._strategy.precision, "scaler", None)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass in the run's precision."""
        return self._strategy.precision.forward_context() if self._mixed else nullcontext()

    def _check_base(self, built: TrainableSubmodel) -> None:
        """Raise `BadInput` if a task has changed the frozen base, which other tasks and clients share.

        Version counters are compared after each task, values only after the first: that finds writes through `.data`,
        which counters miss.
        """
        base, name = built.base, built.written_frozen()
        if name is None and base is not None and base not in self._checked:
            self._checked.add(base)
            name = base.changed(self.fabric.device)
        if name is not None:
            raise BadInput(
                f"parameter '{name}' has requires_grad=False, but training writes to it: make it a buffer, which is "
                "sent with the model, or set requires_grad=True"
            )

    def _statistics_sent(self, trained: FlatTensors) -> AbstractContextManager[None]:
        """Return a context in which running statistics are in the form in which they are sent, such as second moments."""
        return nullcontext() if self._pooling is None or not len(trained) else self._pooling.as_sent(trained)

    def release(self) -> None:
        """Release all modules that are kept for reuse, and return freed memory to the system."""
        from raafl.local.malloc import give_back

        self._built.clear()
        for one in (self.capture, self.feed):
            if one is not None:
                one.release()
        if self.fabric.device.type == "cuda":
            torch.cuda.empty_cache()
        give_back(0)

    def build(self, spec: Spec) -> TrainableSubmodel:
        """Build a new module for submodel ``spec``, for the caller alone; `built` returns the module that `run` uses."""
        if self.shards is not None:
            return self.shards.build(self.submodels, spec, self.local, self.payload, self.fabric)
        return TrainableSubmodel(self.submodels, spec, self.local, self.payload, self.fabric)

    def built(self, spec: Spec) -> TrainableSubmodel:
        """Return the module in which `run` trains submodel ``spec``: one kept from earlier tasks, or else a new one."""
        built = self._built.get(spec)
        if built is None:
            while len(self._built) >= self._max_built:
                self._built.popitem(last=False)
            built = self._built[spec] = self.build(spec)
        self._built.move_to_end(spec)
        return built


class TaskSteps:
    """The training steps of one task: the batches, the method's hook, and the module's own hooks around them.

    `per_epoch`: batches of an epoch.
    `num_batches`: done.
    `num_steps`: optimizer steps made; a step all of whose batches were skipped is none.
    """

    def __init__(self, trainer: LocalTrainer, task: PreparedTask) -> None:
        self._trainer, self._task = trainer, task
        self._built, self._context, self._scaler = task.built, task.context, trainer.scaler
        self._epochs, self._steps = trainer.training.length(task.assignment)
        self.per_epoch = task.data.num_batches(trainer.training.batch_size)
        self._num_expected = self._steps if self._steps is not None else self.per_epoch * (self._epochs or 1)
        self.num_batches = self.num_steps = self._num_losses = self._num_due = 0
        # as in Lightning, the same if an epoch ends within a step; `_by_step` sets the real number of batches
        self._divisor = trainer.options.accumulate_grad_batches
        self._total: Tensor | float = 0.0
        self._extra: dict[str, Any] = {}  # other values in the dict that training_step returned last
        self._outputs: dict[str, Any] = {}  # argument of on_train_batch_end; empty for a skipped batch
        self._has_gradient = False  # whether there was a backward pass since the last optimizer step
        self._skips_epoch = False  # set if on_train_batch_start returns -1
        self._clips: tuple[int, list[nn.Parameter]] = 0, []  # number of the optimizer's groups, and what is clipped
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
    def mean_loss(self) -> Tensor | float | None:
        """Mean over the batches that had a loss, not read from its device; None = there was none."""
        total = self._total if isinstance(self._total, Tensor) and self._total.is_cuda else float(self._total)
        return total / self._num_losses if self._num_losses else None

    def run(self) -> dict[str, Any]:
        """Make all steps; return the hook's plain data for the server."""
        progress, task = self._context.progress, self._task
        progress.place = "batch 0"
        try:
            self._call("on_fit_start")
            self._call("on_train_start")
            batches = (task.data.batches if self._trainer.feed is None else self._trainer.feed.of(task))(
                self._trainer.generator, self._trainer.training.batch_size, self._epochs, self._steps
            )
            for batch, num_samples in self._by_step(batches):
                if self._context.process_group is None and self._context.is_stopped:
                    raise Stopped
                self._built.recorder.weight = float(num_samples)
                self._run_batch(batch)
                progress.place = f"batch {self.num_batches}"
            progress.place = "after its last batch"
            if self._epoch_began:  # the task's number of steps ended within an epoch
                self._end_epoch(is_whole=False)
            self._call("on_train_end")
            self._call("on_fit_end")
            return self._hook.finish()
        finally:
            self._hook.close()

    def _by_step(self, batches: Iterator[Sized]) -> Iterator[Sized]:
        """Yield batches as the module's `on_step_batches` returns them; it gets all batches of an optimizer step at once."""
        see = getattr(self._built.module, "on_step_batches", None)
        if see is None:
            yield from batches
            return
        window: list[Sized] = []
        for number, batch in enumerate(batches):
            window.append(batch)
            if self._is_due(number):
                seen, self._divisor = see([batch for batch, _ in window]), len(window)
                yield from zip(seen, [num_samples for _, num_samples in window], strict=True)
                window.clear()

    def _is_due(self, number: int) -> bool:
        """Check whether the optimizer steps after batch ``number``, counted from 0."""
        index = number % self.per_epoch
        is_whole = (index + 1) % self._trainer.options.accumulate_grad_batches == 0
        return is_whole or index + 1 == self.per_epoch or number + 1 == self._num_expected

    # ---- called by the method's hook ----

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
                built.parameters,
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
        hooks, loss = self._built.hooks, answer["loss"] if isinstance(answer, Mapping) else answer
        # store these values only if this hook reads them, since they keep the autograd graph in memory
        if loss is not answer and hooks is not None and "on_train_batch_end" in hooks.overridden:
            self._extra = {name: value for name, value in answer.items() if name != "loss"}
        if not isinstance(loss, Tensor):  # the first batch, which was tried before the run, had another
            raise TypeError(f"training_step gives {type(loss).__name__}: return the loss, a tensor with one number")
        return loss

    def _backward(self, loss: Tensor) -> None:
        hooks, scaler = self._built.hooks, self._scaler
        if hooks is None or "backward" not in hooks.overridden:
            backward(loss, self._trainer.fabric.strategy)
        else:
            hooks.call("backward", loss if scaler is None else scaler.scale(loss))

    def _step(self) -> None:
        """Make an optimizer step on the present gradients: unscale, add the proximal term, clip, step."""
        trainer, built, group = self._trainer, self._built, self._context.process_group
        optimizer, clip_val, hooks = built.optimizer, trainer.options.gradient_clip_val, built.hooks
        # scaled gradients were averaged over the client's processes, so all see the same infinities
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)
        if self._pull is not None:
            self._pull.add_to_gradients(trainer.local.prox)
        if hooks is not None:
            hooks.before_step(optimizer, clip_val, self._clipped)
        elif clip_val is not None:
            torch.nn.utils.clip_grad_norm_(self._clipped(), clip_val)
        step(optimizer, trainer.fabric.strategy)
        if hooks is None or not hooks.keeps_gradients:
            zero_grad(optimizer)
        if group is not None:
            group.stepped()

    def _clipped(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients are clipped together, in the module's order."""
        built = self._built
        if not self._trainer.submodels.rules.steps_as_lightning:
            return built.parameters
        groups = built.optimizer.param_groups
        if self._clips[0] != len(groups):  # found once, and again if a hook has added a group
            stepped = {id(parameter) for group in groups for parameter in group["params"]}
            self._clips = len(groups), [parameter for parameter in built.parameters if id(parameter) in stepped]
        return self._clips[1]

    # ---- batches ----

    def _run_batch(self, batch: object) -> None:
        """Train on one batch with the module's hooks around it, or skip it if a hook says so."""
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

    def _make_step(self, batch: object, is_due: bool) -> None:
        """Compute the gradients of a batch, and step the optimizer if its batches are complete."""
        hooks = self._built.hooks
        if is_due and hooks is not None and "optimizer_step" in hooks.overridden:
            hooks.optimizer_step(
                self._built.optimizer, self.epoch, self.index, lambda: self._compute(batch, is_due), self._update
            )
        else:
            self._compute(batch, is_due)
            if is_due:
                self._update()

    def _train(self, batch: object, is_last: bool) -> None:
        index = self.index
        is_due = self._is_due(self.num_batches)
        self._make_step(batch, is_due)
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
        """Compute a batch's loss and gradients; return the loss, None if the batch is skipped or no module hook needs it."""
        process_group, hooks, module = self._context.process_group, self._built.hooks, self._built.module
        is_first = self.index % self._trainer.options.accumulate_grad_batches == 0
        try:
            loss = self._hook.loss(batch, self.num_batches)
        except SkippedBatch:
            if process_group is not None:
                raise BadInput(self._not_together("training_step returns None, to skip a batch")) from None
            # as in Lightning, since later batches of this step would add to the gradients of the previous step
            if hooks is not None and is_first:
                hooks.zero_grad(self._built.optimizer, self.epoch, self.index)
            return None
        loss = loss if process_group is None else process_group.weighed(loss)
        self._total = self._total + addend(loss)
        self._num_losses += 1
        loss = loss / self._divisor if self._divisor > 1 else loss
        if hooks is not None:
            if is_first:
                hooks.zero_grad(self._built.optimizer, self.epoch, self.index)
            hooks.call("on_before_backward", loss)
        with process_group.summing(module) if process_group is not None and is_due else nullcontext():
            self._hook.backward(loss)
        self._has_gradient = True
        if process_group is not None and is_due and process_group.average(self._context.is_stopped):
            raise Stopped  # decided together: all processes of the client stop at the same batch
        if hooks is None:  # the outputs are for module hooks alone
            return None
        hooks.call("on_after_backward")
        self._outputs, self._extra = {"loss": loss.detach(), **self._extra}, {}
        return loss.detach()

    def _update(self) -> None:
        if self._has_gradient:
            self.num_steps += 1
            self._hook.update()
            self._hook.stepped()
        self._has_gradient = False

    def _schedule(self, interval: str, index: int, *, plateau: bool) -> None:
        """Step the learning-rate schedulers that are due: those that read a metric if ``plateau``, else the others."""
        for schedule in self._built.schedulers:
            if (schedule.monitor is None) == plateau or not schedule.is_due(interval, index):
                continue
            metric = None
            if schedule.monitor is not None:
                metric = self._built.recorder.latest.metrics().get(schedule.monitor)
                if metric is None:  # a missing metric was reported before the run
                    continue
            if self._built.hooks is None or "lr_scheduler_step" not in self._built.hooks.overridden:
                step_scheduler(schedule.scheduler, metric)
            else:
                self._built.hooks.call("lr_scheduler_step", schedule.scheduler, metric)

    def _begin_epoch(self) -> None:
        if self._skips_epoch and self._has_gradient and self._trainer.submodels.rules.steps_as_lightning:
            zero_grad(self._built.optimizer)
            self._has_gradient = False
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
