"""Decide when waiting updates are merged: at each arrival, at K, at the end of a round, or after a share of the clients."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from raafl.core.algorithm import Algorithm, Restart, Trigger, TriggerContext
from raafl.core.options import Rounds
from raafl.core.state import GlobalState, Memory, MergeMemory
from raafl.core.types import Adjusted, Assignment
from raafl.errors import BadInput, fraction, one_of, positive
from raafl.parts.merge.mean import Mean, Staleness

_TASKS_EACH = 8
"""Number of tasks of each working client between two adjustments, so that the slowest have reported, too."""
_SLACK, _SLACK_SHARE = 0.75, 0.15
"""Smallest change of a buffer's size that is made, in updates and as a share; above 1/2, so that it does not oscillate."""


@dataclass(frozen=True, slots=True)
class EachArrival(Trigger):
    """Trigger that merges every update when it arrives (fully asynchronous)."""

    def due(self, waiting: TriggerContext) -> bool:
        """Return True, since a waiting update is merged at once."""
        return True

    def below(self, num_updates: int) -> Trigger:
        """Return a buffer, since the mean of several clients goes to the run above; see `Trigger.below`."""
        return Buffered(num_updates)

    def needed(self, num_more: int, num_waiting: int) -> int:
        """Return the number of updates that must still arrive so that ``num_more`` further ones are merged.

        See `Trigger.needed`.
        """
        return num_more - num_waiting

    def staleness(self, num_at_work: int) -> float:
        """Return the mean staleness, ``num_at_work - 1``: each merge makes every other task one version older."""
        return max(num_at_work - 1, 0)

    def __str__(self) -> str:
        return "each arrival"


@dataclass
class BufferMemory(MergeMemory):
    """State of a trigger whose buffer size follows the number of clients at work."""

    key = "buffer"
    size: int  # present number of updates in a merge
    since_s: float = 0.0  # time on the run's clock, in seconds, at which the measurement of working clients began
    until_s: float = 0.0  # time of the latest update
    num_updates: int = 0  # number of updates since ``since_s``
    work_s: float = 0.0  # seconds that clients have worked since ``since_s``, summed over clients


