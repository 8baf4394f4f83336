"""Make merges robust against bad updates: clip norms, refuse outliers, trim means, take medians.

`raafl.parts.protect.assembly` wraps an algorithm's own merge in these. An update is judged by the *difference* it would make: the
delta that a client sends if the merge takes deltas (FedBuff, FedOpt), else its trained values minus the global values of that
submodel at arrival. The latter bounds a merge's effect on the model, is defined for every submodel, and needs no old versions; in
a synchronous round, where the global values do not change, both are the same.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from raafl.core.algorithm import Merge
from raafl.core.memory import MergeMemory, OneValue
from raafl.core.state import GlobalState
from raafl.core.types import Update
from raafl.parts.merge.label_split import joint_notes
from raafl.parts.merge.mean import CHUNK, chunks
from raafl.parts.merge.wrapped import Wrapped
from raafl.parts.protect.options import Combine
from raafl.submodel import FlatTensors, Spec, Submodels
from raafl.submodel.flat import is_merged

WINDOW = 101
"""Number of the latest accepted norms that are stored for each size class."""


# ---- differences and their norms ----


def difference(state: GlobalState, update: Update, spec: Spec, sends: str) -> FlatTensors:
    """Return the change that ``update`` makes to the model: its own tensors, read only, if it is a delta; otherwise new storage.

    Args:
        state: the global model.
        update: the client's update.
        spec: submodel of the update.
        sends: content of the update: "values", or "delta", which is the change itself.
    """
    if sends == "delta":
        return update.tensors
    change = state.submodels.plan(spec).gather(state.values)
    for dtype, buffer in change.buffers.items():
        torch.sub(update.tensors.buffers[dtype], buffer, out=buffer)
    return change


def scaled(state: GlobalState, update: Update, spec: Spec, sends: str, factor: float) -> FlatTensors:
    """Scale the change that ``update`` makes to the model by ``factor``, in new storage.

    Args:
        state: the global model.
        update: the client's update.
        spec: submodel of the update.
        sends: content of the update: "values", or "delta", which is the change itself.
        factor: number by which the change is multiplied.

    Returns:
        Values or a delta, like the update's own tensors.
    """
    if sends == "delta":
        buffers = {dtype: buffer * factor for dtype, buffer in update.tensors.buffers.items()}
        return FlatTensors(update.tensors.layout, buffers)
    values = state.submodels.plan(spec).gather(state.values)
    for dtype, buffer in values.buffers.items():
        buffer.lerp_(update.tensors.buffers[dtype], factor)
    return values


def norm_of(tensors: FlatTensors, submodels: Submodels) -> float:
    """Return the L2 norm over the parameters of a trained part, summed in double precision, where no finite update overflows.

    Running statistics are not counted: their scale is unrelated to that of parameters.
    """
    squares = []
    for dtype, buffer in tensors.buffers.items():
        # every buffer stores parameters before running statistics
        size = sum(e.numel for e in tensors.layout.entries if e.dtype == dtype and e.name in submodels.parameter_names)
        for piece in torch.split(buffer[:size], CHUNK if buffer.device.type == "cpu" else max(size, 1)):
            squares.append(piece.double().square().sum().item())
    return math.sqrt(math.fsum(squares))


# ---- clipping and refusing ----


@dataclass
class GuardMemory(MergeMemory):
    """Norms of accepted updates, and counts of clipped ones.

    Attributes:
        norms: latest accepted norms, by class of sizes.
        clipped: number of updates that were clipped.
        measured: assignment and norm of an update that passed the checks and is received next; None = there is none.
    """

    key = "guard"
    norms: dict[int, list[float]] = field(default_factory=dict)
    clipped: int = 0
    measured: tuple[int, float] | None = None


@dataclass(frozen=True)
class NormFilter(Wrapped):
    """Merge wrapper that clips and refuses updates by norm (norm bounding: Sun et al. 2019, section 4).

    Clipping: ``d <- d * min(1, C / ||d||)``, with the parameters' norm; running statistics are scaled along, but not
    bounded. Refusing: ``||d|| > outlier * median`` of the last `WINDOW` accepted norms (before clipping) in the same
    size class. The class is the number of trained parameters in octaves, so that small submodels are compared with
    small ones. Updates of the warm-up are accepted without this check. Memory: `WINDOW` numbers per size class.

    Attributes:
        clip_norm: norm C to which changes are clipped; None = no clipping.
        outlier: multiple of the median above which an update is refused; None = refuse none.
        warm_up: number of accepted norms of a class before an update is judged.
    """

    clip_norm: float | None
    outlier: float | None
    warm_up: int

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Return "outlier" for a norm far above those of its class; otherwise the inner merge's reason."""
        if self.outlier is not None:
            norm = self._measure(state, update, spec)
            accepted = state.memory.of(GuardMemory).norms.get(_size_class(update.tensors), [])
            if len(accepted) >= self.warm_up and norm > self.outlier * statistics.median(accepted) > 0:
                return "outlier"
            state.memory.of(GuardMemory).measured = (update.assignment, norm)
        return super().reject_reason(state, update, spec, staleness)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Clip the update and pass it to the inner merge; within bounds it stays unchanged, bit for bit."""
        memory = state.memory.of(GuardMemory)
        number, norm = memory.measured or (None, 0.0)
        memory.measured = None
        if number != update.assignment:
            norm = self._measure(state, update, spec)
        if self.outlier is not None:
            norms = memory.norms.setdefault(_size_class(update.tensors), [])
            norms.append(norm)
            del norms[:-WINDOW]
        if self.clip_norm is not None and norm > self.clip_norm:
            memory.clipped += 1
            tensors = scaled(state, update, spec, self.sends, self.clip_norm / norm)
            update = replace(update, tensors=tensors)
        super().receive(state, update, spec, staleness)

    def report(self, state: GlobalState) -> dict[str, Any]:
        """Return, as "guard", the number of clipped updates and the limits; refused updates are counted elsewhere."""
        memory = state.memory.of(GuardMemory)
        counts = {"clip_norm": self.clip_norm, "clipped": memory.clipped, "outlier": self.outlier}
        return _reported(super().report(state), counts)

    def _measure(self, state: GlobalState, update: Update, spec: Spec) -> float:
        return norm_of(difference(state, update, spec, self.sends), state.submodels)

    def __str__(self) -> str:
        words = [f"norms clipped to {self.clip_norm:g}"] if self.clip_norm is not None else []
        words += [f"outliers above {self.outlier:g} x median refused"] if self.outlier is not None else []
        return f"{', '.join(words)}, then {self.inner}"


def _reported(inner: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    return {**inner, "guard": {**inner.get("guard", {}), **own}}


def _size_class(tensors: FlatTensors) -> int:
    return sum(buffer.numel() for buffer in tensors.buffers.values()).bit_length()


# ---- trimmed means and medians ----


def num_dropped(combine: Combine, trim: float, num: int) -> int:
    """Return the number of values dropped at each end of ``num``: floor(trim * num); for a median all but the middle one or two.

    Args:
        combine: way of combining the values.
        trim: share dropped at each end by trimmed_mean.
        num: number of values to combine.
    """
    if combine == "median":
        return max(num - 1, 0) // 2
    # in floating point 0.29 * 100 is slightly below 29
    return int(trim * num + 1e-9) if combine == "trimmed_mean" else 0


@functools.cache
def comparators(num: int) -> tuple[tuple[int, int], ...]:
    """Return the compare-exchanges that sort ``num`` values: Batcher's merge exchange (Knuth, volume 3, 5.2.2, algorithm M)."""
    pairs = []
    top = 1 << max((num - 1).bit_length() - 1, 0)
    step = top
    while step > 0:
        jump, offset, distance = top, 0, step
        while True:
            pairs += [(i, i + distance) for i in range(num - distance) if i & step == offset]
            if jump == step:
                break
            distance, jump, offset = jump - step, jump >> 1, step
        step >>= 1
    return tuple(pairs)


