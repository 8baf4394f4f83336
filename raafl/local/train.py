"""Train one task on a client: a pure function of (assignment, received payload, the client's data)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal
from weakref import WeakSet

import torch

from raafl.core.algorithm import Local, Training
from raafl.core.masked_loss import CLASSES
from raafl.core.types import Assignment, Update
from raafl.data.federated import ClientData, Sized
from raafl.errors import BadInput
from raafl.local.context import ALONE, TaskContext
from raafl.local.evaluation.metrics import LOSS, MAX_LOGGED, measure_part
from raafl.local.malloc import give_back
from raafl.local.masked import masked
from raafl.local.options import FabricOptions
from raafl.local.rng import current, seed_everything
from raafl.local.sharded import ShardedSubmodel, Shards
from raafl.local.task_steps import PreparedTask, Stopped, TaskSteps
from raafl.local.trainable import TrainableSubmodel
from raafl.submodel import FlatTensors, Spec, Submodels
from raafl.submodel.batch_norm import Pooling, statistics_of
from raafl.submodel.frozen import FrozenBase

__all__ = ["FabricOptions", "LocalTrainer", "Stopped", "TrainableSubmodel"]


class LocalTrainer:
    """Trainer that runs the tasks of any clients. It reuses submodels' modules, but no task influences the next one.

    Attributes:
        shards: processes over which each module is sharded; None = this process holds whole modules.
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
        """Set up Fabric with a single device.

        Args:
            submodels: of the model's skeleton.
            local: the algorithm's local part.
            sends: "values" or "delta", as the merge wants.
            training: local work, unless an assignment says otherwise.
            options: of Fabric.
            max_built: number of small modules to keep; a rank that may hold only its fragment keeps one.
            pools: whether `raafl.parts.merge.pooled` merges running statistics, which are then sent in its form.
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
            # Else Fabric looks for a cluster, and where mpi4py is installed starts MPI, a daemon beside each process, to ask it.
            plugins=[LightningEnvironment()],
        )
        self._strategy = self.fabric.strategy
        self.shards: Shards | None = None
        self.payload = local.payload(submodels)
        self._pooling = Pooling.of(submodels.module, submodels.batch_norm) if pools else None
        self._mixed = self.options.precision not in ("32-true", "32")
        self._built: OrderedDict[Spec, TrainableSubmodel] = OrderedDict()
        self._max_built = max_built
        self.generator = torch.Generator()
        self._checked: WeakSet[FrozenBase] = WeakSet()

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
            return self._run(assignment, received, data, context)

    def _run(self, assignment: Assignment, received: FlatTensors, data: ClientData, context: TaskContext) -> Update:
        process_group, context.progress.place = context.process_group, "before its first batch"
        data = data if process_group is None else process_group.begin(assignment, received, data)
        built = self.built(assignment.spec)
        received, down = self.payload.split(received, assignment.spec, "sent")
        task = PreparedTask(assignment, received, down, data, context, built)
        self.announce(built, assignment, data)
        built.reset(received, assignment.lr_scale)
        # before seeding: reading a client's classes may draw from what its data set's transforms draw from
        masking = masked(built.module, data.classes() if self.local.masked else None)
        seed_everything(
            assignment.seed if process_group is None else process_group.seed(assignment.seed), self.fabric.device
        )
        self.generator.manual_seed(assignment.seed)
        precision: Any = self._strategy.precision
        if self.scaler is not None:  # anew: what it has learned in one task would show in the next
            precision.scaler = torch.amp.GradScaler(self.fabric.device.type)
        with masking as classes:
            steps = TaskSteps(self, task)
            extra = steps.run()
            loss = steps.mean_loss
        loss = loss if process_group is None else process_group.finish(built.module, loss or 0.0, built.recorder)
        return self.build_update(task, steps.num_steps, loss, extra, classes)

    def build_update(
        self, task: PreparedTask, num_steps: int, loss: float | None, extra: dict[str, Any], classes: list[int]
    ) -> Update:
        """Build the update of a task after its last step.

        Args:
            task: task that was trained.
            num_steps: number of optimizer steps that were made.
            loss: mean loss over the batches; None = every batch was skipped.
            extra: plain data for the server, which the method's hook returned after the steps.
            classes: classes that a masked loss has kept; empty = nothing was masked.
        """
        built, assignment, data = task.built, task.assignment, task.data
        extra |= {CLASSES: classes} if classes else {}
        built.gather()
        built.check_fixed_statistics()
        metrics = {**({} if loss is None else {LOSS: loss}), **built.recorder.means(MAX_LOGGED)}
        if data.test is not None and task.context.link is None and self.local.evaluates_on_client(assignment.extra):
            metrics |= self._test(built, data.test, task.context)
        self._check_base(built)
        built.state.check()
        with self._statistics_sent(built.trained):
            if self.sends == "delta":
                for dtype, buffer in built.trained.buffers.items():
                    buffer.sub_(task.received.buffers[dtype][: buffer.numel()].to(buffer.device))
        update = Update(
            assignment.id,
            assignment.client,
            assignment.incarnation,
            built.answer(),
            data.num_samples,
            num_steps,
            metrics,
            extra=extra,
        )
        update.refusal = None if update.tensors.is_finite() else "non-finite"
        return update

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

    @property
    def scaler(self) -> Any:
        """Scaler of losses in 16-mixed precision; None in others."""
        return getattr(self._strategy.precision, "scaler", None)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass in the run's precision."""
        return self._strategy.precision.forward_context() if self._mixed else nullcontext()

    def _test(self, built: TrainableSubmodel, data: ClientData, context: TaskContext) -> dict[str, float]:
        """Measure the trained submodel on the client's test part."""

        def batches() -> Iterator[Sized]:
            context.progress.place = "batch 0 of its test part"
            for index, sized in enumerate(data.in_order(self.training.batch_size), start=1):
                if context.is_stopped and self.shards is None:  # else all processes measure, and none may leave alone
                    raise Stopped
                yield sized
                context.progress.place = f"batch {index} of its test part"

        static = self.submodels.batch_norm == "static"  # then a client has no running statistics
        norms = [mean.rpartition(".")[0] for mean, _ in statistics_of(built.module)] if static else []
        norms = [path for path in norms if self.submodels.module.get_submodule(path).training]  # others have their own
        return measure_part(
            built.module,
            built.recorder,
            built.buffers,
            data,
            batches(),
            self.fabric.device,
            self.forward_context,
            norms,
        )

    def _check_base(self, built: TrainableSubmodel) -> None:
        """See that a task has left the frozen base as it was: other tasks and clients share it, and cut copies live on.

        Counters of changes in place are looked at after each task; the values, which `.data` changes past them, after the
        first.
        """
        base, now = built.base, zip(built.frozen, built.versions, strict=True)
        name = next((name for (name, p), version in now if p._version != version), None)
        if name is None and base is not None and base not in self._checked:
            self._checked.add(base)
            name = base.changed(self.fabric.device)
        if name is not None:
            raise BadInput(
                f"parameter '{name}' has requires_grad=False, but training writes to it: make it a buffer, which is "
                "sent with the model, or set requires_grad=True"
            )

    def _statistics_sent(self, trained: FlatTensors) -> AbstractContextManager[None]:
        """Have running variances go up as second moments, and no running statistics as differences; see `Pooled`."""
        return nullcontext() if self._pooling is None or not len(trained) else self._pooling.as_sent(trained)

    def release(self) -> None:
        """Release all modules that are kept for reuse, and return freed memory to the system."""
        self._built.clear()
        if self.fabric.device.type == "cuda":
            torch.cuda.empty_cache()
        give_back(0)

    def build(self, spec: Spec) -> TrainableSubmodel:
        """Build a new module for submodel ``spec``, for the caller alone; `built` returns the module that `run` uses."""
        if self.shards is not None:
            return ShardedSubmodel(self.shards, self.submodels, spec, self.local, self.payload, self.fabric)
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
