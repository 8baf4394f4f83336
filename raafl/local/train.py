"""One task on a client: a pure function of (assignment, received payload, the client's data); state comes in the payload."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from raafl.core.algorithm import Hook, Local, Task, Training
from raafl.core.exchange import ClientLink
from raafl.core.masked_loss import CLASSES
from raafl.core.payload import Bundles, Payload
from raafl.core.types import Assignment, Update
from raafl.data.federated import ClientData, Sized
from raafl.errors import BadInput, briefly
from raafl.local.buffers import Buffers
from raafl.local.draws import Draws, current, seed_everything
from raafl.local.heap import give_back
from raafl.local.masked import masked
from raafl.local.metrics import LOSS, MAX_LOGGED, measure_part
from raafl.local.options import FabricOptions
from raafl.local.pull import Pull
from raafl.local.record import Recorder, widened
from raafl.local.spanning import ClientProcesses
from raafl.local.sparse_gradients import backward_of
from raafl.submodel import FlatTensors, Spec, Submodels
from raafl.submodel.batch_norm import Pooling, statistics_of
from raafl.submodel.frozen import FrozenBase
from raafl.submodel.nested_batch import to_device


class Stopped(Exception):
    """A task was given up because its result is no longer wanted."""


class Built:
    """A small module that lives on between tasks while only its values change, with its optimiser."""

    def __init__(self, submodels: Submodels, spec: Spec, local: Local, payload: Payload, fabric: Any) -> None:
        self.base = submodels.base_of(spec)
        shrunk = submodels.shrink(spec, rescale=local.rescale, device=fabric.device, base=self.base)
        self.module, self.present, self.trained = shrunk.module, shrunk.present, shrunk.trained
        self.down: Bundles = {}
        self._answer = FlatTensors.empty(payload.layout(spec, "trained"), fabric.device) if local.up else self.trained
        self._values, self.up = payload.split(self._answer, spec, "trained")
        self.module._fabric = fabric
        self.recorder = Recorder()
        self.recorder.attach(self.module)
        self._configure()
        self._groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        self.buffers = Buffers(self.module, self.present)
        named, frozen = () if self.base is None else self.module.named_parameters(), submodels.form(spec).frozen
        self.frozen = [(name, p) for name, p in named if name in frozen]

    def load(self, values: FlatTensors) -> None:
        """Take the values of another task."""
        self.present.copy_(values)
        self.versions = [p._version for _, p in self.frozen]  # anew: merges count as well, where the state is the base

    def reset(self, received: FlatTensors) -> None:
        """Load the values of a new task and forget the last one."""
        self.load(received)
        for bundle in self.up.values():
            bundle.zero_()
        self.recorder.clear()  # of a task that was given up, maybe between two batches of a step
        self.module.train().zero_grad()
        self.begin_anew()

    def begin_anew(self) -> None:
        """Have the optimiser, and the schedulers, as they were before the first step."""
        if self.schedulers:
            self._configure()
            return
        self.optimizer.state.clear()
        for group, fresh in zip(self.optimizer.param_groups, self._groups, strict=True):
            group.update(fresh)

    def answer(self) -> FlatTensors:
        """Return all that goes up, in storage that is good until the next task."""
        if self._answer is not self.trained:
            self._values.copy_(self.trained)
        return self._answer

    def _configure(self) -> None:
        self.schedulers: list[tuple[Any, str]] = []
        if any(p.requires_grad for p in self.module.parameters()):
            self.optimizer, self.schedulers = configure(self.module)
        else:  # the spec freezes all of it: a hook has its own way, or there is nothing to do; optimisers refuse an empty list
            self.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)


def configure(module: nn.Module) -> tuple[Optimizer, list[tuple[Any, str]]]:
    """Return the module's one optimiser and its schedulers with their interval (step or epoch).

    Raises:
        BadInput: the module has several optimisers or none, or a scheduler needs a metric.
    """
    answer: Any = module.configure_optimizers()  # type: ignore[operator]
    if isinstance(answer, list | tuple) and len(answer) == 1:
        answer = answer[0]
    schedulers: list[Any] = []
    if isinstance(answer, dict):
        schedulers = [answer["lr_scheduler"]] if answer.get("lr_scheduler") is not None else []
        answer = answer["optimizer"]
    elif isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], list):
        answer, schedulers = answer
    several = list(answer) if isinstance(answer, list | tuple) else [answer]
    if len(several) != 1 or not isinstance(several[0], Optimizer):
        found = f"{len(several)} optimizers" if len(several) > 1 else briefly(several[0] if several else None)
        raise BadInput(
            f"{type(module).__name__}.configure_optimizers gives {found}, but a federated task runs training_step, backward and "
            "the step of one optimizer: return one, with a parameter group for each part that has options of its own"
        )
    stepped = []
    for scheduler in schedulers:
        config = scheduler if isinstance(scheduler, dict) else {"scheduler": scheduler}
        if isinstance(config["scheduler"], ReduceLROnPlateau):
            raise BadInput(
                f"{type(module).__name__}.configure_optimizers gives a ReduceLROnPlateau, which needs a metric, and a task has "
                "none to give: use another scheduler, or none"
            )
        stepped.append((config["scheduler"], config.get("interval", "epoch")))
    return several[0], stepped


class LocalTrainer:
    """Runs tasks for any client; keeps the modules it has built, never a result."""

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
            submodels: of the full model's skeleton.
            local: the algorithm's hooks around the step.
            sends: what the merge wants back.
            training: how much a task trains unless its assignment says so.
            options: Fabric's.
            max_built: how many built submodules to keep; a rank that must hold only its fragment keeps one.
            pools: the merge is made by `raafl.parts.merge.pooled`: running statistics go up as it wants them.
        """
        from lightning.fabric import Fabric

        self.submodels, self.local, self.sends, self.training = submodels, local, sends, training
        self.pools = pools
        self.options = options or FabricOptions()
        self.fabric = Fabric(
            accelerator=self.options.accelerator,
            devices=1 if self.options.device is None else [self.options.device],
            precision=self.options.precision,  # type: ignore[arg-type]
        )
        self._strategy = self.fabric.strategy
        self.payload = local.payload(submodels)
        self._pooling = Pooling.of(submodels.module, submodels.batch_norm) if pools else None
        self._mixed = self.options.precision not in ("32-true", "32")
        self._built: OrderedDict[Spec, Built] = OrderedDict()
        self._max_built = max_built
        self._generator = torch.Generator()
        self._checked: WeakSet[FrozenBase] = WeakSet()
        self.stop: threading.Event | None = None  # once set, a task ends before its next batch, with `Stopped`
        self.crew: ClientProcesses | None = None  # the processes that train together; None = this is the only one
        self.link: ClientLink | None = None  # to the server in the middle of a task; None = there is none
        self.place = ""  # where in its task it is, in words

    def run(self, assignment: Assignment, received: FlatTensors, data: ClientData) -> Update:
        """Train and return the update; its tensors are this trainer's own storage, good until the next `run`.

        ``received`` has the layout ``payload.layout(spec, "sent")`` and is left as it is.

        Raises:
            BadInput: training writes to a frozen parameter.
        """
        with current(self.fabric.device):
            return self._run(assignment, received, data)

    def _run(self, assignment: Assignment, received: FlatTensors, data: ClientData) -> Update:
        crew, self.place = self.crew, "before its first batch"
        data = data if crew is None else crew.begin(assignment, received, data)
        built = self.built(assignment.spec)
        received, built.down = self.payload.split(received, assignment.spec, "sent")
        built.reset(received)
        # before seeding: reading a client's classes may draw from what its data set's transforms draw from
        masking = masked(built.module, data.classes() if self.local.masked else None)
        seed_everything(assignment.seed if crew is None else crew.seed(assignment.seed), self.fabric.device)
        self._generator.manual_seed(assignment.seed)
        precision: Any = self._strategy.precision
        if self._scaler is not None:  # anew: what it has learned in one task would show in the next
            precision.scaler = torch.amp.GradScaler(self.fabric.device.type)
        with masking as classes:
            num_steps, loss, extra = self._steps(built, assignment, received, data)
        loss = loss if crew is None else crew.finish(built.module, loss)
        return self.ended(built, assignment, received, data, num_steps, loss, extra, classes)

    def ended(
        self, built: Built, assignment: Assignment, received: FlatTensors, data: ClientData, num_steps: int, loss: float,
        extra: dict[str, Any], classes: list[int],
    ) -> Update:  # fmt: skip
        """Make the update of a task whose steps are done, of what ``built`` holds; ``classes`` were left of a masked loss."""
        extra |= {CLASSES: classes} if classes else {}
        self._check_base(built)
        built.buffers.gather()
        metrics = {LOSS: loss, **built.recorder.means(MAX_LOGGED)}
        if data.test is not None and self.link is None and self.local.tests(assignment.extra):
            metrics |= self._test(built, data.test)
        with self._statistics_sent(built.trained):
            if self.sends == "delta":
                for dtype, buffer in built.trained.buffers.items():
                    buffer.sub_(received.buffers[dtype][: buffer.numel()].to(buffer.device))
        update = Update(
            assignment.id, assignment.client, assignment.incarnation, built.answer(), data.num_samples, num_steps,
            metrics, extra=extra,
        )  # fmt: skip
        update.refusal = None if update.tensors.is_finite() else "non-finite"
        return update

    def _test(self, built: Built, data: ClientData) -> dict[str, float]:
        """Measure the trained submodel on the client's test part."""

        def batches() -> Iterator[Sized]:
            self.place = "batch 0 of its test part"
            for index, sized in enumerate(data.in_order(self.training.batch_size), start=1):
                if self._is_stopped():
                    raise Stopped
                yield sized
                self.place = f"batch {index} of its test part"

        static = self.submodels.batch_norm == "static"  # then a client has no running statistics
        norms = [mean.rpartition(".")[0] for mean, _ in statistics_of(built.module)] if static else []
        context = self._strategy.precision.forward_context if self._mixed else nullcontext
        return measure_part(
            built.module, built.recorder, built.buffers, data, batches(), self.fabric.device, context, norms
        )

    def _check_base(self, built: Built) -> None:
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
                f"parameter '{name}' has requires_grad=False, but training writes to it: make it a buffer, which clients "
                "are sent and send back, or let it train"
            )

    def _statistics_sent(self, trained: FlatTensors) -> AbstractContextManager[None]:
        """Have running variances go up as second moments, and no running statistics as differences; see `Pooled`."""
        return nullcontext() if self._pooling is None else self._pooling.as_sent(trained)

    def release(self) -> None:
        """Let go of every module that was built, and give the memory back that is free."""
        self._built.clear()
        if self.fabric.device.type == "cuda":
            torch.cuda.empty_cache()
        give_back(0)

    def make_built(self, spec: Spec) -> Built:
        """Make a small module that nobody else uses."""
        return Built(self.submodels, spec, self.local, self.payload, self.fabric)

    def built(self, spec: Spec) -> Built:
        """Return the small module in which tasks of ``spec`` are trained, one after the other."""
        built = self._built.get(spec)
        if built is None:
            while len(self._built) >= self._max_built:
                self._built.popitem(last=False)
            built = self._built[spec] = self.make_built(spec)
        self._built.move_to_end(spec)
        return built

    def length(self, assignment: Assignment) -> tuple[int | None, int | None]:
        """Return a task's number of epochs and of steps, one of which is None."""
        epochs, steps = assignment.num_epochs, assignment.num_steps
        if epochs is None and steps is None:
            epochs, steps = self.training.num_epochs, self.training.num_steps
        return (epochs, None) if steps is None else (None, steps)

    def _steps(
        self, built: Built, assignment: Assignment, received: FlatTensors, data: ClientData
    ) -> tuple[int, float, dict[str, Any]]:
        """Do the local steps; return the number of optimiser steps, the mean loss, and what the hook has to say."""
        epochs, steps = self.length(assignment)
        accumulate, device, crew = self.options.accumulate_grad_batches, self.fabric.device, self.crew
        per_epoch = data.num_batches(self.training.batch_size)
        hook = self._hook(built, assignment, received, steps if steps is not None else per_epoch * (epochs or 1))
        num_batches, num_steps, self.place = 0, 0, "batch 0"
        total: Tensor | float = 0.0
        try:
            for batch, num_samples in data.batches(self._generator, self.training.batch_size, epochs, steps):
                if crew is None and self._is_stopped():
                    raise Stopped
                built.recorder.weight = float(num_samples)
                loss = hook.loss(to_device(batch, device), num_batches)
                loss = loss if crew is None else crew.weighed(loss)
                total = total + widened(loss)
                num_batches += 1
                in_epoch = num_batches % per_epoch  # 0 at its end
                is_due = in_epoch % accumulate == 0 or num_batches == steps
                with crew.summing(built.module) if crew is not None and is_due else nullcontext():
                    hook.backward(loss / accumulate if accumulate > 1 else loss)
                if is_due:
                    num_steps += 1
                    if crew is not None and crew.average(self._is_stopped()):
                        raise Stopped  # all together
                    hook.update()
                    for scheduler, interval in built.schedulers:
                        if interval == "step" or in_epoch == 0:
                            scheduler.step()
                self.place = f"batch {num_batches}"
            self.place = "after its last batch"
            return num_steps, float(total) / max(num_batches, 1), hook.finish()
        finally:
            hook.close()

    def _hook(self, built: Built, assignment: Assignment, received: FlatTensors, num_batches: int) -> Hook:
        pull = Pull.towards(received, built.module) if self.local.prox else None
        task = Task(
            assignment, self.submodels, built.module, built.optimizer, received, num_batches, self._generator,
            loss=lambda batch, index: self._loss(built.module, batch, index), draws=lambda seed: Draws(self.fabric.device, seed),
            backward=backward_of(self._strategy.backward, built.module, built.optimizer, self.local,
                                 self.options.gradient_clip_val, 1 if self.crew is None else self.crew.size),
            update=lambda: self._update(built.module, built.optimizer, pull), down=built.down, up=built.up, link=self.link,
        )  # fmt: skip
        return self.local.hook(task)

    def _loss(self, module: nn.Module, batch: Any, index: int) -> Tensor:
        with self._strategy.precision.forward_context() if self._mixed else nullcontext():
            answer = module.training_step(batch, index)  # type: ignore[operator]
        loss: Tensor = answer["loss"] if isinstance(answer, dict) else answer
        return loss

    @property
    def _scaler(self) -> Any:  # of 16-mixed
        return getattr(self._strategy.precision, "scaler", None)

    def _update(self, module: nn.Module, optimizer: Optimizer, pull: Pull | None) -> None:
        if self._scaler is not None:  # processes of one client have averaged scaled gradients: all see the same inf
            self._scaler.unscale_(optimizer)
        if pull is not None:
            pull.add_to_gradients(self.local.prox)
        if self.options.gradient_clip_val is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), self.options.gradient_clip_val)
        self._strategy.optimizer_step(optimizer)
        optimizer.zero_grad()
        if self.crew is not None:
            self.crew.stepped()

    def _is_stopped(self) -> bool:
        return self.stop is not None and self.stop.is_set()
