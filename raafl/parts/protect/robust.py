"""Make merges robust against bad updates: clip norms, refuse outliers, trim means, take medians, clip around a centre.

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
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from raafl.core.algorithm import Algorithm, Merge
from raafl.core.options import Combine, Guard
from raafl.core.state import GlobalState, MergeMemory, OneValue, PendingUpdate
from raafl.core.types import Update
from raafl.errors import BadInput
from raafl.parts.merge.label_split import joint_notes
from raafl.parts.merge.mean import zeros_like
from raafl.parts.merge.wrapped import Wrapped
from raafl.parts.trigger import EachArrival
from raafl.submodel import FlatTensors, Spec, Submodels
from raafl.submodel.flat import CHUNK, chunks, is_merged

WINDOW = 101
"""Number of the latest accepted norms that are stored for each size class."""


# ---- differences and their norms ----


def difference(state: GlobalState, update: Update, spec: Spec, sends: str) -> FlatTensors:
    """Return the change that ``update`` makes to the model; do not modify the result, which may be the update itself."""
    if sends == "delta":
        return update.tensors
    change = state.submodels.plan(spec).gather(state.values)
    for dtype, buffer in change.buffers.items():
        torch.sub(update.tensors.buffers[dtype], buffer, out=buffer)
    return change


def scaled(state: GlobalState, update: Update, spec: Spec, sends: str, factor: float) -> FlatTensors:
    """Return a copy of an update in which the change that it makes to the model is multiplied by ``factor``.

    Returns:
        Values or a change, as in the update's own tensors.
    """
    if sends == "delta":
        buffers = {dtype: buffer * factor for dtype, buffer in update.tensors.buffers.items()}
        return FlatTensors(update.tensors.layout, buffers)
    values = state.submodels.plan(spec).gather(state.values)
    for dtype, buffer in values.buffers.items():
        buffer.lerp_(update.tensors.buffers[dtype], factor)
    return values


def norm_of(tensors: FlatTensors, submodels: Submodels) -> float:
    """Return the L2 norm of an update over its parameters, summed in double precision so that it cannot overflow.

    Running statistics are left out, since their scale is unrelated to that of parameters.
    """
    squares = []
    for dtype, buffer in tensors.buffers.items():
        # each buffer has parameters before running statistics
        size = sum(e.numel for e in tensors.layout.entries if e.dtype == dtype and e.name in submodels.parameter_names)
        for piece in torch.split(buffer[:size], CHUNK if buffer.device.type == "cpu" else max(size, 1)):
            squares.append(piece.double().square().sum().item())
    return math.sqrt(math.fsum(squares))


# ---- clipping and refusing ----


@dataclass
class GuardMemory(MergeMemory):
    """State of `NormFilter`: norms of accepted updates, and the number of clipped ones."""

    key = "guard"
    # by size class (group of submodels of similar size): norms of the latest accepted updates
    norms: dict[int, list[float]] = field(default_factory=dict)
    clipped: int = 0  # number of updates that were clipped
    # assignment and norm of the accepted update that `receive` is given next; None = none was accepted
    measured: tuple[int, float] | None = None


@dataclass(frozen=True)
class NormFilter(Wrapped):
    """Wrapper of a merge that clips updates and refuses outliers, by their norm (Sun et al. 2019, section 4).

    Clipping: ``d <- d * min(1, C / ||d||)``, with the norm over parameters; running statistics are scaled, too, but do
    not count in the norm. Refusing: ``||d|| > outlier * median`` of the last `WINDOW` accepted norms (before clipping)
    of the same size class. A size class has submodels whose numbers of parameters differ by less than a factor of 2, so
    that small ones are compared with small ones. The first ``warm_up`` updates of a class are never refused. Memory:
    `WINDOW` numbers per size class.

    Attributes:
        clip_norm: norm C to which changes are clipped; None = no clipping.
        outlier: multiple of the median above which an update is refused; None = refuse none.
        warm_up: number of accepted updates of a size class before others are refused.
        misfit: error message if updates of the method have no such norm; None = they have.
    """

    merges_means: ClassVar[bool] = True

    clip_norm: float | None
    outlier: float | None
    warm_up: int
    misfit: str | None = field(default=None, repr=False)

    def check(self, state: GlobalState) -> list[str]:
        """Return the wrapped merge's problems, and one if updates of the method have no norm that could be limited."""
        problems = super().check(state)
        if self.misfit is not None and state.submodels.rules.norms_are_of_changes:
            problems = [*problems, self.misfit]
        return problems

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Return "outlier" for a norm far above the usual ones, else the wrapped merge's reason to refuse the update."""
        if self.outlier is not None:
            norm = self._measure(state, update, spec)
            accepted = state.memory.of(GuardMemory).norms.get(_size_class(update.tensors), [])
            if len(accepted) >= self.warm_up and norm > self.outlier * statistics.median(accepted) > 0:
                return "outlier"
            state.memory.of(GuardMemory).measured = (update.assignment, norm)
        return super().reject_reason(state, update, spec, staleness)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Clip the update if needed, and pass it to the wrapped merge; an update within bounds stays unchanged to the bit."""
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
        """Return entries for the run's summary: under "guard" the number of clipped updates, and the limits."""
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
    """Return the number of values to drop at each end: floor(trim * num); for a median, so many that one or two are left."""
    if combine == "median":
        return max(num - 1, 0) // 2
    # rounding puts 0.29 * 100 slightly below 29
    return int(trim * num + 1e-9) if combine == "trimmed_mean" else 0


