"""Store values of each client on the server; merge with a memory of each client's latest update (RAM-Fed, CA2FL)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from tempfile import gettempdir
from typing import Any, ClassVar, Literal

import torch

from raafl.core.algorithm import Merge
from raafl.core.state import GlobalState, MergeMemory
from raafl.core.types import Update
from raafl.errors import BadInput, fraction, one_of, positive, refuse_unused
from raafl.parts.merge.mean import Staleness
from raafl.submodel import FlatTensors, Layout, Spec, Submodels
from raafl.submodel.extract import CopyPlan
from raafl.submodel.flat import chunks
from raafl.submodel.tensor_files import check_folder, check_room, is_in_ram, release

LATEST = "latest update"
"""Store of the clients' latest updates in `GlobalState.clients`."""


@dataclass
class _LatestMemory(MergeMemory):
    """Sums over the latest updates of all clients, which themselves are in `GlobalState.clients`."""

    key = "ram_fed"
    sum: FlatTensors  # sum of all latest updates
    change: FlatTensors  # sum of the changes of these updates since the last merge
    since: int = 0  # number of updates merged since the sum was last computed anew
    # by client: version and submodel of each remembered update, oldest first; empty if updates have no age limit
    log: dict[int, list[tuple[int, Spec]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Remembered(Merge):
    """Merge that remembers each client's latest update and uses it until the client sends a new one (RAM-Fed, CA2FL).

    Each element theta moves by the mean of all remembered changes, corrected by the new ones (RAM-Fed, Wang et al.,
    Algorithm 2, lines 12 to 24; eq. 4)::

        v = 1/N sum_n u_n + 1/Gamma sum_{n in N_i} (d_n - u_n)     (no second term if Gamma = 0)
        theta <- theta + a v,  a = server_lr * mean of s(staleness_n);  then u_n <- d_n for n in N_i

    d_n is the change in client n's new update, u_n its remembered change, 0 before its first. N_i are the clients whose
    new updates train the element, Gamma is their number. N is the number of clients that have sent an update so far;
    with ``of_all`` it is the number of all clients, as in CA2FL (Wang et al. 2024).

    A client also counts as having trained the weights *into* its neurons from neurons that it does not have, with a
    change of 0, since a masked neuron gives a weight no gradient. Otherwise a weight between two regions that no client
    has together would be moved by its first update forever. Running statistics are averaged like other values, but not
    remembered.

    Memory: one float copy of the trained part for each client that has reported, and two more for sums; checkpoints
    contain them. If ``folder`` is given, the clients' copies are files there (`raafl.submodel.tensor_files`), with the
    same bits. Time: an update costs a few passes over its submodel, a merge a few over the model. The sum is recomputed
    after every N updates, so that rounding errors do not accumulate.

    Attributes:
        server_lr: step size a, in (0, 1]; None = 1/N, which suits updates that are merged one at a time.
        staleness: function s by which a late update moves the model less; it is remembered in full.
        max_age: number of merges after which a remembered update is set to 0; None = never.
        folder: folder for files with the remembered updates; None = in memory, on the model's device.
        of_all: whether N counts all clients of the run, with an update of 0 for those that have not sent any.
    """

    server_lr: float | None = 1.0
    staleness: Staleness = field(default_factory=Staleness)
    max_age: int | None = None
    folder: str | None = None
    of_all: bool = False
    sends: Literal["values", "delta"] = "delta"
    by_client: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.server_lr is not None:
            fraction("server_lr", self.server_lr)
        positive("max_age", self.max_age, optional=True)

    def check(self, state: GlobalState) -> list[str]:
        """Return a problem if the folder for remembered updates cannot be used."""
        try:
            if self.folder is not None:
                check_folder(self.folder)
        except BadInput as error:
            return [str(error)]
        return []

    def notes(self, state: GlobalState, num_clients: int) -> list[str]:
        """Return a note on the size and location of the remembered updates.

        Raises:
            BadInput: the folder has too little room.
        """
        each = state.submodels.layout(part="trained").num_bytes
        size = f"{num_clients} clients x {each:,} bytes"
        where = f"in the server's memory ({state.values.device})"
        if self.folder is not None:
            check_room(self.folder, 2 * num_clients * each, f"{size}, and as much again while a checkpoint is written")
            in_ram = ", which is in RAM itself: name a memory_folder on a disk" if is_in_ram(self.folder) else ""
            where = f"in files in {self.folder}{in_ram}"
        return [
            f"each client's latest update is remembered: {size} = {num_clients * each:,} bytes {where}; and in each checkpoint"
        ]

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Remember the elements that an update trained, in place of the client's earlier ones.

        The difference between new and earlier ones is added to the sum over all clients, and to the sum of this merge.
        """
        memory, owned = self._memory(state), _owned(state.submodels, spec)
        layout = state.submodels.layout(part="trained")
        latest = state.clients.of(LATEST, update.client, layout, state.values.device, self.folder)
        fresh = owned.widened(update.tensors)
        change = owned.plan.gather(latest).to(fresh.device)
        for dtype, buffer in change.buffers.items():
            buffer.neg_().add_(fresh.buffers[dtype])
        owned.plan.add_(memory.change, change)
        owned.plan.add_(memory.sum, change)
        owned.plan.scatter_(latest, fresh)
        _forget_statistics(state, latest)
        release(latest)
        if self.max_age is not None:
            log = memory.log.setdefault(update.client, [])
            log[:] = [*((version, other) for version, other in log if other != spec), (state.version, spec)]

    def apply(self, state: GlobalState) -> None:
        """Move the model by the mean of all remembered changes, corrected by the new ones."""
        # With the new sum U' = U + sum (d - u), this class's v equals U'/N + (1/Gamma - 1/N) sum (d - u).
        memory = self._memory(state)
        num_clients = state.num_clients if self.of_all else len(self._latest(state))
        rate = math.fsum(self.staleness(item.staleness) for item in state.waiting) / len(state.waiting)
        rate *= 1.0 / num_clients if self.server_lr is None else self.server_lr
        count = _zeros(state)
        for spec, number in Counter(item.spec for item in state.waiting).items():
            _owned(state.submodels, spec).plan.cover_(count, number)
        for dtype, total in memory.sum.buffers.items():
            theta = state.values.buffers[dtype][: total.numel()]
            for old, summed, change, gamma in chunks(theta, total, memory.change.buffers[dtype], count.buffers[dtype]):
                # 1/N is subtracted, since `summed` (U') includes the change. Where Gamma is 0 so is the change, and
                # Gamma becomes 1 to avoid a division by 0.
                more = change * gamma.clamp_min(1.0).reciprocal_().sub_(1.0 / num_clients)
                old.add_(more.add_(summed, alpha=1.0 / num_clients), alpha=rate)
                change.zero_()
        memory.since += len(state.waiting)
        self._forget_old(state, memory, next_merge=state.version + 1)
        _forget_statistics(state, memory.sum)
        if memory.since >= num_clients:
            self._sum_anew(state, memory)

    def report(self, state: GlobalState) -> dict[str, Any]:
        """Return entries for the run's summary: under "memory" the number of remembered updates and their bytes."""
        latest = self._latest(state)
        return {"memory": {"clients": len(latest), "bytes": sum(flat.num_bytes for flat in latest.values())}}

    def _memory(self, state: GlobalState) -> _LatestMemory:
        return state.memory.of(_LatestMemory, lambda: _LatestMemory(_zeros(state), _zeros(state)))

    def _latest(self, state: GlobalState) -> dict[int, FlatTensors]:
        return state.clients.everyone(LATEST, self.folder)

    def _sum_anew(self, state: GlobalState, memory: _LatestMemory) -> None:
        memory.since = 0
        memory.sum.zero_()
        # add in the order of client ids, so that a resumed run gets the same bits
        for _, latest in sorted(self._latest(state).items()):
            for dtype, buffer in memory.sum.buffers.items():
                buffer.add_(latest.buffers[dtype].to(buffer.device))
            release(latest)

    def _forget_old(self, state: GlobalState, memory: _LatestMemory, next_merge: int) -> None:
        """Set those remembered updates to 0 that will be more than ``max_age`` merges old at the next merge."""
        for client, log in memory.log.items():
            recent = [(version, spec) for version, spec in log if next_merge - version <= (self.max_age or 0)]
            if len(recent) == len(log):
                continue
            new = _zeros(state)
            old = state.clients.of(LATEST, client, new.layout, state.values.device, self.folder)
            for _, spec in recent:
                plan = _owned(state.submodels, spec).plan
                plan.scatter_(new, plan.gather(old).to(new.device))
            for dtype, total in memory.sum.buffers.items():
                total.add_(new.buffers[dtype]).sub_(old.buffers[dtype].to(total.device))
            release(old.copy_(new))
            log[:] = recent

    def __str__(self) -> str:
        words = "mean of each client's latest update, corrected by the fresh ones"
        words += ", step 1/N" if self.server_lr is None else f", step {self.server_lr:g}" if self.server_lr != 1 else ""
        words += f" x {self.staleness}" if str(self.staleness) else ""
        words += ", clients without one as 0" if self.of_all else ""
        words += "" if self.folder is None else ", on disk"
        return words + ("" if self.max_age is None else f", forgotten after {self.max_age} merges")


def _zeros(state: GlobalState) -> FlatTensors:
    return FlatTensors.zeros(state.submodels.layout(part="trained"), state.values.device)


def _forget_statistics(state: GlobalState, flat: FlatTensors) -> None:
    for name in _statistics(state.submodels, flat.layout):
        flat[name].zero_()


def _statistics(submodels: Submodels, layout: Layout) -> Iterator[str]:
    return (entry.name for entry in layout.entries if entry.name not in submodels.parameter_names)


# ---- which elements of a submodel belong to its client's regions ----


class _Owned:
    """Elements of the trained tensors that a client's regions own; in a tensor cut along several dimensions, rows of the first."""

    def __init__(self, submodels: Submodels, spec: Spec) -> None:
        """Compute the elements that a spec's regions own, and plans to copy them; trained tensors must be floating-point."""
        whole, present = submodels.layout(part="trained"), submodels.layout(spec, "trained")
        selections = submodels.selections(submodels.normal(spec))
        first = {name: {min(dims): dims[min(dims)]} for name, dims in selections.items()}
        others = {name: {d: runs for d, runs in dims.items() if d != min(dims)} for name, dims in selections.items()}
        shapes = []
        for entry in present.entries:
            shape = list(whole.by_name[entry.name].shape)
            for dim, runs in first.get(entry.name, {}).items():
                shape[dim] = sum(stop - start for start, stop in runs)
            shapes.append((entry.name, shape, entry.dtype))
        owned = Layout.pack(shapes)
        self.plan = CopyPlan(spec, whole, owned, first)
        self._inner = None if owned == present else CopyPlan(spec, owned, present, others)

    def widened(self, tensors: FlatTensors) -> FlatTensors:
        """Extend a client's update to all elements of its regions, with 0 for those that it did not train."""
        if self._inner is None:
            return tensors
        wide = FlatTensors.zeros(self.plan.layout, tensors.device)
        self._inner.scatter_(wide, tensors)
        return wide


def _owned(submodels: Submodels, spec: Spec) -> _Owned:
    return submodels.cached("owned", spec, lambda: _Owned(submodels, spec))


def memory_folder_of(memory: str, folder: str | None) -> str | None:
    """Return the folder for files of remembered updates; None = they are kept in memory.

    `folder`: folder that the user named; None = the system's folder for temporary files.

    Raises:
        BadInput: ``memory`` is neither "ram" nor "disk", or a folder is given for "ram".
    """
    one_of("memory", memory, ("ram", "disk"))
    if memory == "disk":
        return folder or gettempdir()
    refuse_unused("there are no files if memory is ram", memory_folder=(folder, None))
    return None


def store_(
    state: GlobalState, name: str, client: int, spec: Spec, values: FlatTensors, only: frozenset[str] | None = None
) -> None:
    """Store the values that a client sent, under a name; elements that it has never trained are NaN.

    `only`: names of the parameters to store; None = all that train.
    """
    plan = _plan(state, spec, only)
    own = state.clients.of(name, client, plan.full_layout, state.values.device, fill=math.nan)
    part = FlatTensors.empty(plan.layout, own.device)
    for key, tensor in part.items():
        tensor.copy_(values[key])
    plan.scatter_(own, part)


def load_(
    state: GlobalState, name: str, client: int, spec: Spec, out: FlatTensors, only: frozenset[str] | None = None
) -> None:
    """Overwrite ``out`` with the values stored for a client; elements that the client has never trained stay unchanged.

    `only`: names of the parameters to load; None = all that train.
    """
    own = state.clients.find(name, client)
    if own is None:
        return
    for key, tensor in _plan(state, spec, only).gather(own).items():
        # NaN marks elements that were never stored; updates that contain NaN are refused
        out[key].copy_(torch.where(tensor.isnan(), out[key], tensor))


def _plan(state: GlobalState, spec: Spec, only: frozenset[str] | None) -> CopyPlan:
    return state.submodels.plan(spec, "trained", "trained", state.submodels.parameter_names if only is None else only)
