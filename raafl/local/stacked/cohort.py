"""Train tasks of one submodel as one batch of clients, and return the result client by client.

Clients are sorted by number of steps: those that continue are the first rows of every stack.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from raafl.core.local import Local
from raafl.core.masked_loss import CLASSES, HasLogits, logits_of
from raafl.core.options import FabricOptions
from raafl.core.payload import Payload
from raafl.core.types import Update
from raafl.errors import USER_ERRORS
from raafl.local.context import ALONE, TaskContext
from raafl.local.evaluate import LOSS, MAX_LOGGED
from raafl.local.stacked.stacks import Known, Unstackable, outside, same_bits, set_torch_state, stack_of
from raafl.local.stacked.steps import Member, Place, Steps
from raafl.local.train import MAX_BUILT, LocalTrainer, PreparedTask
from raafl.local.trainable import TrainableSubmodel
from raafl.rng import current, generators, same_generators, seed_everything
from raafl.submodel import FlatTensors, Layout, Spec
from raafl.submodel.flat import is_merged, reals

if TYPE_CHECKING:
    from raafl.local.captured.batches import BatchGraphs

MOST_SIZES = 8
"""Pairs of a submodel and a number of clients whose graphs are kept on a GPU, with the memory of their values."""

OPTIMIZERS: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
)
"""Optimizers that update each element independently of all others."""


def refusal_of(local: Local, payload: Payload, options: FabricOptions, device: str) -> str | None:
    """Explain why tasks of this run cannot be trained together, as one batch of clients; None = they can."""
    if not local.steps_are_plain or type(local).exchange is not Local.exchange or payload.has_bundles:
        return "the algorithm has steps of its own"
    if device not in ("cpu", "cuda"):
        return f"fabric.accelerator is {device}"
    if options.precision not in ("32-true", "32"):
        return f"fabric.precision is {options.precision}"
    if options.accumulate_grad_batches != 1:
        return f"fabric.accumulate_grad_batches is {options.accumulate_grad_batches}"
    is_parallel = device == "cpu" and torch.get_num_threads() > 1
    return f"threads is {torch.get_num_threads()}" if is_parallel else None


def refusal_of_optimizer(optimizer: torch.optim.Optimizer) -> str | None:
    """Explain why tasks with this optimizer cannot be trained together; None = they can."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "its optimizer has hooks around its step"
    return None if type(optimizer) in OPTIMIZERS else f"its optimizer is {type(optimizer).__name__}"


def _refusal_of_built(built: TrainableSubmodel) -> str | None:
    """Return the reason why this submodel cannot train several clients as one batch; None if it can."""
    if built.hooks is not None:
        return f"the module overrides {min(built.hooks.overridden)}"
    if built.transfer.is_own:
        return "the module overrides hooks that transfer a batch"
    if built.trainer.asked_of_task:
        return f"configure_optimizers reads self.trainer.{built.trainer.asked_of_task[0]}"
    if any(schedule.monitor is not None for schedule in built.schedulers):
        return "a learning rate scheduler goes by a metric"
    return refusal_of_optimizer(built.optimizer)


