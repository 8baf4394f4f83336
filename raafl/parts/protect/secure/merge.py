"""Merge sums of masked updates: the server's part that is the same on both clocks and in a replay.

An update arrives as whole numbers modulo 2^32. Those of a real client hide it behind masks that cancel in its group's sum; those
of a simulation are bare. Their sums are equal to the bit, and so are the models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from raafl.core.algorithm import Algorithm, Merge, TriggerContext
from raafl.core.local import Local
from raafl.core.options import Guard, Privacy, Rounds, SecureAggregation
from raafl.core.state import GlobalState, MergeMemory
from raafl.core.types import SumGroup, Update
from raafl.errors import BadInput
from raafl.parts.merge.deltas import Deltas
from raafl.parts.merge.label_split import LabelSplit, joint_notes
from raafl.parts.merge.mean import Mean, zeros_like
from raafl.parts.merge.wrapped import Wrapped
from raafl.parts.protect.privacy import Private
from raafl.parts.protect.secure.group import FixedPoint, Group, IntegerLayouts, add_, buffer_of, threshold_of
from raafl.parts.protect.secure.member import MAX_SHARES
from raafl.parts.trigger import AllReported, Buffered
from raafl.submodel import FlatTensors, Layout, Spec, Submodels


@dataclass
class SecureMemory(MergeMemory):
    """State of `SecureSum`: sums of updates since the last merge, and counts for the summary."""

    key = "secure"
    # assignments of the current group whose updates have not arrived
    missing: list[int] = field(default_factory=list)
    scale: float = 1.0  # number by which the weights in the current group are divided; see `SumGroup.scale`
    # for each update that has arrived: submodel, weight, and weight times staleness factor divided by ``scale``
    group: list[tuple[Spec, float, float]] = field(default_factory=list)
    # sum of the current group's encoded updates modulo 2^32; None = no update has arrived
    numbers: FlatTensors | None = None
    total: FlatTensors | None = None  # sum of the changes of all complete groups, float32; None = no group is complete
    weights: FlatTensors | None = None  # for each unmasked element, the total weight
    num_sums: int = 0  # number of groups that were summed
    num_unsound: int = 0  # number of groups whose sum was discarded, as it exceeded what the clients' bounds allow


def inner_mean(merge: Merge) -> Mean | Deltas | None:
    """Return the mean that ``merge`` is or wraps; None if the merge needs more than a weighted sum of updates."""
    inner = merge.inner if isinstance(merge, Private | LabelSplit) else merge
    inner = inner.inner if isinstance(inner, LabelSplit) else inner
    # a subclass may do more than a mean
    return inner if isinstance(inner, Mean | Deltas) and type(inner) in (Mean, Deltas) else None


@dataclass(frozen=True)
class SecureSum(Wrapped):
    """Wrapper of a merge for secure aggregation: moves the model by a mean of updates of which only the sum is known.

    ``theta <- theta + sum_n w_n a_n d_n / sum_n w_n`` over the clients n that trained an element. Client n multiplies
    its change d_n by ``w_n a_n / scale``, encodes it as fixed-point numbers and masks it. w_n and a_n, the weight and
    staleness factor of the wrapped mean, are public. An element that fewer than ``min_cover`` clients of a group have
    trained stays masked, so that this group does not change it. With privacy every weight is 1, and
    `Private.release_sum` adds the noise.
    """

    extension: ClassVar[str | None] = "secure"

    point: FixedPoint  # fixed-point format in which clients encode changes
    options: SecureAggregation  # the run's options of secure aggregation

    @property
    def min_cover(self) -> int:
        """Smallest number of clients that must have trained an element for it to be unmasked."""
        return self.options.min_cover or 0

    @property
    def clip_norm(self) -> float | None:
        """L2 norm to which clients clip their changes; None = no clipping."""
        return self.options.clip_norm

    def __post_init__(self) -> None:
        """Set ``sends``, so that clients send differences even if the wrapped merge expects values."""
        object.__setattr__(self, "sends", "delta")

    # ---- weights of the members, on server and client ----

    def weigh(self, num_samples: int, staleness: int) -> tuple[float, float]:
        """Return an update's weight in the mean, and its staleness factor."""
        inner = inner_mean(self.inner)
        assert inner is not None
        if isinstance(self.inner, Private):  # `Private` applies the staleness factor to the mean
            return 1.0, 1.0
        return inner.weigh(Update(0, 0, 0, FlatTensors.empty(Layout(())), num_samples), staleness)

    def weights(self, group: Group) -> dict[int, float]:
        """Return each member's weight times its staleness factor, by its id; server and clients compute the same."""
        # a `Private` merge weights all updates equally; the server sees it from its merge, clients from `group.equal`
        if group.equal or isinstance(self.inner, Private):
            return dict.fromkeys(group.by_id, 1.0)
        products = {}
        for member in group.members:
            weight, factor = self.weigh(member.counted, group.version - member.version)
            products[member.id] = weight * factor
        return products

    def scale(self, change: FlatTensors) -> float:
        """Return the factor that clips a client's change; raise `OutOfRange` if an element then exceeds the bound."""
        return self.point.scale(buffer_of(change).cpu(), self.clip_norm)

    def encoded(self, submodels: Submodels, spec: Spec, change: FlatTensors, share: float, scale: float) -> FlatTensors:
        """Encode a client's change as integers, in new storage on the CPU."""
        numbers = IntegerLayouts(submodels).zeros(spec)
        for buffer in numbers.buffers.values():
            buffer.copy_(self.point.encode(buffer_of(change).cpu(), share, scale))
        return numbers

    # ---- the merge ----

    def check(self, state: GlobalState) -> list[str]:
        """Return the wrapped merge's problems, and one if trained parameters are not all of single precision."""
        problems, trained = super().check(state), state.submodels.layout(part="trained").entries
        others = [entry for entry in trained if entry.dtype != torch.float32]
        if others:
            problems = [
                *problems,
                f"secure_aggregation: '{others[0].name}' trains in {str(others[0].dtype)[6:]}: use a model in float32",
            ]
        statistics = [entry.name for entry in trained if entry.name not in state.submodels.parameter_names]
        if statistics and not isinstance(self.inner, Private):  # otherwise `Private` reports the same problem
            problems = [
                *problems,
                f"secure_aggregation: the model has running statistics ({statistics[0]}), which secure aggregation "
                "cannot bound: set submodels.batch_norm to static, or use GroupNorm or LayerNorm in the place of "
                "BatchNorm",
            ]
        return problems

    def notes(self, state: GlobalState, num_clients: int) -> list[str]:
        """Return the wrapped merge's notes for the start of the run, and a note on the precision of sums."""
        own = [] if isinstance(self.inner, Private) else joint_notes(self.inner)
        return [
            *super().notes(state, num_clients),
            *own,
            f"secure aggregation: changes up to {self.point.bound:g} in steps of 2^-{self.point.bits}, sums of at "
            f"most {self.point.num_members} clients, read where {self.min_cover} or more contribute; clients send "
            "no metrics",
        ]

    def received_layout(self, state: GlobalState, spec: Spec, layout: Layout) -> Layout:
        """Return the layout of the integers that encode an update of ``spec``."""
        return IntegerLayouts(state.submodels).layout(spec)

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Return "no-group" for an update whose task belongs to no group of clients; None = the update is accepted."""
        return None if update.group is not None and update.assignment in update.group.members else "no-group"

    def overflows(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> bool:
        """Return False: a masked update cannot be checked by itself; the sum is checked when it is complete."""
        return False

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Add an update to its group's sum; when the group is complete, decode the sum."""
        memory, layouts = state.memory.of(SecureMemory), IntegerLayouts(state.submodels)
        assert update.group is not None
        if update.assignment not in memory.missing:
            self._begin(memory, layouts, update.group)
        memory.missing.remove(update.assignment)
        weight, factor = self.weigh(update.num_samples, staleness)
        memory.group.append((spec, weight, weight * factor / memory.scale))
        assert memory.numbers is not None
        arrived = FlatTensors(update.tensors.layout, {d: b.cpu() for d, b in update.tensors.buffers.items()})
        if spec.is_full:
            add_(buffer_of(memory.numbers), buffer_of(arrived))
        else:
            layouts.plan(spec).apply_(memory.numbers, arrived, _add_views)
        if not memory.missing:
            self._read(memory, layouts)

    def _begin(self, memory: SecureMemory, layouts: IntegerLayouts, group: SumGroup) -> None:
        """Begin the sum of a new group; that of an incomplete group is discarded, since it is still masked."""
        if memory.missing:
            memory.num_unsound += 1
        memory.missing, memory.scale, memory.group = list(group.members), group.scale, []
        memory.numbers = layouts.zeros()

    def _read(self, memory: SecureMemory, layouts: IntegerLayouts) -> None:
        """Decode the complete sum of a group, and add it to the changes of this merge."""
        members, numbers = memory.group, memory.numbers
        memory.group, memory.numbers, memory.num_sums = [], None, memory.num_sums + 1
        assert numbers is not None
        counts, weights, most = (layouts.zeros(dtype=torch.float32) for _ in range(3))
        for spec, weight, share in members:
            for flat, amount in ((counts, 1.0), (weights, weight), (most, share)):
                layouts.plan(spec, torch.float32).cover_(flat, amount)
        is_open = buffer_of(counts) >= self.min_cover
        total = torch.where(is_open, self.point.decode(buffer_of(numbers)), 0.0)
        if not self._is_sound(total, buffer_of(most), math.fsum(share for *_, share in members)):
            memory.num_unsound += 1
            return
        if memory.total is None or memory.weights is None:
            memory.total, memory.weights = layouts.zeros(dtype=torch.float32), layouts.zeros(dtype=torch.float32)
        buffer_of(memory.total).add_((total * memory.scale).float())
        buffer_of(memory.weights).add_(torch.where(is_open, buffer_of(weights), 0.0))

    def _is_sound(self, total: torch.Tensor, shares: torch.Tensor, share: float) -> bool:
        """Check whether a sum respects the bounds of each element and, if clients clip, of the norm."""
        room = self.point.bound * (1 + 1e-6)  # tolerance for `shares`, which are rounded to single precision
        if bool((total.abs() > shares * room).any()):
            return False
        return self.clip_norm is None or float(torch.linalg.vector_norm(total)) <= share * self.clip_norm * (1 + 1e-6)

    def apply(self, state: GlobalState) -> None:
        """Move the model by the mean of the sums since the last merge; elements that no unmasked sum covers stay unchanged."""
        memory = state.memory.of(SecureMemory)
        total, weights = memory.total, memory.weights
        memory.total, memory.weights = None, None
        if total is None or weights is None:
            return
        if isinstance(self.inner, Private):
            change = zeros_like(state.values)
            for buffer in change.buffers.values():
                if buffer.dtype == torch.float32:
                    buffer[: buffer_of(total).numel()] = buffer_of(total).to(buffer.device)
            self.inner.release_sum(state, change)
            return
        theta = state.values.buffers[torch.float32][: buffer_of(total).numel()]
        sums, shares = (buffer_of(flat).to(theta.device) for flat in (total, weights))
        # 0 / 0 = NaN where an element was not unmasked, which `where` leaves out
        theta.copy_(torch.where(shares > 0, theta + sums / shares, theta))

    def report(self, state: GlobalState) -> dict[str, Any]:
        """Return entries for the run's summary: under "secure_aggregation" the number of sums and their precision."""
        memory = state.memory.of(SecureMemory)
        told = {
            "sums": memory.num_sums,
            "unsound": memory.num_unsound,
            "min_cover": self.min_cover,
            "bound": self.point.bound,
            "step": self.point.step,
        }
        return {**super().report(state), "secure_aggregation": told}

    def __str__(self) -> str:
        return f"sums of masked updates over {self.min_cover} clients or more, then {self.inner}"


