"""Merge updates weighted by the importance of each segment (Co-S2P, Eqs. 4 and 5).

Shapes: scores and norms are (segments,) over all segments of the model; each trained tensor has the index of the segment of each
position along one of its dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from raafl.algorithm import FlatTensors, GlobalState, Merge, MergeMemory, Spec, Submodels, Update, positive
from raafl.core.state import OneValue
from raafl.parts.merge.mean import trained_pieces, zeros_like
from raafl.parts.merge.personal import AtWork
from raafl.parts.select.segments import cuts_of
from raafl.submodel.flat import chunks

TINY = torch.finfo(torch.float32).tiny
"""Smallest divisor, for segments whose norm or weight is 0."""


def importance(update: Tensor, drift: Tensor, weights: Tensor) -> Tensor:
    """Compute how important a client's update is for each segment, a group of units such as neurons (Eq. 4).

    The score is ``||Delta|| / (1 + ||theta_now - theta_start|| / ||theta_now||)``: a large change counts more, and less
    if the global model has moved since.

    Args:
        update: norms ||Delta|| of the update's change in each segment, shape (segments,).
        drift: norms of the global model's change in each segment since the client started, shape (segments,).
        weights: norms of the segments of the current model, shape (segments,).
    """
    return update / (1 + drift / weights.clamp_min(TINY))


@dataclass
class _ImportanceMemory(MergeMemory):
    """Merge state: for each element of the model the sum of weighted client changes, and the sum of the weights."""

    key = "importance"
    sum: FlatTensors
    weight: FlatTensors


@dataclass
class _MostStartBytes(OneValue[int]):
    """Merge state: the largest number of bytes that stored start models of late clients have taken so far."""

    key = "most_start_bytes"
    value: int = 0


_SUMS = ("sum", "weight")  # keys of reusable buffers in `GlobalState.scratch`


def _zeros(state: GlobalState, name: str) -> FlatTensors:
    """Return a zeroed buffer with the model's shapes; reuse the one under ``name`` in `GlobalState.scratch` if there is one."""
    flat: FlatTensors | None = state.scratch.pop(name, None)
    return zeros_like(state.values) if flat is None else flat