class Trained:
    """Result of training several clients as one batch; `update` builds one client's update from it.

    Attributes:
        seen: structures and shapes of batches that occurred, each with the ids of the assignments that had them.
    """

    def __init__(self, trainer: LocalTrainer, steps: Steps, classes: Sequence[list[int]]) -> None:
        """Store the results of the steps, and the classes to which the masked loss has restricted each client."""
        self._trainer, self._members, self._num_steps, self._classes = trainer, steps.members, steps.counts, classes
        self._rows, self._losses, self._logged, self._states = steps.rows, steps.losses, steps.logged, steps.states
        self._place = {member.assignment.id: place for place, member in enumerate(steps.members)}
        self.seen = {
            kind: {self._members[place].assignment.id for place in places} for kind, places in steps.seen.items()
        }

    def member(self, assignment_id: int) -> Member:
        """Return the task that has this assignment id."""
        return self._members[self._place[assignment_id]]

    def update(self, assignment_id: int, context: TaskContext = ALONE, *, draws: bool = False) -> Update:
        """Return the update of one task, equal to that of `LocalTrainer.run`.

        Args:
            assignment_id: id of the task's assignment.
            context: context whose stop event may end the evaluation on the client's test samples.
            draws: whether to set the random generators to the state in which `LocalTrainer.run` would leave them.
        """
        place = self._place[assignment_id]
        assignment, received, data = self._members[place]
        if draws or data.test is not None:  # restored, since an evaluation on the test part may draw random numbers
            device = self._trainer.fabric.device
            seed_everything(assignment.seed, device)
            set_torch_state(device, self._states[place])
        is_whole = data.test is None and not self._trainer.pools_statistics
        if is_whole and self._trainer.fabric.device.type == "cpu":  # on a GPU results are read later, task by task
            return self._read(place)
        built = self._trainer.built(assignment.spec)
        if data.test is None:  # `CohortTrainer.train` has checked that steps change no state but these values
            for dtype, buffer in built.present.buffers.items():
                buffer.copy_(self._rows.buffers[dtype][place, : len(buffer)])
        else:
            built.load(self._rows.of(place))
        self._logged.hand(place, built.recorder)
        task, num_steps = PreparedTask(assignment, received, {}, data, context, built), self._num_steps[place]
        total = self._losses[place]
        # a loss on a GPU is read later, together with the other results
        loss = (total if total.is_cuda else float(total)) / max(num_steps, 1)
        if data.test is None:
            classes = self._classes[place]
            return self._trainer.answer(task, num_steps, {LOSS: loss}, {}, {CLASSES: classes} if classes else {})
        return self._trainer.build_update(task, num_steps, loss, {}, self._classes[place])

    def _read(self, place: int) -> Update:
        """Create one task's update from the results of all tasks, which `_answers` has computed and checked."""
        layout, rows, finite, losses, logged = self._answers
        (assignment, _, data), num_steps, classes = self._members[place], self._num_steps[place], self._classes[place]
        tensors = FlatTensors.unchecked(layout, {dtype: each[place] for dtype, each in rows.items()})
        means = {name: sums[place] / counts[place] for name, (sums, counts) in logged.items() if counts[place]}
        return Update(
            assignment.id,
            assignment.client,
            assignment.incarnation,
            tensors,
            data.num_samples,
            num_steps,
            {LOSS: losses[place] / max(num_steps, 1)} | means,
            extra={CLASSES: classes} if classes else {},
            refusal=None if finite[place] or tensors.is_finite() else "non-finite",
        )

    def difference(self, other: Trained) -> str:
        """Describe the first difference of results of the same tasks, to the bit; empty if there is none."""
        for dtype, numel in self._rows.layout.numel.items():
            own, its = (rows.buffers[dtype][:, :numel].contiguous() for rows in (self._rows, other._rows))
            if not torch.equal(own.view(torch.uint8), its.view(torch.uint8)):
                return f"other values of {dtype}"
        if not same_bits(self._losses, other._losses):
            return "other losses"
        own_logged, its_logged = self._logged.read(None), other._logged.read(None)
        if own_logged.keys() != its_logged.keys():
            return "other values are logged"
        for name, (sums, counts) in own_logged.items():
            if counts != its_logged[name][1] or not same_bits(
                torch.as_tensor(sums), torch.as_tensor(its_logged[name][0])
            ):
                return f"other values of '{name}' are logged"
        return "" if self._num_steps == other._num_steps else "other numbers of steps"

    @cached_property
    def _answers(
        self,
    ) -> tuple[
        Layout, dict[torch.dtype, tuple[Tensor, ...]], list[bool], list[float], dict[str, tuple[Any, list[float]]]
    ]:
        """Return the results of all tasks, for their updates: layout, values (a row per task), finiteness, losses, logged sums."""
        layout = self._trainer.payload.layout(self._members[0].assignment.spec, "trained")
        rows = {dtype: self._rows.buffers[dtype][:, :numel] for dtype, numel in layout.numel.items()}
        if self._trainer.sends == "delta":
            received = [member.received for member in self._members]
            is_one = all(one is received[0] for one in received)
            for dtype, matrix in rows.items():
                before = [one.buffers[dtype][: matrix.shape[1]] for one in received[: 1 if is_one else None]]
                rows[dtype] = matrix - (before[0] if is_one else torch.stack(before))
        numbers = (reals(matrix).flatten(1) for dtype, matrix in rows.items() if is_merged(dtype))
        # a sum that overflows is looked at again, by `_read`
        sums = [matrix.sum(1, dtype=torch.float32 if matrix.itemsize == 2 else None).isfinite() for matrix in numbers]
        finite = torch.stack(sums).all(0).tolist() if sums else [True] * len(self._members)
        each = {dtype: matrix.unbind() for dtype, matrix in rows.items()}
        return layout, each, finite, self._losses.tolist(), self._logged.read(MAX_LOGGED)