@functools.cache
def comparators(num: int) -> tuple[tuple[int, int], ...]:
    """Return a sorting network for ``num`` values: pairs of positions, to be compared and swapped in this order.

    The network is Batcher's merge exchange (Knuth, volume 3, 5.2.2, algorithm M).
    """
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

    All columns are sorted at once by elementwise minima and maxima, several times faster than `torch.sort` for few
    rows.

    `values`: values to average, shape (K, n); overwritten by this call.
    `drop`: number of values to drop at each end of a column with k values, at index k; shape (K + 1,).

    Returns:
        Means of the columns, shape (n,); NaN for a column without values.
    """
    # inf sorts last, so that a column with k values has them in its first k rows
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
    """Return one tensor set for each submodel: the trimmed mean or median of each element over the updates that trained it.

    If all updates have the same submodel, this takes memory for one result of its size. Otherwise it takes memory for
    copies of all updates and for the result, each of the size of the whole model.
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
    """Place a submodel's values in tensors of the whole model's shapes, where all other elements are inf."""
    # inf marks missing values, since updates that contain inf are refused
    whole = FlatTensors.zeros(state.values.layout, state.values.device)
    for dtype in filter(is_merged, whole.buffers):
        whole.buffers[dtype].fill_(math.inf)
    state.submodels.plan(spec).scatter_(whole, tensors)
    return whole


def feed(merge: Merge, state: GlobalState, values: Mapping[Spec, FlatTensors]) -> None:
    """Pass a combined update to a merge in place of the updates that wait, from which it was computed, and apply the merge.

    Each waiting update is replaced by the combined one on its submodel, with weight 1. Since the merge averages these, its
    result is again the combined one, scaled by the mean of the updates' staleness factors. Elements that no update trained
    stay unchanged. If all updates are equally late, one for each submodel is enough, unless the merge counts them.
    """
    received = [(item.spec, item.staleness) for item in state.waiting]
    counts = merge.innermost.counts_updates and state.submodels.rules.counts_combined
    if len({staleness for _, staleness in received}) == 1 and not counts:
        received = list(dict.fromkeys(received))
    combined = state.with_waiting([])
    for i, (spec, staleness) in enumerate(received):
        if i:
            merge.detach(combined)
        merge.take(combined, PendingUpdate(Update(0, 0, 0, values[spec], 1, 1), spec, staleness))
    merge.apply(combined)


@dataclass
class Copies(OneValue[list[FlatTensors]]):
    """Copies of the tensors of the updates that wait, in the order of `GlobalState.waiting`."""

    key = "located"
    value: list[FlatTensors] = field(default_factory=list)

    @classmethod
    def from_plain(cls, data: Any) -> Self:
        """Restore the copies; earlier versions stored each with its submodel and staleness, before the tensors."""
        return super().from_plain([item[-1] if isinstance(item, tuple) else item for item in data])


