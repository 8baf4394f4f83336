"""When are waiting updates folded in?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from raafl.core.algorithm import Restart, Trigger, Waiting
from raafl.errors import BadInput, fraction, one_of, positive


@dataclass(frozen=True, slots=True)
class EachArrival(Trigger):
    """Fully asynchronous: every update is merged as it arrives."""

    def due(self, waiting: Waiting) -> bool:
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

    def due(self, waiting: Waiting) -> bool:
        """Check whether K updates wait."""
        return len(waiting.arrived_s) >= self.size

    def needed(self, num_more: int, num_waiting: int) -> int:
        """Count those that fill the last buffer, too."""
        return -(-num_more // self.size) * self.size - num_waiting

    def __str__(self) -> str:
        return f"{self.size} in the buffer"


@dataclass(frozen=True, slots=True)
class AllReported(Trigger):
    """Synchronous: merge when every task handed out has reported or was lost; then everyone starts again."""

    restart: ClassVar[Restart] = "merge"

    def due(self, waiting: Waiting) -> bool:
        """Check whether nothing is out any more."""
        return waiting.num_active == 0

    def __str__(self) -> str:
        return "all"


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

    def due(self, waiting: Waiting) -> bool:
        """Check whether enough have reported for long enough, or everyone has."""
        if waiting.num_active == 0:
            return True
        at = self.wake_at(waiting)
        return at is not None and waiting.now_s >= at

    def wake_at(self, waiting: Waiting) -> float | None:
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
    triggers = {"all": AllReported, "each": EachArrival}
    one_of("trigger", name, triggers)
    if name == "all" and staleness != "constant":
        raise BadInput(f"staleness is '{staleness}', but in a round nothing is late: leave it out, or use trigger each")
    return triggers[name]()
