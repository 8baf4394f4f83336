"""Decide when waiting updates are merged: at each arrival, at K, at the end of a round, or after a share of the clients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from raafl.core.algorithm import Restart, Trigger, TriggerContext
from raafl.errors import BadInput, fraction, one_of, positive


@dataclass(frozen=True, slots=True)
class EachArrival(Trigger):
    """Merge every update as it arrives (fully asynchronous)."""

    def due(self, waiting: TriggerContext) -> bool:
        """Return True, since every waiting update is merged."""
        return True

    def needed(self, num_more: int, num_waiting: int) -> int:
        """Return ``num_more``: each arrival is merged."""
        return num_more - num_waiting

    def staleness(self, num_at_work: int) -> float:
        """Return ``num_at_work`` - 1: each merge makes the tasks of the others one version older."""
        return max(num_at_work - 1, 0)

    def __str__(self) -> str:
        return "each arrival"


@dataclass(frozen=True, slots=True)
class Buffered(Trigger):
    """Merge once K updates wait; clients never wait (FedBuff, Nguyen et al. 2022).

    Attributes:
        size: K, updates in one merge.
    """

    size: int = 10
    folds_rest: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive("buffer_size", self.size)

    def due(self, waiting: TriggerContext) -> bool:
        """Check whether K updates wait."""
        return len(waiting.arrived_s) >= self.size

    def needed(self, num_more: int, num_waiting: int) -> int:
        """Return the number of updates that fill every buffer, the last one included."""
        return -(-num_more // self.size) * self.size - num_waiting

    def __str__(self) -> str:
        return f"{self.size} in the buffer"


@dataclass(frozen=True, slots=True)
class AllReported(Trigger):
    """Merge when every assigned task has reported or was lost; then all clients start again (synchronous).

    With ``close_at`` below 1 or a ``deadline``, a round closes without the last ones: their updates are refused as late, as
    where more clients are drawn than are needed (Bonawitz et al. 2019), and later rounds do not wait for them.

    Attributes:
        close_at: share of the round's tasks that closes it, rounded up to a whole task; 1 = all.
        deadline: multiple of the median time that closes it: the time from the round's start until half of its tasks have reported;
            None = none.
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
        """Whether a round may close without some of its tasks."""
        return self.close_at < 1 or self.deadline is not None

    def due(self, waiting: TriggerContext) -> bool:
        """Check whether no task is out, enough have reported, or the deadline has passed."""
        if waiting.num_active == 0:
            return True
        at = self.wake_at(waiting)
        return at is not None and waiting.now_s >= at

    def wake_at(self, waiting: TriggerContext) -> float | None:
        """Return when the round closes regardless of tasks that are out; None while unknown."""
        arrived_s = waiting.arrived_s
        total = len(arrived_s) + waiting.num_active
        enough, half = math.ceil(self.close_at * total - 1e-9), -(-total // 2)
        if len(arrived_s) >= enough:
            return arrived_s[enough - 1]
        if self.deadline is None or len(arrived_s) < half:
            return None
        median_s = arrived_s[half - 1] - waiting.opened_s  # those that are out take longer, so this is what it will be
        return waiting.opened_s + self.deadline * median_s if median_s > 0 else None

    def __str__(self) -> str:
        share = "all" if self.close_at == 1 else f"{self.close_at:.0%} reported"
        return share if self.deadline is None else f"{share}, or {self.deadline:g} times the median time"


@dataclass(frozen=True, slots=True)
class MinRatio(Trigger):
    """Merge ``wait_s`` after ``min_ratio`` of the clients at work have reported (semi-asynchronous; Co-S2P, Algorithm 2).

    min_ratio 0 and wait 0 merge each arrival; min_ratio 1 is synchronous.
    """

    min_ratio: float = 0.5
    wait_s: float = 0.0
    restart: ClassVar[Restart] = "merge"

    def __post_init__(self) -> None:
        fraction("min_ratio", self.min_ratio, zero=True)
        if self.wait_s < 0:
            positive("wait_s", self.wait_s)

    def due(self, waiting: TriggerContext) -> bool:
        """Check whether enough have reported for long enough, or all have."""
        if waiting.num_active == 0:
            return True
        at = self.wake_at(waiting)
        return at is not None and waiting.now_s >= at

    def wake_at(self, waiting: TriggerContext) -> float | None:
        """Return when the wait ends; None while too few have reported."""
        total = len(waiting.arrived_s) + waiting.num_active
        needed = max(1, math.ceil(self.min_ratio * total - 1e-9))  # 0.28 * 25 is a little more than 7
        if len(waiting.arrived_s) < needed:
            return None
        return waiting.arrived_s[needed - 1] + self.wait_s

    def __str__(self) -> str:
        return f"{self.min_ratio:.0%} reported, then {self.wait_s:g} s"


def all_or_each(name: str, staleness: str = "constant") -> Trigger:
    """Return the trigger named "all" (rounds) or "each" (arrival); raises `BadInput` for others, and for staleness in rounds."""
    triggers: dict[str, type[Trigger]] = {"all": AllReported, "each": EachArrival}
    one_of("trigger", name, triggers)
    if name == "all" and staleness != "constant":
        raise BadInput(f"staleness is '{staleness}', but in a round nothing is late: leave it out, or use trigger each")
    return triggers[name]()
