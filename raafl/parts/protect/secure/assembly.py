"""Wrap an algorithm so that its server reads sums of masked updates only, or say by name what that cannot go with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from raafl.core.algorithm import Algorithm, TriggerContext
from raafl.core.local import Local
from raafl.core.options import Guard, Privacy, Rounds, SecureAggregation
from raafl.errors import BadInput
from raafl.parts.protect.secure.fixed_point import FixedPoint
from raafl.parts.protect.secure.group import threshold_of
from raafl.parts.protect.secure.merge import SecureMemory, SecureSum, inner_mean
from raafl.parts.protect.secure.shamir import MAX_SHARES
from raafl.parts.trigger import AllReported, Buffered

METHODS = "fed_avg, hetero_fl, fed_rolex, ra_fed or fed_buff"


def _is_whole(waiting: TriggerContext) -> bool:
    """Check that the group whose updates are arriving is complete."""
    memory = waiting.memory.find(SecureMemory)
    return memory is None or not memory.missing


@dataclass(frozen=True, slots=True)
class _WholeRounds(AllReported):
    """Trigger of secure aggregation in rounds: merges once all updates of a round's groups of clients have arrived."""

    def due(self, waiting: TriggerContext) -> bool:
        """Check whether every task of the round has reported or was lost."""
        return _is_whole(waiting) and AllReported.due(self, waiting)


@dataclass(frozen=True, slots=True)
class _WholeGroups(Buffered):
    """Trigger of secure aggregation in groups of K clients: merges when all members of a group have reported or dropped out."""

    folds_rest: ClassVar[bool] = False

    def due(self, waiting: TriggerContext) -> bool:
        """Check whether the updates of all clients in the secure-aggregation group have arrived."""
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


def _group_size(algorithm: Algorithm, num_clients: int) -> int:
    """Return the largest number of clients whose updates are summed together: the size of a round or of a buffer."""
    if isinstance(algorithm.trigger, Buffered):
        return algorithm.trigger.size
    return min(algorithm.sample.cohort or num_clients, num_clients)


def _misfits(algorithm: Algorithm, rounds: Rounds, guard: Guard, up: str) -> Iterator[str]:
    """Yield each reason why the algorithm or an option needs single updates, of which secure aggregation shows only sums."""
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
    """Yield each reason why groups of clients would be too small to be unmasked, or could never form."""
    size, most = _group_size(algorithm, num_clients), options.min_cover or 0
    if size < max(most, 3):
        yield f"secure_aggregation.min_cover is {most} for groups of {size} clients: use {max(most, 3)} clients or more in each"
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
    """Yield the reason if clients would not clip their updates to the norm that the privacy accounting assumes."""
    if privacy.is_on and privacy.clip_norm != options.clip_norm:
        own = "null" if options.clip_norm is None else f"{options.clip_norm:g}"
        yield (
            f"privacy.clip_norm is {privacy.clip_norm:g}, and secure_aggregation.clip_norm {own}: give both the "
            "same value, since clients clip themselves"
        )