def _add_views(target: torch.Tensor, source: torch.Tensor) -> None:
    """Add integers modulo 2^32 to a strided view, in place."""
    add_(target, source)


METHODS = "fed_avg, hetero_fl, fed_rolex, ra_fed or fed_buff"


def _is_whole(waiting: TriggerContext) -> bool:
    """Check whether the updates of all members of the current group have arrived."""
    memory = waiting.memory.find(SecureMemory)
    return memory is None or not memory.missing


@dataclass(frozen=True, slots=True)
class _WholeRounds(AllReported):
    """Trigger of secure aggregation in rounds, which is due once all updates of the round's groups have arrived."""

    def due(self, waiting: TriggerContext) -> bool:
        """Check whether each task of the round has reported or was lost, and no group is incomplete."""
        return _is_whole(waiting) and AllReported.due(self, waiting)


@dataclass(frozen=True, slots=True)
class _WholeGroups(Buffered):
    """Trigger of secure aggregation in groups of K clients, which is due once each member has reported or was lost."""

    folds_rest: ClassVar[bool] = False

    def due(self, waiting: TriggerContext) -> bool:
        """Check whether the updates of all members of the group have arrived."""
        return _is_whole(waiting)

    def __str__(self) -> str:
        return f"{self.size} in a group"


def secured(
    algorithm: Algorithm,
    options: SecureAggregation,
    rounds: Rounds,
    guard: Guard,
    privacy: Privacy,
    num_clients: int,
    up: str = "none",
) -> Algorithm:
    """Return ``algorithm`` with secure aggregation, in which the server can read only sums; unchanged if it is off.

    Raises:
        BadInput: the algorithm or an option does not work with secure aggregation; the message has a line for each
            problem.
    """
    if options.min_cover is None:
        return algorithm
    problems = [
        *_misfits(algorithm, rounds, guard, up),
        *_sizes(algorithm, options, num_clients),
        *_norms(options, privacy),
    ]
    if problems:
        raise BadInput("\n".join(problems))
    point = FixedPoint(options.bound, _group_size(algorithm, num_clients))
    merge = SecureSum(algorithm.merge, point, options)
    trigger = _WholeGroups(algorithm.trigger.size) if isinstance(algorithm.trigger, Buffered) else _WholeRounds()
    return replace(algorithm, merge=merge, trigger=trigger)