@dataclass(frozen=True)
class CoordinateWise(Wrapped):
    """Wrapper of a merge that takes the trimmed mean or median of each element over the updates that trained it.

    See Yin et al. 2018, definitions 1 and 2. Of the k updates that trained an element, floor(beta * k) are dropped at
    each end. If k < 1/beta nothing is dropped, so the trimmed mean is the mean; a median is the mean of the middle one
    or two. All updates have the same weight, so that a client gains nothing by claiming more samples. The wrapped merge
    receives the result in place of each update. Memory: all updates are stored until the merge.

    Attributes:
        combine: rule for combining values, "trimmed_mean" or "median".
        trim: share beta that trimmed_mean drops at each end.
    """

    combine: Combine
    trim: float

    def notes(self, state: GlobalState, num_clients: int) -> list[str]:
        """Return notes for the user: the wrapped merge's, and a warning if it averages by class.

        Averaging by class has no effect here, since a combined update does not say which clients lack a class.
        """
        return super().notes(state, num_clients) + joint_notes(self.inner)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Store a copy of the update until the merge."""
        state.memory.of(Copies).value.append(update.tensors.clone())

    def apply(self, state: GlobalState) -> None:
        """Combine the stored updates, and pass the result to the wrapped merge in their place."""
        copies, state.memory.of(Copies).value = state.memory.of(Copies).value, []
        stored = [(item.spec, tensors) for item, tensors in zip(state.waiting, copies, strict=True)]
        feed(self.inner, state, locate(state, stored, self.combine, self.trim))

    def report(self, state: GlobalState) -> dict[str, Any]:
        """Return entries for the run's summary: under "guard" the rule by which updates are combined, and its trim."""
        combined = {"combine": self.combine, **({"trim": self.trim} if self.combine == "trimmed_mean" else {})}
        return _reported(super().report(state), combined)

    def __str__(self) -> str:
        words = f"mean without {self.trim:.0%} at each end" if self.combine == "trimmed_mean" else "median"
        return f"coordinate-wise {words}, then {self.inner}"


Stored = tuple[Spec, FlatTensors]
"""Submodel, and a copy of an update's tensors."""


@dataclass
class CentredMemory(MergeMemory):
    """State of `Centred`."""

    key = "centred"
    # in the order of `GlobalState.waiting`: copies of each waiting update's tensors
    stored: list[FlatTensors] = field(default_factory=list)
    # centre around which differences are clipped, the paper's v; None before the first merge
    centre: FlatTensors | None = None

    @classmethod
    def from_plain(cls, data: Any) -> Self:
        """Restore the state; earlier versions stored each copy with its submodel and staleness, before the tensors."""
        copies = [item[-1] if isinstance(item, tuple) else item for item in data["stored"]]
        return super().from_plain({**data, "stored": copies})


@dataclass(frozen=True)
class Centred(Wrapped):
    """Wrapper of a merge for centred clipping: limits how far each update may be from the last merge's mean change v.

    ``v <- v + 1/K sum_i (d_i - v) min(1, tau / ||d_i - v||)`` (Karimireddy et al. 2021, equation 3, one iteration). d_i
    is an update's change of the model, and K the number of updates that trained an element. At the first merge v is the
    coordinate-wise median. tau is the radius, by default the median distance of the updates from v. Distances are over
    parameters; with several submodels they are root mean squares, so that a small submodel is not near just for its
    size. All updates have the same weight. The wrapped merge receives v in place of every update. Elements that no
    update trained keep their v. Memory: K updates, and three tensors of the model's size.

    The paper's clients send momentum, by which honest updates become similar over time. Here they send the change of
    one task. If clients' data differ a lot, honest updates are as far apart as an attacker's, and no distance
    distinguishes them.

    Attributes:
        radius: L2 distance tau beyond which an update is clipped; None = the median distance.
    """

    radius: float | None

    def notes(self, state: GlobalState, num_clients: int) -> list[str]:
        """Return notes for the user: those of the wrapped merge, and a warning if that merge averages by class.

        Averaging by class then has no effect: the wrapped merge receives one update in place of several, which does not
        say which clients have which classes.
        """
        return super().notes(state, num_clients) + joint_notes(self.inner)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Store a copy of the update until the merge."""
        state.memory.of(CentredMemory).stored.append(update.tensors.clone())

    def apply(self, state: GlobalState) -> None:
        """Move the centre v towards the stored updates, and pass it to the wrapped merge in their place."""
        memory = state.memory.of(CentredMemory)
        stored = [(item.spec, tensors) for item, tensors in zip(state.waiting, memory.stored, strict=True)]
        memory.stored = []
        centre = memory.centre = self._median(state, stored) if memory.centre is None else memory.centre
        self._move(state, centre, stored)
        feed(
            self.inner, state, {spec: self._moved(state, centre, spec) for spec in dict.fromkeys(s for s, _ in stored)}
        )

    def _median(self, state: GlobalState, stored: list[Stored]) -> FlatTensors:
        """Return the coordinate-wise median of the updates' differences from the model; 0 where no update covers an element."""
        centre = zeros_like(state.values)
        for spec, values in locate(state, stored, "median", 0.0).items():
            change = values.clone()
            self._subtract(state, spec, change)
            state.submodels.plan(spec).scatter_(centre, change)
        return centre

    def _subtract(self, state: GlobalState, spec: Spec, tensors: FlatTensors) -> None:
        """Subtract the global values from an update in place, unless clients send differences."""
        if self.sends == "values":
            _sub_(tensors, state.submodels.plan(spec).gather(state.values))

    def _move(self, state: GlobalState, centre: FlatTensors, stored: list[Stored]) -> None:
        """Move ``centre`` by the mean of the updates' clipped differences from it; the updates' tensors are overwritten."""
        distances = []
        for spec, tensors in stored:
            self._subtract(state, spec, tensors)
            _sub_(tensors, state.submodels.plan(spec).gather(centre))
            # a fixed radius limits L2 norms; a median over submodels of several sizes is of norms divided by
            # sqrt(parameters)
            scale = 1.0 if self.radius is not None else _num_parameters(state, tensors) ** -0.5
            distances.append(norm_of(tensors, state.submodels) * scale)
        radius = statistics.median(distances) if self.radius is None else self.radius
        total, count = zeros_like(centre), zeros_like(centre)
        for (spec, tensors), distance in zip(stored, distances, strict=True):
            plan = state.submodels.plan(spec)
            plan.add_(total, tensors, min(1.0, radius / distance) if distance else 1.0)
            plan.cover_(count)
        for dtype in filter(is_merged, centre.buffers):
            for old, step, on in chunks(*(flat.buffers[dtype] for flat in (centre, total, count))):
                old.add_(step.div_(on.clamp_min(1)))

    def _moved(self, state: GlobalState, centre: FlatTensors, spec: Spec) -> FlatTensors:
        """Return ``centre`` as an update of submodel ``spec``, with the global values added if the merge expects values."""
        plan = state.submodels.plan(spec)
        moved = plan.gather(centre)
        if self.sends == "values":
            for dtype, buffer in plan.gather(state.values).buffers.items():
                moved.buffers[dtype].add_(buffer)
        return moved

    def report(self, state: GlobalState) -> dict[str, Any]:
        """Return entries for the run's summary: under "guard" the clipping radius."""
        inner = super().report(state)
        return {**inner, "guard": {**inner.get("guard", {}), "combine": "centred_clip", "radius": self.radius}}

    def __str__(self) -> str:
        radius = "the median distance" if self.radius is None else f"{self.radius:g}"
        return f"centred clipping at {radius}, then {self.inner}"