@dataclass(frozen=True)
class ImportanceMerge(Merge):
    """Merge that weights each segment (a group of units, such as neurons) of an update by its importance (Eqs. 4, 5).

    Each segment theta_i of the model becomes ``theta_i + eta sum_n score_n d_n / sum_n score_n``, over the clients n
    that train it. d_n is client n's change of the segment, score_n its importance (see `importance`), eta the server's
    learning rate. The paper has accumulated gradients in place of d_n; the learning rate between the two cancels.

    A weight matrix is divided into segments along its outputs. If clients have different inputs of it, each element
    averages over the clients that have it. A tensor that is never narrowed (norms, embeddings, exits) is one segment.
    Running statistics become their plain mean. Elements that no update trains, and segments in which all updates are
    0, stay unchanged.

    The score depends on the values theta_start from which a client started. When the model changes, the server copies
    them for each client still at work, and keeps them until it reports. So a merge that includes all clients copies
    nothing. The copies take at most the trained part of each submodel at work; checkpoints contain them and the report
    counts them. Two sums of the model's size are added.

    Attributes:
        server_lr: factor on the merged change (eta).
        segments: number of equal groups into which the neurons of a layer are divided; attention has one for each head.
    """

    server_lr: float = 1.0
    segments: int = 16
    sends: Literal["values", "delta"] = "delta"
    by_client: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive("server_lr", self.server_lr)
        positive("segments", self.segments)

    def notes(self, state: GlobalState, num_clients: int) -> list[str]:
        """Return a message for the user: how much memory the server may need to store the models that late clients received."""
        each = state.submodels.layout(part="trained").num_bytes
        return [
            "importance of updates: the server stores the values from which late clients started, at most "
            f"{num_clients} submodels (the whole model trains {each:,} bytes)"
        ]

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Compute the importance of each segment of an update, and add the update to the sums with these weights."""
        table = _table(state.submodels, self.segments)
        places, plan = table.places(state.submodels, spec), state.submodels.plan(spec)
        scores = importance(table.norms(update.tensors, places), *self._norms(state, update.client, spec, table))
        # running statistics, such as batch norm's means, have no importance: all clients' values weigh the same
        scores[table.num_scored :] = 1.0
        weighted, weight = FlatTensors.empty(plan.layout), FlatTensors.empty(plan.layout)
        for name, tensor in update.tensors.items():
            factor = _shaped(scores, places[name], tensor)
            weight[name].copy_(factor.expand_as(tensor))
            weighted[name].copy_(tensor * factor)
        memory = state.memory.of(_ImportanceMemory, lambda: _ImportanceMemory(*(_zeros(state, name) for name in _SUMS)))
        for total, values in ((memory.sum, weighted), (memory.weight, weight)):
            plan.add_(total, values.to(state.values.device))

    def _norms(self, state: GlobalState, client: int, spec: Spec, table: _Table) -> tuple[Tensor, Tensor]:
        """Compute, by segment, the L2 norm of the global model's change since the client's task began, and that of the model.

        Only elements that the client trains count; each result has shape (segments,).
        """
        places = table.places(state.submodels, spec)
        now = state.submodels.plan(spec).gather(state.values)
        weights = table.norms(now, places)
        task = state.memory.of(AtWork).starts.get(client)
        start = None if task is None else task.start
        if start is None:  # the global model has not changed since the client started
            return torch.zeros_like(weights), weights
        for dtype, buffer in now.buffers.items():
            buffer.sub_(start.buffers[dtype])
        return table.norms(now, places), weights

    def apply(self, state: GlobalState) -> None:
        """Move each element of the model by the weighted mean of the updates."""
        copy_start_values(state)
        memory = state.memory.pop(_ImportanceMemory)
        assert memory is not None
        for is_parameter, flats in trained_pieces(state, memory.sum, memory.weight):
            rate = self.server_lr if is_parameter else 1.0
            for old, weighted, weights in chunks(*flats):
                old.add_(torch.where(weights > 0, weighted / weights.clamp_min(TINY), 0.0), alpha=rate)
        for name, flat in zip(_SUMS, (memory.sum, memory.weight), strict=True):
            for buffer in flat.prefix(state.submodels.layout(part="trained")).buffers.values():
                buffer.zero_()
            state.scratch[name] = flat

    def report(self, state: GlobalState) -> dict[str, Any]:
        """Return an entry "start_bytes" for the run's summary: the most memory, in bytes, that the merge used for old models.

        It stores the model from which each late client started.
        """
        return {"start_bytes": state.memory.of(_MostStartBytes).value}

    def __str__(self) -> str:
        step = "" if self.server_lr == 1 else f", server lr {self.server_lr:g}"
        return f"mean of deltas by importance of segments{step}"


def copy_start_values(state: GlobalState) -> None:
    """Copy the values that each client still at work has received, before a merge overwrites them."""
    tasks = state.memory.of(AtWork).starts.values()
    for task in tasks:
        if task.start is None and task.spec.trained != ():
            task.start = state.submodels.plan(task.spec).gather(state.values)
    start_bytes = sum(task.start.num_bytes for task in tasks if task.start is not None)
    most = state.memory.of(_MostStartBytes)
    most.value = max(start_bytes, most.value)


# ---- map elements to segments ----

Place = tuple[int | None, Tensor]
"""Segments of a tensor: the dimension along which they change, and the segment of each index of it; (None, one segment) if all
elements are in the same."""


class _Table:
    """Numbering of all segments of the trained tensors: each segment of each axis gets one number.

    `num`: number of segments. `num_scored`: number of segments of parameters; the last number is for running
    statistics.
    """

    def __init__(self, submodels: Submodels, number: int) -> None:
        shapes = {entry.name: entry.shape for entry in submodels.layout(part="trained").entries}
        self._number, self._axes, self._cuts = number, submodels.axes, cuts_of(submodels, number)
        self._firsts: dict[str, int] = {}
        self.num = 0
        for name, cut in self._cuts.items():
            self._firsts[name], self.num = self.num, self.num + len(cut)
        parameters = [name for name in shapes if name in submodels.parameter_names]
        self._places = {name: self._place(name, shapes[name]) for name in parameters}
        self.num_scored = self.num
        for name in shapes.keys() - self._places.keys():
            self._places[name] = (None, torch.tensor([self.num]))
        self.num += 1

    def _place(self, name: str, shape: tuple[int, ...]) -> Place:
        members = [(a.name, m) for a in self._axes.values() for m in a.members if m.name == name]
        if not members:
            self.num += 1
            return None, torch.tensor([self.num - 1])
        dim = min(member.dim for _, member in members)
        ids = torch.full((shape[dim],), -1)
        for axis, member in members:
            bounds = self._cuts[axis].bounds if member.dim == dim else ()
            for i, (start, stop) in enumerate(pairwise(bounds)):
                ids[member.offset + start * member.unit : member.offset + stop * member.unit] = self._firsts[axis] + i
        if bool((ids < 0).any()):
            # rows of this tensor that belong to no axis share one more segment
            ids[ids < 0] = self.num
            self.num += 1
        return dim, ids

    def places(self, submodels: Submodels, spec: Spec) -> dict[str, Place]:
        """Map each tensor that a submodel trains to the numbers of the segments to which its rows belong."""
        spec = submodels.normal(spec)
        return submodels.cached("importance of", (self._number, spec), lambda: self._found(submodels, spec))

    def _found(self, submodels: Submodels, spec: Spec) -> dict[str, Place]:
        selections, places = submodels.selections(spec), {}
        for entry in submodels.layout(spec, "trained").entries:
            dim, ids = self._places[entry.name]
            runs = selections.get(entry.name, {}).get(dim) if dim is not None else None
            places[entry.name] = (dim, ids if runs is None else torch.cat([ids[a:b] for a, b in runs]))
        return places

    def norms(self, tensors: FlatTensors, places: dict[str, Place]) -> Tensor:
        """Compute the L2 norm of each segment over the submodel's elements; float64 on the CPU, shape (segments,)."""
        squares = torch.zeros(self.num, dtype=torch.float64)
        for name, tensor in tensors.items():
            dim, ids = places[name]
            rows = tensor.reshape(1, -1) if dim is None else tensor.movedim(dim, 0).reshape(len(ids), -1)
            squares.index_add_(0, ids, torch.linalg.vector_norm(rows, dim=1).cpu().double().square())
        return squares.sqrt()