def smallest_group(options: SecureAggregation) -> int:
    """Return the smallest number of clients in a group, so that the sum of their updates does not reveal a single update."""
    return max(options.min_cover or 0, 3)


def _group_size(algorithm: Algorithm, num_clients: int) -> int:
    """Return the number of clients in one sum: the size of the buffer, or else of a round."""
    if isinstance(algorithm.trigger, Buffered):
        return algorithm.trigger.size
    return min(algorithm.sample.cohort or num_clients, num_clients)


def _misfits(algorithm: Algorithm, rounds: Rounds, guard: Guard, up: str) -> Iterator[str]:
    """Yield each reason for which the algorithm or an option cannot work with sums alone, as secure aggregation requires."""
    begin = "secure_aggregation.min_cover is set, but"
    local = algorithm.local
    one_by_one = not isinstance(algorithm.trigger, AllReported | Buffered) or getattr(algorithm.trigger, "size", 2) == 1
    if one_by_one:
        yield f"{begin} {algorithm.name} merges each update, or a changing number of them: choose {METHODS}"
    elif inner_mean(algorithm.merge) is None and not guard.is_on:
        yield f"{begin} the merge of {algorithm.name} ({algorithm.merge}) needs more than a sum: choose {METHODS}"
    sends_more = local.up or local.traits.up_as or type(local).exchange is not Local.exchange
    if sends_more:
        yield f"{begin} clients of {algorithm.name} send more than their trained values: choose {METHODS}"
    if guard.is_on:
        yield (
            f"{begin} guard is on, but it needs each single update: leave guard out; secure_aggregation.clip_norm "
            "bounds each update at its client"
        )
    if getattr(algorithm.trigger, "at_work", None) is not None:
        yield f"{begin} clients_at_work changes the number of updates in a merge: leave clients_at_work out"
    if rounds.is_on:
        yield f"{begin} rounds may end early, so masks would remain in the sum: leave rounds out"
    if up != "none":
        yield f"{begin} compress.up is {up}, but masked numbers cannot be compressed: set compress.up to none"