class CohortTrainer:
    """Trainer of several tasks of the same submodel as one batch; its modules are separate from those of `LocalTrainer`."""

    def __init__(self, trainer: LocalTrainer, *, fast: bool = False) -> None:
        """Create a trainer of batches of clients; ``fast``: compute one product for all, with other last bits."""
        self._trainer = trainer
        self._built: OrderedDict[Spec, tuple[TrainableSubmodel, list[Place]]] = OrderedDict()
        self._known: Known | None = None if fast else {}
        # CUDA graphs of steps, by submodel and number of clients
        self._graphs: OrderedDict[tuple[Spec, int], BatchGraphs] = OrderedDict()
        self._num_settling = 0

    def refusal(self) -> str | None:
        """Explain why tasks of this run cannot be trained together; None = they can."""
        trainer = self._trainer
        return refusal_of(trainer.local, trainer.payload, trainer.options, trainer.fabric.device.type)

    @property
    def num_known(self) -> int:
        """Number of operations for which one call for all clients was compared, bit by bit, with one call per client."""
        return len(self._known or ()) + self._num_settling

    def num_bytes(self, spec: Spec) -> int:
        """Estimate the bytes of one client's values, gradients and optimizer state."""
        return 4 * self._trainer.submodels.layout(spec, "present").num_bytes

    def train(self, tasks: Sequence[Member]) -> Trained:
        """Train several tasks of the same submodel as one batch.

        Raises:
            Unstackable: the tasks cannot be trained together.
        """
        with current(self._trainer.fabric.device):
            return self._train(tasks)

    def _train(self, tasks: Sequence[Member]) -> Trained:
        if tasks[0].data.owned:
            raise Unstackable(
                "the data set has random generators of its own, which each task seeds anew, so clients cannot be trained "
                "as one batch"
            )
        capture, graphs = self._trainer.capture, self._graphs_of(tasks)
        if graphs is None or graphs.reason is not None:
            if capture is not None:
                capture.note_batch(graphs)
            return self._train_once(tasks, None)
        before = graphs.num_eager
        try:
            trained = self._train_once(tasks, graphs)
        except USER_ERRORS as error:
            graphs.forget(capture.reason_of(error))
            capture.note_batch(graphs)
            return self._train_once(tasks, None)  # an error of the user's code is raised again by these eager steps
        unproven = graphs.unproven
        self._num_settling += graphs.num_eager - before + len(unproven)
        capture.note_batch(graphs)
        if not unproven:
            return trained
        plain = self._train_once(tasks, None)
        for step in unproven:
            step.proofs += 1
        if different := plain.difference(trained):
            graphs.forget(f"captured steps give other results than eager ones: {different}")
            capture.note_reason(graphs)
        return plain

    def _graphs_of(self, tasks: Sequence[Member]) -> BatchGraphs | None:
        """Return the CUDA graphs for a batch of this many clients; None if steps are not captured."""
        capture, key = self._trainer.capture, (tasks[0].assignment.spec, len(tasks))
        if capture is None:
            return None
        built, _ = self._get(key[0])
        graphs = self._graphs.pop(key, None)
        if graphs is None or graphs.built is not built:
            graphs = capture.of_batches(built, len(tasks))
        if graphs is not None:
            self._graphs[key] = graphs
            while len(self._graphs) > MOST_SIZES:
                self._graphs.popitem(last=False)
        return graphs

    def fitting(self, num: int) -> int:
        """Return the number of clients, up to ``num``, to train as one batch: one of few where each number has its own graphs."""
        if self._trainer.capture is None:
            return num
        step = 1 << max(num.bit_length() - 2, 0)
        return num // step * step

    def _train_once(self, tasks: Sequence[Member], graphs: BatchGraphs | None) -> Trained:
        trainer, device = self._trainer, self._trainer.fabric.device
        built, places = self._get(tasks[0].assignment.spec)
        built.state.restore()
        trainer.announce(built, tasks[0].assignment, tasks[0].data)
        built.begin_anew(tasks[0].assignment.seed)
        built.trainer.asked.clear()
        counts = [self._num_batches(task) for task in tasks]
        sizes = [task.data.num_samples for task in tasks]
        order = sorted(range(len(tasks)), key=lambda i: (-counts[i], -sizes[i]))
        members, counts = [tasks[i] for i in order], [counts[i] for i in order]
        classes = [member.data.classes() if trainer.local.masked else None for member in members]
        versions = [p._version for _, p in built.frozen]
        with masked_together(built.module, classes) as masking:
            seed_everything(members[0].assignment.seed, trainer.fabric.device)
            before = generators(device)
            steps = Steps(trainer, built, places, self._known, members, counts, masking.choose, graphs)
            steps.run()
            if not same_generators(before, generators(device)):
                raise Unstackable(
                    "training draws random numbers without torch, for example with numpy: draw them with torch to train "
                    "clients as one batch"
                )
        if asked := built.trainer.asked_of_task:
            raise Unstackable(
                f"the training step reads self.trainer.{asked[0]}, which may differ between clients: do without it to train "
                "clients as one batch"
            )
        if changed := built.state.changed():
            raise Unstackable(
                f"the training step changes the attribute {changed[0]}: make it a buffer to train clients as one batch"
            )
        if versions != [p._version for _, p in built.frozen]:
            raise Unstackable(
                "the training step writes to a frozen parameter: make it a buffer, or set requires_grad=True"
            )
        return Trained(trainer, steps, masking.left)

    def _num_batches(self, task: Member) -> int:
        epochs, steps = self._trainer.training.length(task.assignment)
        return steps or task.data.num_batches(self._trainer.training.batch_size) * (epochs or 1)

    def _get(self, spec: Spec) -> tuple[TrainableSubmodel, list[Place]]:
        """Return a submodel's module with its optimizer, and the parts of the module in which each tensor is stored."""
        if spec not in self._built:
            while len(self._built) >= MAX_BUILT:
                self._built.popitem(last=False)
            built = self._trainer.build(spec)
            if (reason := _refusal_of_built(built)) is not None:
                raise Unstackable(reason)
            names = {id(tensor): name for name, tensor in built.module.named_parameters()}
            names |= {id(tensor): name for name, tensor in built.module.named_buffers()}
            places = [
                (held, key, names[id(tensor)])
                for part in built.module.modules()
                for held in (part._parameters, part._buffers)
                for key, tensor in held.items()
                if tensor is not None and names[id(tensor)] in built.present
            ]
            self._built[spec] = built, places
        self._built.move_to_end(spec)
        return self._built[spec]


