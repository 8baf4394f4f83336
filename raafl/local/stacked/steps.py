"""Run the steps of several clients at once: losses, gradients, optimiser and metrics on stacks of their values.

Each client's values lie in a row as in the small module's own storage, so that every tensor starts at the alignment it would have
alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from raafl.core.types import Assignment
from raafl.data.federated import ClientData
from raafl.data.loaders import Fetch
from raafl.local.lightning_hooks import reads_index
from raafl.local.record import START, Recorder, attach_log, reduction_of, widened
from raafl.local.stacked.mode import Batch, Stacked, batches
from raafl.local.stacked.stacks import CACHE_LINE_BYTES, Known, Unstackable, product, within
from raafl.local.train import LocalTrainer
from raafl.local.trainable import ProximalTerm, TrainableSubmodel, to_device
from raafl.module_hooks import backward, step, zero_grad
from raafl.submodel import FlatTensors, Layout
from raafl.submodel.flat import TensorEntry

if TYPE_CHECKING:
    from raafl.local.captured.batches import BatchGraphs

Place = tuple[dict[str, Any], str, str]
"""Place of a tensor in a module: the dictionary that holds it, its key there, its name in the layout."""


class Member(NamedTuple):
    """One task of a batch: its assignment, the received values and the client's data."""

    assignment: Assignment
    received: FlatTensors
    data: ClientData