def trimmed(values: Tensor, drop: Tensor) -> Tensor:
    """Return the mean of each column without its smallest and largest values; inf marks a missing value.

    A network of elementwise minima and maxima sorts all columns at once, several times faster than `torch.sort` on few values each.

    Args:
        values: values to average, shape (K, n); overwritten.
        drop: numbers of values to drop, shape (K + 1,); entry k is for each end of a column with k values.

    Returns:
        Means of the columns, shape (n,); NaN for a column without values.
    """
    # inf sorts behind every value, so that a column's k values fill its first k rows
    absent = values.isinf()
    for low, high in comparators(len(values)):
        smaller = torch.minimum(values[low], values[high])
        torch.maximum(values[low], values[high], out=values[high])
        values[low] = smaller
    if not bool(absent.any()):
        first = int(drop[-1])
        return values[first : len(values) - first].mean(dim=0)
    num = len(values) - absent.sum(dim=0)
    first_n = drop[num]
    total = torch.zeros_like(values[0])
    for rank, row in enumerate(values):
        total += torch.where((rank >= first_n) & (rank < num - first_n), row, 0.0)
    return total / (num - 2 * first_n)


def locate(
    state: GlobalState, stored: Sequence[tuple[Spec, FlatTensors]], combine: Combine, trim: float
) -> dict[Spec, FlatTensors]:
    """Return the trimmed mean or median of each coordinate over the updates that cover it, cut to each spec.

    Memory beside ``stored``: one result of the submodel's size if all updates share a spec; else the K updates and the result at
    the size of the whole model.

    Args:
        state: the global model.
        stored: spec and tensors of each update.
        combine: way of combining, trimmed_mean or median.
        trim: share dropped at each end by trimmed_mean.
    """
    drop = torch.tensor([num_dropped(combine, trim, num) for num in range(len(stored) + 1)])
    specs = dict.fromkeys(spec for spec, _ in stored)
    columns = [tensors for _, tensors in stored]
    if len(specs) > 1:
        columns = [_placed(state, spec, tensors) for spec, tensors in stored]
    result = FlatTensors.zeros(columns[0].layout, columns[0].device)
    drop = drop.to(columns[0].device)
    for dtype in filter(is_merged, result.buffers):
        for target, *parts in chunks(result.buffers[dtype], *(column.buffers[dtype] for column in columns)):
            target.copy_(trimmed(torch.stack(parts), drop))
    if len(specs) == 1:
        return dict.fromkeys(specs, result)
    return {spec: state.submodels.plan(spec).gather(result) for spec in specs}