def _sizes(algorithm: Algorithm, options: SecureAggregation, num_clients: int) -> Iterator[str]:
    """Yield each reason for which groups of clients would be too small to be unmasked, or could never form."""
    size, least = _group_size(algorithm, num_clients), smallest_group(options)
    if size < least:
        yield (
            f"secure_aggregation.min_cover is {options.min_cover} for groups of {size} clients: use {least} clients or more "
            "in each"
        )
    if size > MAX_SHARES:
        yield f"secure_aggregation sums {size} clients at a time: use a cohort of {MAX_SHARES} or fewer"
    sample = algorithm.sample
    at_work = min(
        num_clients, *(number for number in (sample.cohort, sample.concurrency, num_clients) if number is not None)
    )
    if at_work < size:
        yield (
            f"secure_aggregation sums {size} clients at a time, which wait for each other, but only {at_work} work "
            "at once: use more clients, or a higher concurrency or cohort"
        )
    if threshold_of(size, options.threshold) < 2:
        yield f"secure_aggregation.threshold is {options.threshold:g}: a single one of {size} clients could read the sum"


def _norms(options: SecureAggregation, privacy: Privacy) -> Iterator[str]:
    """Yield a problem if clients clip to another norm than the one for which privacy is accounted."""
    if privacy.is_on and privacy.clip_norm != options.clip_norm:
        own = "null" if options.clip_norm is None else f"{options.clip_norm:g}"
        yield (
            f"privacy.clip_norm is {privacy.clip_norm:g}, and secure_aggregation.clip_norm {own}: give both the "
            "same value, since clients clip themselves"
        )