class Rows:
    """Values of several clients' submodels as a matrix, with one row per client.

    On a GPU each tensor of all clients lies apart while they train, without gaps, as fused optimizers want it.
    """

    def __init__(self, layout: Layout, num: int, device: torch.device) -> None:
        """Allocate a row of memory for each of ``num`` clients, aligned to cache lines."""
        self.layout = layout
        self.buffers = {
            dtype: torch.empty(
                num,
                -(-numel * dtype.itemsize // CACHE_LINE_BYTES) * CACHE_LINE_BYTES // dtype.itemsize,
                dtype=dtype,
                device=device,
            )
            for dtype, numel in layout.numel.items()
        }
        self._apart: dict[str, Tensor] = {}

    def fill(self, received: Sequence[FlatTensors], apart: dict[str, Tensor]) -> None:
        """Copy the clients' values into their rows; values that several clients share are sent to a GPU once.

        `apart`: tensors of all clients that lie apart on a GPU, by name; missing ones are allocated and added.
        """
        for dtype, buffer in self.buffers.items():
            num, sent = self.layout.numel[dtype], dict[int, Tensor]()
            if not buffer.is_cuda and all(
                values is received[0] for values in received
            ):  # tasks of one version share the received values
                buffer[:, :num].copy_(received[0].buffers[dtype])
                continue
            for client, values in enumerate(received):
                row = buffer[client, :num]
                row.copy_(sent.get(id(values), values.buffers[dtype]))
                sent[id(values)] = row
        if any(buffer.is_cuda for buffer in self.buffers.values()):
            for entry in self.layout.entries:
                view, own = self._view(entry, self.buffers[entry.dtype]), apart.get(entry.name)
                apart[entry.name] = view.contiguous() if own is None else own.copy_(view)
            self._apart = apart

    def settle(self) -> None:
        """Copy tensors that lie apart back into the rows."""
        for name, tensor in self._apart.items():
            entry = self.layout.by_name[name]
            self._view(entry, self.buffers[entry.dtype]).copy_(tensor)
        self._apart = {}

    def of(self, client: int) -> FlatTensors:
        """Return the values of one client, as views of its row of the matrix."""
        return FlatTensors(self.layout, {d: b[client, : self.layout.numel[d]] for d, b in self.buffers.items()})

    def stack(self, entry: TensorEntry, chosen: slice | Tensor) -> Tensor:
        """Return one tensor of some clients, shape (clients, ...).

        Args:
            entry: shape and position of the tensor in a row.
            chosen: rows of the clients; a slice gives a view, indices give a copy, aligned in memory like the view.
        """
        own = self._apart.get(entry.name)
        rows = self.buffers[entry.dtype] if own is None else own
        rows = rows[chosen] if isinstance(chosen, slice) else rows.index_select(0, chosen)
        return rows if own is not None else self._view(entry, rows)

    def _view(self, entry: TensorEntry, rows: Tensor) -> Tensor:
        return rows.as_strided(
            (len(rows), *entry.shape), (rows.stride(0), *entry.stride), rows.storage_offset() + entry.offset
        )


class Steps:
    """Training steps of several clients that are trained as one batch.

    `members`: tasks of the batch, the longest first.
    `counts`: number of steps of each task.
    `rows`: values of each task's submodel.
    `losses`: sum of the losses of each task.
    `logged`: values that each task has logged so far.
    `states`: state of torch's generator for each task; a seed if the task has drawn nothing yet.
    `seen`: structures and shapes of batches that occurred, each with the positions of the tasks that had them.
    `epochs`: number of batches in an epoch of each task.
    `by_index`: whether the step may read ``batch_idx``, and clients differ in it since their epochs differ in length.
    """

    def __init__(
        self,
        trainer: LocalTrainer,
        built: TrainableSubmodel,
        places: list[Place],
        known: Known | None,
        members: Sequence[Member],
        counts: Sequence[int],
        choose: Callable[[Sequence[int]], AbstractContextManager[None]],
        graphs: BatchGraphs | None = None,
    ) -> None:
        """Create the steps of a batch of clients, and load the values that each client received.

        `graphs`: CUDA graphs that make the steps, with the memory that they read; None = all steps are eager.
        """
        self.trainer, self.built, self.places, self.known = trainer, built, places, known
        self.members, self.counts, self.choose, self.graphs = members, counts, choose, graphs
        num, self.device = len(members), trainer.fabric.device
        self.rows = Rows(built.present.layout, num, self.device)
        self.rows.fill([member.received for member in members], {} if graphs is None else graphs.apart)
        self.losses = torch.zeros(num, dtype=torch.float64, device=self.device)
        self.logged = Logged(num, {} if graphs is None else graphs.sums)
        self.seen: defaultdict[Any, set[int]] = defaultdict(set)
        self.states: list[Tensor | int] = [member.assignment.seed for member in members]
        self._indices: dict[tuple[int, ...], slice | Tensor] = {}
        self._rates = _rates_of(trainer, built.optimizer) if graphs is None else graphs.rates
        trains = {id(p): name for name, p in built.module.named_parameters()}
        self.groups = [  # optimizers skip frozen parameters, which may be in their groups
            (group, [trains[id(p)] for p in group["params"] if p.requires_grad])
            for group in built.optimizer.param_groups
        ]
        self.trained = [name for _, names in self.groups for name in names]
        order = {name: place for place, name in enumerate(trains.values())}
        # indices of the trained tensors, in the module's order of parameters
        self.in_order = sorted(range(len(self.trained)), key=lambda place: order[self.trained[place]])
        self.epochs = [member.data.num_batches(trainer.training.batch_size) for member in members]
        lengths = set(self.epochs)
        if len(lengths) > 1 and not all(s.interval == "step" and s.frequency == 1 for s in built.schedulers):
            raise Unstackable(
                "a learning rate scheduler steps once an epoch, but clients' epochs have different lengths: let it step "
                "at every optimizer step (interval 'step'), so that several clients can be trained together"
            )
        self.by_index = len(lengths) > 1 and max(counts) > min(lengths) and reads_index(built.module)
        self.per_epoch = max(lengths)
        self.anchors = (
            [self.rows.stack(built.present.layout.by_name[name], slice(0, num)).clone() for name in self.trained]
            if trainer.local.prox
            else []
        )
        if graphs is not None:
            self.losses, *self.anchors = graphs.fixed([self.losses, *self.anchors])

    def run(self) -> None:
        """Run all steps of all tasks in the batch."""
        self.logged.attach(self.built.module)
        optimizer: torch.optim.Optimizer | None = None
        num, graphs = 0, self.graphs
        for index, batch in enumerate(self._batches()):
            if optimizer is None or batch.num != num:
                optimizer, num = self._optimizer(batch.num, optimizer), batch.num
                optimizer = optimizer if graphs is None else graphs.own(optimizer)
            if graphs is None:
                self.make_step(optimizer, batch, index)
            else:
                graphs.run(self, optimizer, batch, index)
            if self.built.schedulers:
                self._schedule(optimizer, index + 1)
        self.rows.settle()
        if graphs is not None:  # copied, since the next batch of clients uses the same memory
            self.losses = self.losses.clone()
            self.logged.copy_sums()

    def make_step(self, optimizer: torch.optim.Optimizer, batch: Batch, index: int) -> None:
        """Compute the gradients of a batch, and make the optimizer's step."""
        self._gradients(optimizer, batch, index)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self.anchors:
            anchors = [anchor[: batch.num] for anchor in self.anchors]
            ProximalTerm(parameters, anchors).add_to_gradients(self.trainer.local.prox)
        if (most := self.trainer.options.gradient_clip_val) is not None:
            inside = [parameters[place].grad for place in self.in_order]
            clip_(self.known, [gradient for gradient in inside if gradient is not None], most)
        step(optimizer, self.trainer.fabric.strategy)
        zero_grad(optimizer)

    def places_of(self, clients: Sequence[int]) -> slice | Tensor:
        """Return the rows of these clients, ascending; a list of them is sent to a GPU once."""
        key = tuple(clients)
        if key not in self._indices:
            first, end = key[0], key[-1] + 1
            listed = slice(first, end) if end - first == len(key) else torch.tensor(key).to(self.device)
            self._indices[key] = listed
        return self._indices[key]

    def _schedule(self, optimizer: torch.optim.Optimizer, num_done: int) -> None:
        """Step the schedulers that are due after ``num_done`` batches, and copy the learning rates to the optimizer."""
        # schedulers warn unless the optimizer has stepped; without gradients its step changes nothing
        self.built.optimizer.step()
        epoch, index = divmod(num_done - 1, self.per_epoch)
        for schedule in self.built.schedulers:
            if schedule.is_due("step", index) or (index + 1 == self.per_epoch and schedule.is_due("epoch", epoch)):
                schedule.scheduler.step()
        for (group, _), ours in zip(self.groups, optimizer.param_groups, strict=True):
            ours.update({key: value for key, value in group.items() if key != "params"})
        if self._rates is not None:
            self._rates.prepare(optimizer)

    def _batches(self) -> Iterator[Batch]:
        generators = [torch.Generator().manual_seed(member.assignment.seed) for member in self.members]
        lengths = [self.trainer.training.length(member.assignment) for member in self.members]
        data = [member.data for member in self.members]
        return batches(data, generators, lengths, self.counts, self.trainer.training.batch_size, self._fetch_of)

    def _fetch_of(self, data: ClientData) -> Fetch:
        """Return the function that makes a client's batch, on the device, from sample numbers."""
        if self.trainer.feed is not None:
            found: Fetch = self.trainer.feed.fetch_of(data)
            return found
        return data.fetch if self.device.type == "cpu" else lambda rows: to_device(data.fetch(rows), self.device)

    def _optimizer(self, num: int, last: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
        """Create an optimizer for the first ``num`` clients, with the state that they have in the optimizer ``last``."""
        layout = self.built.present.layout
        groups = []
        for group, names in self.groups:
            stacks = [nn.Parameter(self.rows.stack(layout.by_name[name], slice(0, num))) for name in names]
            groups.append({**group, "params": stacks})
        made = type(self.built.optimizer)(groups)  # type: ignore[call-arg]
        if self._rates is not None:
            self._rates.prepare(made)
        if last is not None:
            for old, new in zip(last.param_groups, made.param_groups, strict=True):
                # entries that the optimizer has added, such as a number of steps
                new.update({name: value for name, value in old.items() if name not in new})
                for was, now in zip(old["params"], new["params"], strict=True):
                    made.state[now] = {
                        key: value[:num] if isinstance(value, Tensor) and value.dim() else value
                        for key, value in last.state[was].items()
                    }
        return made

    def _gradients(self, optimizer: torch.optim.Optimizer, batch: Batch, index: int) -> None:
        """Compute gradients for all clients of a batch, in one pass for each shape of batch."""
        for kind, clients in batch.kinds.items():
            self.seen[kind].update(clients)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        groups = self._groups(batch, index)
        if len(groups) == 1:
            self._backward(parameters, range(batch.num), batch, groups[0][0])
            return
        gradients = []
        for own_index, clients in groups:
            chosen = self.places_of(clients)
            stacks = [
                self.rows.stack(self.built.present.layout.by_name[name], chosen).detach().requires_grad_()
                for name in self.trained
            ]
            self._backward(stacks, clients, batch, own_index)
            gradients.append([stack.grad for stack in stacks])
        order = [client for _, clients in groups for client in clients]
        places = torch.tensor(sorted(range(len(order)), key=order.__getitem__)).to(self.device)
        for parameter, parts in zip(parameters, zip(*gradients, strict=True), strict=True):
            found = [part for part in parts if part is not None]
            if len(found) not in (0, len(parts)):
                raise Unstackable(
                    "a parameter has a gradient for batches of some shapes only: use it in each step to train clients as one "
                    "batch"
                )
            parameter.grad = torch.cat(found).index_select(0, places) if found else None

    def _groups(self, batch: Batch, index: int) -> list[tuple[int, list[int]]]:
        """Group clients whose losses one pass can compute; return each group with the batch index for its `training_step`."""
        if not self.by_index:  # the step does not use its batch index, or that is equal for all clients
            return [(index % self.per_epoch, clients) for clients in batch.kinds.values()]
        groups: defaultdict[tuple[Any, int], list[int]] = defaultdict(list)
        for kind, clients in batch.kinds.items():
            for client in clients:
                groups[kind, index % self.epochs[client]].append(client)
        return [(own_index, clients) for (_, own_index), clients in groups.items()]

    def _backward(self, stacks: Sequence[Tensor], clients: Sequence[int], batch: Batch, index: int) -> None:
        """Compute the losses of some clients, and the gradients of their stacked parameters."""
        layout, chosen = self.built.present.layout, self.places_of(clients)
        tensors = dict(zip(self.trained, stacks, strict=True))
        others = {name for _, _, name in self.places} - set(self.trained)
        tensors |= {name: self.rows.stack(layout.by_name[name], chosen) for name in others}
        columns, form = batch.stacked(clients)
        states = [self.states[client] for client in clients]
        module: Any = self.built.module
        self.logged.weight = float(batch.sizes[clients[0]])  # batches of these clients have equal sizes

        def one(inside: Callable[[Tensor], Tensor]) -> tuple[Any, list[Any]]:
            values = {name: inside(stack) for name, stack in tensors.items()}
            leaves = [inside(one) if isinstance(one, Tensor) else one for one in columns]
            mode = Stacked(len(clients), states, self.known, self.device)
            with _Placed(self.places, values), self.choose(clients), mode:
                answer = module.training_step(tree_unflatten(leaves, form), index)
            return answer["loss"] if isinstance(answer, dict) else answer, self.logged.take()

        losses, values = within(len(clients), one)
        self._note(clients, losses.reshape(len(clients)), values, states)
        backward(losses.sum(), self.trainer.fabric.strategy)
        if not isinstance(chosen, slice):
            for name in others:
                self.rows.stack(layout.by_name[name], slice(0, len(self.members)))[chosen] = tensors[name]

    def _note(self, clients: Sequence[int], losses: Tensor, values: list[Tensor], states: list[Tensor | int]) -> None:
        """Store losses, logged values and random states of one step."""
        where = self.places_of(clients)
        self.losses[where] += widened(losses)
        self.logged.add(clients, values, where)
        for client, state in zip(clients, states, strict=True):
            self.states[client] = state


def _rates_of(trainer: LocalTrainer, optimizer: torch.optim.Optimizer) -> Any:
    """Return the object that sets an optimizer's options for captured steps; None if no steps are captured."""
    if trainer.capture is None:
        return None
    from raafl.local.captured.limits import Rates, problems_of_optimizer

    is_plain = bool(problems_of_optimizer(optimizer))
    return None if is_plain else Rates(trainer.fabric.device)


class _Placed:
    """Context in which a module has other tensors; the module may change them in place, but not replace them."""

    def __init__(self, places: list[tuple[dict[str, Any], str, str]], tensors: dict[str, Tensor]) -> None:
        self._places, self._tensors = places, tensors
        self._old = [held[key] for held, key, _ in places]

    def __enter__(self) -> None:
        for held, key, name in self._places:
            held[key] = self._tensors[name]

    def __exit__(self, kind: object, *_: object) -> None:
        replaced = [name for held, key, name in self._places if held.get(key) is not self._tensors[name]]
        for (held, key, _name), old in zip(self._places, self._old, strict=True):
            held[key] = old
        if replaced and kind is None:
            raise Unstackable(
                f"the training step replaces the tensor {replaced[0]} by another: change it in place to train clients as one "
                "batch"
            )


_LEAST_NORM = 1e-6  # the constant in torch's own gradient clipping


def clip_(known: Known | None, gradients: Sequence[Tensor], most: float) -> None:
    """Scale gradients in place so that no client's total norm exceeds a bound.

    `known`: record of whether one call on stacked tensors gives the same bits as one call per client, by operation
    and shapes.
    `gradients`: stacked gradients of shape (clients, ...).
    """
    if gradients:
        norms = torch.stack([_norms(known, one) for one in gradients], 1)
        factors = (most / (_norms(known, norms) + _LEAST_NORM)).clamp(max=1.0)
        for one in gradients:
            one.mul_(factors.view(-1, *(1,) * (one.dim() - 1)))


def _norms(known: Known | None, stack: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm
    return product(known, "norm", lambda all: norm(all.reshape(len(all), -1), dim=1), norm, stack)


class Logged:
    """Replacement for `Recorder` that adds up logged values for each client separately.

    Attributes:
        weight: weight of values that are logged without a ``batch_size``: number of samples in each client's current
            batch.
    """

    def __init__(self, num: int, memory: dict[str, Tensor] | None = None) -> None:
        self._num, self.weight = num, 1.0
        # memory of the sums, by name of a logged value; more is added as needed
        self._memory: dict[str, Tensor] = {} if memory is None else memory
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, list[float]] = {}
        self._step: list[tuple[str, Any, float, str]] = []
        self._said: list[tuple[str, Any, float, str]] = []

    def attach(self, module: nn.Module) -> None:
        """Redirect ``log`` and ``log_dict`` of the module, and of LightningModules inside it, to this object."""
        attach_log(module, self.log)

    def log(
        self,
        name: str,
        value: Any,
        *,
        reduce_fx: str | Callable[..., Any] = "mean",
        batch_size: int | None = None,
        **kwargs: object,
    ) -> None:
        """Record a value that the clients' common step logs, called inside vmap; see `Recorder.log`."""
        how = reduction_of(reduce_fx)
        if callable(getattr(value, "compute", None)):
            raise Unstackable(
                f"the training step logs '{name}', an object of {type(value).__name__}: log a number to train clients as one batch"
            )
        if how not in START:
            raise Unstackable(
                f"the training step logs '{name}' with reduce_fx '{how}': give {', '.join(START)} to train clients as one batch"
            )
        value = widened(value) if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
        self._step.append((name, value, self.weight if batch_size is None else float(batch_size), how))

    def take(self) -> list[Tensor]:
        """Return the values that this step has logged; pass them to `add` outside vmap."""
        self._said, self._step = self._step, []
        return [value for _, value, _, _ in self._said]

    def add(self, clients: Sequence[int], values: Sequence[Tensor], where: slice | Tensor) -> None:
        """Add the values that clients have logged in a step.

        Args:
            clients: positions of the clients.
            values: logged values, each with one number per client.
            where: the same positions, in the form that chooses these rows of a tensor.
        """
        for (name, _, weight, how), value in zip(self._said, values, strict=True):
            value = value.reshape(len(clients))
            value = value * weight if how == "mean" else value
            self._begin(name, how, value.device)
            sums = self._sums[name]
            if how in ("mean", "sum"):
                sums[where] += value
            else:
                sums[where] = (torch.minimum if how == "min" else torch.maximum)(sums[where], value)
        self.count(clients, self.said)

    @property
    def said(self) -> list[tuple[str, float, str]]:
        """Name, weight and reduction of each value that the last step has logged."""
        return [(name, weight, how) for name, _, weight, how in self._said]

    def _begin(self, name: str, how: str, device: torch.device) -> None:
        if name in self._sums:
            return
        own = self._memory.get(name)
        if own is None:
            own = self._memory[name] = torch.empty(self._num, dtype=torch.float64, device=device)
        self._sums[name], self._counts[name] = own.fill_(START[how]), [0.0] * self._num

    def begin(self, said: Iterable[tuple[str, float, str]]) -> bool:
        """Set the sums of values to their start, where they are not begun; return whether all have their memory."""
        for name, _, how in said:
            if name not in self._memory:
                return False
            self._begin(name, how, self._memory[name].device)
        return True

    def count(self, clients: Sequence[int], said: Iterable[tuple[str, float, str]]) -> None:
        """Add the weights of values that ``clients`` have logged in a step."""
        for name, weight, how in said:
            counts = self._counts[name]
            for client in clients:
                counts[client] = counts[client] + weight if how == "mean" else 1.0

    def counts(self) -> dict[str, list[float]]:
        """Return a copy of the weights of all values, for `restore`."""
        return {name: list(counts) for name, counts in self._counts.items()}

    def restore(self, counts: dict[str, list[float]]) -> None:
        """Set the weights of all values to those that `counts` has returned."""
        self._counts = counts

    def copy_sums(self) -> None:
        """Copy the sums out of their memory."""
        self._sums = {name: sums.clone() for name, sums in self._sums.items()}

    def hand(self, client: int, recorder: Recorder) -> None:
        """Copy the values that one client has logged into a recorder.

        Args:
            client: position of the client.
            recorder: recorder that receives the values.
        """
        sums = self.read(None)
        recorder.take_over(
            {name: (of_all[client], counts[client]) for name, (of_all, counts) in sums.items() if counts[client]}
        )

    def read(self, most: int | None) -> dict[str, tuple[Any, list[float]]]:
        """Return the sum of each logged value and its total weight, for all clients, by name; at most ``most`` names.

        Sums on a GPU are not read yet.
        """
        found = [(name, self._sums[name]) for name in list(self._sums)[:most]]
        return {name: (sums if sums.is_cuda else sums.tolist(), self._counts[name]) for name, sums in found}