def _placed(state: GlobalState, spec: Spec, tensors: FlatTensors) -> FlatTensors:
    """Return a submodel's values at their places in the whole model, and inf everywhere else."""
    # inf marks missing values: finite updates have none, since others are refused before they get here
    whole = FlatTensors.zeros(state.values.layout, state.values.device)
    for dtype in filter(is_merged, whole.buffers):
        whole.buffers[dtype].fill_(math.inf)
    state.submodels.plan(spec).scatter_(whole, tensors)
    return whole


def feed(
    merge: Merge, state: GlobalState, received: Sequence[tuple[Spec, int]], values: Mapping[Spec, FlatTensors]
) -> None:
    """Pass one joint result to ``merge`` in place of the updates that it replaces, and apply the merge.

    Each update in ``received`` is replaced by the joint result on its submodel, with weight 1. A mean of such updates
    over each element's coverage is again the joint result, scaled by the mean of their staleness factors. Elements that
    no update covers stay unchanged. If all are equally stale, one update of each spec suffices.

    Args:
        merge: the inner merge.
        state: the global model.
        received: spec and staleness of each update.
        values: the joint result on each spec.
    """
    if len({staleness for _, staleness in received}) == 1:
        received = list(dict.fromkeys(received))
    for i, (spec, staleness) in enumerate(received):
        if i:
            merge.detach(state)
        merge.receive(state, Update(0, 0, 0, values[spec], 1), spec, staleness)
    merge.apply(state)


@dataclass
class PendingUpdates(OneValue[list[tuple[Spec, int, FlatTensors]]]):
    """Copies of the updates since the last merge, each with its spec and staleness."""

    key = "located"
    value: list[tuple[Spec, int, FlatTensors]] = field(default_factory=list)


@dataclass(frozen=True)
class CoordinateWise(Wrapped):
    """Merge wrapper: coordinate-wise trimmed mean or median of the updates that cover each element (Yin et al. 2018).

    These are the paper's definitions 1 and 2. Of the k updates that cover an element, floor(beta * k) are dropped at
    each end, so where k < 1/beta nothing is dropped and the trimmed mean is the mean; a median is the mean of the middle
    one or two. Weights are equal: a client that claims more samples gets no more weight. The inner merge receives this
    result in place of each update; it is deterministic. Memory: every update is stored until the merge, K times an
    update's bytes.

    Attributes:
        combine: way of combining, trimmed_mean or median.
        trim: beta, share dropped at each end by trimmed_mean.
    """

    combine: Combine
    trim: float

    def notes(self, state: GlobalState, num_clients: int) -> list[str]:
        """Return the inner merge's notes, and a warning if joint updates make one of its options ineffective."""
        return super().notes(state, num_clients) + joint_notes(self.inner)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Store a copy of the update until the merge."""
        state.memory.of(PendingUpdates).value.append((spec, staleness, update.tensors.clone()))

    def detach(self, state: GlobalState) -> None:
        """Do nothing: stored updates are copies already."""

    def apply(self, state: GlobalState) -> None:
        """Combine the stored updates, and pass the result to the inner merge in their place."""
        stored, state.memory.of(PendingUpdates).value = state.memory.of(PendingUpdates).value, []
        values = locate(state, [(spec, tensors) for spec, _, tensors in stored], self.combine, self.trim)
        feed(self.inner, state, [(spec, staleness) for spec, staleness, _ in stored], values)

    def report(self, state: GlobalState) -> dict[str, Any]:
        """Return, as "guard", the way of combining updates and its trim."""
        combined = {"combine": self.combine, **({"trim": self.trim} if self.combine == "trimmed_mean" else {})}
        return _reported(super().report(state), combined)

    def __str__(self) -> str:
        words = f"mean without {self.trim:.0%} at each end" if self.combine == "trimmed_mean" else "median"
        return f"coordinate-wise {words}, then {self.inner}"