class _Masking:
    """Forward hook that zeroes the logits of classes of which a client has no samples."""

    def __init__(self, classes: Sequence[Set[int] | None]) -> None:
        self._classes = classes
        self._clients: Sequence[int] = ()
        self._masks: dict[tuple[tuple[int, ...], int], Tensor] = {}
        self.left: list[list[int]] = [[] for _ in classes]

    @contextmanager
    def choose(self, clients: Sequence[int]) -> Iterator[None]:
        """Set the clients of the forward passes in the ``with`` block, in the order of the stacked tensors."""
        self._clients = clients
        yield

    def _absent(self, clients: tuple[int, ...], num: int, device: torch.device) -> Tensor:
        """Return a mask of the classes without samples, (clients, num), which is created on ``device`` once."""
        if (clients, num) not in self._masks:
            absent = torch.zeros(len(clients), num, dtype=torch.bool)
            for place, client in enumerate(clients):
                classes = self._classes[client]
                if classes and min(classes) >= 0 and max(classes) < num and len(classes) < num:
                    self.left[client] = sorted(classes)
                    absent[place] = True
                    absent[place, self.left[client]] = False
            self._masks[clients, num] = absent.to(device)
        return self._masks[clients, num]

    def __call__(self, module: nn.Module, args: object, output: Tensor | HasLogits) -> object:
        logits = logits_of(output)
        if logits is None:
            return output
        stack = stack_of(logits)
        device = logits.device if stack is None else stack.device
        absent = self._absent(tuple(self._clients), logits.shape[1], device)
        with outside() as inside:
            mask = inside(absent)
        zeroed = logits.masked_fill(mask, 0.0)
        if isinstance(output, Tensor):
            return zeroed
        output.logits = zeroed
        return output


@contextmanager
def masked_together(module: nn.Module, classes: Sequence[Set[int] | None]) -> Iterator[_Masking]:
    """Return a context that keeps, for each client, the classes without samples out of the loss: their logits are 0.

    It yields an object whose method `choose` says for which clients the next forward pass is computed.

    `classes`: classes of each client's samples; None = unknown, so nothing is masked.
    """
    masking = _Masking(classes)
    if not any(classes):
        yield masking
        return
    handle = module.register_forward_hook(masking)
    try:
        yield masking
    finally:
        handle.remove()