def _shaped(scores: Tensor, place: Place, tensor: Tensor) -> Tensor:
    """Look up the segment score of each element of ``tensor``; the result has a shape that broadcasts to the tensor's."""
    dim, ids = place
    factors = scores[ids].to(tensor.device, tensor.dtype)
    return factors.reshape([1] * tensor.dim()) if dim is None else factors.view(-1, *[1] * (tensor.dim() - dim - 1))


def _table(submodels: Submodels, number: int) -> _Table:
    return submodels.cached("importance", number, lambda: _Table(submodels, number))


# Merge updates as Co-S2P's published code does, which is not what its paper says.
#
# One weight for a client, not for a segment (L1 norms)::
#
#     gamma_n = ||Delta_n||_1 / rate_n / (||theta_t - theta_{t - tau_n}||_1 + 1)
#     theta_{t+1} = theta_t + sum_n gamma_n Delta_n / sum_n gamma_n
#
# where Delta_n is 0 on elements that client n lacks. So an element that few clients hold moves less than their mean.


@dataclass
class _PublishedMemory(MergeMemory):
    """Merge state of the published variant: the sum of weighted client changes for each element, and the sum of weights."""

    key = "published"
    sum: FlatTensors
    weight: float = 0.0


@dataclass(frozen=True)
class PublishedMerge(Merge):
    """Merge as in Co-S2P's published code, which differs from its paper.

    Two faults of that code are corrected: a client's rate is the share of parameters that it really trains, and the
    change of the model since the client's start is measured on these parameters only.

    Attributes:
        absent_inputs: whether to repeat a fault of the published code. If a client has only some columns of a weight
            theta, since the layer before is narrowed, that code uses ``-theta`` instead of 0 as the client's change of
            the missing columns.
    """

    absent_inputs: bool = True
    sends: Literal["values", "delta"] = "delta"
    by_client: ClassVar[bool] = True

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Add an update, weighted by its client's importance, to the running sum of the next merge."""
        plan = state.submodels.plan(spec)
        memory = state.memory.of(_PublishedMemory, lambda: _PublishedMemory(zeros_like(state.values)))
        rate = plan.layout.num_bytes / state.submodels.layout(part="trained").num_bytes
        size = sum(float(tensor.double().abs().sum()) for _, tensor in update.tensors.items())
        gamma = size / rate / (_drift(state, update.client, spec) + 1)
        plan.add_(memory.sum, update.tensors.to(state.values.device), gamma)
        memory.weight += gamma
        if self.absent_inputs:
            _forget_absent(state, spec, update.tensors, memory.sum, gamma)

    def apply(self, state: GlobalState) -> None:
        """Move the model by the weighted sum of the updates."""
        copy_start_values(state)
        memory = state.memory.pop(_PublishedMemory)
        if memory is None or not memory.weight:
            return
        trained = state.submodels.layout(part="trained")
        total = memory.sum.prefix(trained)
        for name, values in state.values.prefix(trained).items():
            values.add_(total[name], alpha=1 / memory.weight)

    def __str__(self) -> str:
        return "one weight a client, as published" + (", absent inputs forgotten" if self.absent_inputs else "")


def _drift(state: GlobalState, client: int, spec: Spec) -> float:
    """Compute the L1 norm of the change of the global model since a client's task began, over the client's submodel."""
    task = state.memory.of(AtWork).starts.get(client)
    if task is None or task.start is None:
        return 0.0
    now = state.submodels.plan(spec).gather(state.values)
    return sum(float((tensor - task.start[name]).double().abs().sum()) for name, tensor in now.items())


def _forget_absent(state: GlobalState, spec: Spec, present: FlatTensors, total: FlatTensors, gamma: float) -> None:
    """Subtract ``gamma * theta`` from ``total`` at matrix entries whose row the submodel has and whose column it lacks."""
    for name, dims in state.submodels.selections(state.submodels.normal(spec)).items():
        if 1 not in dims or name not in present:
            continue
        theta = state.values[name]
        absent, rows = torch.ones(theta.shape[1], dtype=torch.bool), torch.ones(theta.shape[0], dtype=torch.bool)
        for start, stop in dims[1]:
            absent[start:stop] = False
        if 0 in dims:
            rows.fill_(False)
            for start, stop in dims[0]:
                rows[start:stop] = True
        place = (rows[:, None] & absent).view(*theta.shape[:2], *[1] * (theta.dim() - 2)).to(theta.device)
        total[name].sub_(theta * place, alpha=gamma)
