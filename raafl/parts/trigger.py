"""When are waiting updates folded in?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from raafl.core.algorithm import Restart, Trigger, TriggerContext
from raafl.errors import BadInput, fraction, one_of, positive


@dataclass(frozen=True, slots=True)
class EachArrival(Trigger):
    """Fully asynchronous: every update is merged as it arrives."""

    def due(self, waiting: TriggerContext) -> bool:
        """Return True: whatever waits is merged."""
        return True

    def needed(self, num_more: int, num_waiting: int) -> int:
        """Count each, once."""
        return num_more - num_waiting

    def staleness(self, num_at_work: int) -> float:
        """Return one less than are at work: every merge makes the others' tasks, and no more, one version older."""
        return max(num_at_work - 1, 0)

    def __str__(self) -> str:
        return "each arrival"


@dataclass(frozen=True, slots=True)
class Buffered(Trigger):
    """Buffered asynchronous aggregation: merge once K updates wait; clients never do (FedBuff, Nguyen et al. 2022).

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
        """Count those that fill the last buffer, too."""
        return -(-num_more // self.size) * self.size - num_waiting

    def __str__(self) -> str:
        return f"{self.size} in the buffer"


@dataclass(frozen=True, slots=True)
class AllReported(Trigger):
    """Synchronous: merge when every task handed out has reported or was lost; then everyone starts again.

    With ``close_at`` below 1 or a ``deadline`` a round closes without the last ones: what they send is refused as late, as where
    more clients are drawn than are needed (Bonawitz et al. 2019), and later rounds do not wait for them.

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
        """Check whether nothing is out any more, enough have reported, or the deadline has passed."""
        if waiting.num_active == 0:
            return True
        at = self.wake_at(waiting)
        return at is not None and waiting.now_s >= at

    def wake_at(self, waiting: TriggerContext) -> float | None:
        """Return when the round closes whoever is out, or None while that is not known."""
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
    """Semi-asynchronous: once ``min_ratio`` of the clients at work have reported, wait ``wait_s`` more, then merge.

    min_ratio 0 and wait 0 merges each arrival; min_ratio 1 is synchronous. (Co-S2P, Algorithm 2.)
    """

    min_ratio: float = 0.5
    wait_s: float = 0.0
    restart: ClassVar[Restart] = "merge"

    def __post_init__(self) -> None:
        fraction("min_ratio", self.min_ratio, zero=True)
        if self.wait_s < 0:
            positive("wait_s", self.wait_s)

    def due(self, waiting: TriggerContext) -> bool:
        """Check whether enough have reported for long enough, or everyone has."""
        if waiting.num_active == 0:
            return True
        at = self.wake_at(waiting)
        return at is not None and waiting.now_s >= at

    def wake_at(self, waiting: TriggerContext) -> float | None:
        """Return when the wait ends, or None while too few have reported."""
        total = len(waiting.arrived_s) + waiting.num_active
        needed = max(1, math.ceil(self.min_ratio * total - 1e-9))  # 0.28 * 25 is a little more than 7
        if len(waiting.arrived_s) < needed:
            return None
        return waiting.arrived_s[needed - 1] + self.wait_s

    def __str__(self) -> str:
        return f"{self.min_ratio:.0%} reported, then {self.wait_s:g} s"


def all_or_each(name: str, staleness: str = "constant") -> Trigger:
    """Make the trigger called "all" (rounds) or "each" (arrival); raise `BadInput` for another, and for late updates in rounds."""
    triggers: dict[str, type[Trigger]] = {"all": AllReported, "each": EachArrival}
    one_of("trigger", name, triggers)
    if name == "all" and staleness != "constant":
        raise BadInput(f"staleness is '{staleness}', but in a round nothing is late: leave it out, or use trigger each")
    return triggers[name]()