@dataclass(frozen=True, slots=True)
class Buffered(Trigger):
    """Trigger that merges when K updates wait; clients never wait for a merge (FedBuff, Nguyen et al. 2022).

    With L clients at work, an update is on average (L - 1) / K merges old when it is merged, whatever the clients'
    speeds (Alahyane et al. 2025, arXiv 2502.08206). With `at_work` set, K is kept in proportion to L - 1, so that this
    mean staleness stays the same. L is measured as a mean over time.

    Attributes:
        size: number of updates in a merge (K); if `at_work` is given, K starts there and is adjusted in the run.
        at_work: mean number of clients at work for which ``size`` is right, above 1; None = K never changes.
    """

    size: int = 10
    at_work: float | None = None
    folds_rest: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive("buffer_size", self.size)
        if self.at_work is not None and not 1 < self.at_work < math.inf:
            raise BadInput(
                f"clients_at_work is {self.at_work}: give the mean number of clients at work, above 1, or null"
            )

    def below(self, num_updates: int) -> Trigger:
        """Return a buffer of another size, which does not change; see `Trigger.below`."""
        return replace(self, size=num_updates, at_work=None)

    def due(self, waiting: TriggerContext) -> bool:
        """Check whether as many updates wait for a merge as the buffer holds."""
        return len(waiting.arrived_s) >= self._size(waiting.memory)

    def _size(self, memory: Memory) -> int:
        record = None if self.at_work is None else memory.find(BufferMemory)
        return self.size if record is None else record.size

    def on_update(self, assignment: Assignment, num_active: int, state: GlobalState) -> Adjusted | None:
        """Measure the number of clients at work, and adjust the buffer size K if it is far from the right one."""
        if self.at_work is None:
            return None
        start_s = assignment.assigned_s
        record = state.memory.of(BufferMemory, lambda: BufferMemory(self.size, start_s, start_s))
        record.num_updates += 1
        record.work_s += num_active * (state.now_s - record.until_s)
        record.until_s = state.now_s
        if record.num_updates < _TASKS_EACH * self.at_work or state.now_s <= record.since_s:
            return None
        at_work, before = record.work_s / (state.now_s - record.since_s), record.size
        record.since_s, record.num_updates, record.work_s = state.now_s, 0, 0.0
        wanted = self.size_for(at_work)
        if abs(wanted - before) <= max(_SLACK, _SLACK_SHARE * before):
            return None
        record.size = round(wanted)
        return Adjusted("buffer_size", before, record.size, at_work, self.at_work, "the mean number of clients at work")

    def size_for(self, at_work: float) -> float:
        """Return the buffer size K, not rounded, that keeps the mean staleness the same with ``at_work`` clients at work.

        It is at least half of `size` and at most twice.
        """
        assert self.at_work is not None
        # merge at least two updates unless `size` is one: robust means need several
        least = max(self.size / 2, min(self.size, 2))
        return min(max(self.size * (at_work - 1) / (self.at_work - 1), least), 2 * self.size)

    def needed(self, num_more: int, num_waiting: int) -> int | None:
        """Return the number of updates that must still arrive so that ``num_more`` further ones are merged.

        Updates are merged in full buffers. None = unknown, since the buffer's size follows the number of clients at work.
        See `Trigger.needed`.
        """
        return None if self.at_work is not None else -(-num_more // self.size) * self.size - num_waiting

    def __str__(self) -> str:
        if self.at_work is None:
            return f"{self.size} in the buffer"
        return f"{self.size} in the buffer with {self.at_work:g} at work, else in proportion"


@dataclass(frozen=True, slots=True)
class AllReported(Trigger):
    """Trigger for synchronous rounds: merges when every task has reported or was lost; then all clients start again.

    With ``close_at`` below 1 or a ``deadline`` a round may close before the slowest tasks report. Their updates are
    refused as late, as in systems that draw more clients than they need (Bonawitz et al. 2019). Later rounds do not
    wait for them.

    Attributes:
        close_at: share of a round's tasks that must report before the round closes, rounded up to whole tasks; 1 = all.
        deadline: time after which the round closes, as a multiple of the time until half of its tasks have reported;
            None = no deadline.
    """

    close_at: float = 1.0
    deadline: float | None = None
    restart: ClassVar[Restart] = "merge"

    def __post_init__(self) -> None:
        fraction("rounds.close_at", self.close_at)
        if self.deadline is not None and not 1 < self.deadline < math.inf:
            raise BadInput(
                f"rounds.deadline is {self.deadline}: give a number above 1, a multiple of the median time, or null"
            )

    @property
    def refuses_late(self) -> bool:
        """Whether a round may close before all its tasks have reported, so that later updates are refused."""
        return self.close_at < 1 or self.deadline is not None

    @property
    def waits_for_all(self) -> bool:
        """Whether a round has no end before its last task: one client that never answers holds it up."""
        return not self.refuses_late

    def due(self, waiting: TriggerContext) -> bool:
        """Check whether the round closes now: no task is active, enough have reported, or the deadline has passed."""
        if waiting.num_active == 0:
            return True
        at = self.wake_at(waiting)
        return at is not None and waiting.now_s >= at

    def wake_at(self, waiting: TriggerContext) -> float | None:
        """Return the time of the round's deadline, in seconds of the run's clock; None = there is none, or it is not known yet."""
        arrived_s = waiting.arrived_s
        total = len(arrived_s) + waiting.num_active
        enough, half = math.ceil(self.close_at * total - 1e-9), -(-total // 2)
        if len(arrived_s) >= enough:
            return arrived_s[enough - 1]
        if self.deadline is None or len(arrived_s) < half:
            return None
        # the median is known already, since later reports take longer than this one
        median_s = arrived_s[half - 1] - waiting.opened_s
        return waiting.opened_s + self.deadline * median_s if median_s > 0 else None

    def __str__(self) -> str:
        share = "all" if self.close_at == 1 else f"{self.close_at:.0%} reported"
        return share if self.deadline is None else f"{share}, or {self.deadline:g} times the median time"


@dataclass(frozen=True, slots=True)
class MinRatio(Trigger):
    """Trigger that merges ``wait_s`` seconds after a share of the clients has reported (semi-asynchronous).

    See Co-S2P, Algorithm 2.

    With min_ratio 0 and wait_s 0 each arrival is merged; min_ratio 1 is synchronous.

    Attributes:
        min_ratio: share of the clients at work that must have reported, from 0 to 1.
        wait_s: seconds to wait after enough clients have reported.
    """

    min_ratio: float = 0.5
    wait_s: float = 0.0
    restart: ClassVar[Restart] = "merge"

    def __post_init__(self) -> None:
        fraction("min_ratio", self.min_ratio, zero=True)
        if self.wait_s < 0:
            positive("wait_s", self.wait_s)

    @property
    def waits_for_all(self) -> bool:
        """Whether all clients must report, so that one that never answers holds up the merge."""
        return self.min_ratio == 1

    def due(self, waiting: TriggerContext) -> bool:
        """Check whether all clients have reported, or the wait after the required share is over."""
        if waiting.num_active == 0:
            return True
        at = self.wake_at(waiting)
        return at is not None and waiting.now_s >= at

    def wake_at(self, waiting: TriggerContext) -> float | None:
        """Return the time at which the wait ends, in seconds of the run's clock; None = too few clients have reported."""
        total = len(waiting.arrived_s) + waiting.num_active
        needed = max(1, math.ceil(self.min_ratio * total - 1e-9))  # rounding puts 0.28 * 25 slightly above 7
        if len(waiting.arrived_s) < needed:
            return None
        return waiting.arrived_s[needed - 1] + self.wait_s

    def __str__(self) -> str:
        return f"{self.min_ratio:.0%} reported, then {self.wait_s:g} s"


def all_or_each(name: str, staleness: str = "constant") -> Trigger:
    """Return the trigger with a given name: "all" (synchronous rounds) or "each" (asynchronous arrivals).

    Raises:
        BadInput: the name is unknown, or the staleness function is not constant in rounds.
    """
    triggers: dict[str, type[Trigger]] = {"all": AllReported, "each": EachArrival}
    one_of("trigger", name, triggers)
    if name == "all" and staleness != "constant":
        raise BadInput(
            f"staleness is '{staleness}', but in a round no update is late: leave it out, or use trigger each"
        )
    return triggers[name]()


def averaging(alpha: float | None, by_samples: bool) -> tuple[Trigger, Mean]:
    """Return the trigger (which decides when to merge) and the mean for synchronous rounds or asynchronous arrivals.

    `alpha`: weight of each arriving update, reduced by its staleness; None = synchronous rounds.
    """
    if alpha is None:
        return AllReported(), Mean(by_samples=by_samples)
    return EachArrival(), Mean(alpha, Staleness("polynomial"), by_samples)


def with_rounds(algorithm: Algorithm, rounds: Rounds) -> Algorithm:
    """Return ``algorithm`` with rounds that may close before all of their tasks have reported."""
    if not isinstance(algorithm.trigger, AllReported):
        off = {"close_at 1": rounds.close_at < 1, "deadline null": rounds.deadline is not None}
        raise BadInput(
            f"rounds is {rounds}, but {algorithm.name} does not work in rounds (its trigger is "
            f"'{algorithm.trigger}'): leave rounds out, on the command line by "
            + " ".join(f"--rounds.{option}" for option, is_set in off.items() if is_set)
        )
    return replace(algorithm, trigger=AllReported(rounds.close_at, rounds.deadline))