def _sub_(tensors: FlatTensors, others: FlatTensors) -> None:
    for dtype, buffer in tensors.buffers.items():
        buffer.sub_(others.buffers[dtype])


def _num_parameters(state: GlobalState, tensors: FlatTensors) -> int:
    names = state.submodels.parameter_names
    return max(sum(entry.numel for entry in tensors.layout.entries if entry.name in names), 1)


def guarded(algorithm: Algorithm, guard: Guard) -> Algorithm:
    """Return ``algorithm`` with the protection of its merge that ``guard`` asks for, such as clipping or a robust mean.

    Raises:
        BadInput: a robust mean is requested, but the algorithm merges updates one by one, or treats each client
            separately.
    """
    if not guard.is_on:
        return algorithm
    merge = algorithm.merge
    if guard.combine != "mean":
        if merge.by_client:
            raise BadInput(
                f"guard.combine is '{guard.combine}', but {algorithm.name} merges each client's update by itself: choose another "
                "algorithm, such as ra_fed, or use guard.clip_norm and guard.outlier"
            )
        if isinstance(algorithm.trigger, EachArrival) or getattr(algorithm.trigger, "size", 2) == 1:
            raise BadInput(
                f"guard.combine is '{guard.combine}', but {algorithm.name} merges each update alone: choose an algorithm that "
                "merges several at a time, such as fed_buff or fed_avg, or use guard.clip_norm and guard.outlier"
            )
        is_centred = guard.combine == "centred_clip"
        merge = Centred(merge, guard.radius) if is_centred else CoordinateWise(merge, guard.combine, guard.trim)
    if guard.clip_norm is not None or guard.outlier is not None:
        merge = NormFilter(merge, guard.clip_norm, guard.outlier, guard.warm_up, _misfit(algorithm, guard))
    return replace(algorithm, merge=merge)


def _misfit(algorithm: Algorithm, guard: Guard) -> str | None:
    """Return an error message if updates of a method are no changes of the model, whose norms could be limited; else None."""
    form = algorithm.local.traits.up_as
    if form == "scalars":
        name = "outlier" if guard.clip_norm is None else "clip_norm"
        return (
            f"guard.{name} is {getattr(guard, name):g}, but updates of {algorithm.name} are numbers, not changes of the model "
            f"with a norm: leave guard.{name} out, since guard.max_norm_ratio refuses numbers that are too large"
        )
    if form == "bits" and guard.clip_norm is not None:
        return (
            f"guard.clip_norm is {guard.clip_norm:g}, but updates of {algorithm.name} are masks of 0 and 1, which cannot be scaled "
            "down: leave guard.clip_norm out"
        )
    return None
