"""Estimate a run's speed and remaining time, on the run's own clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raafl.config.options import Target

MERGES = 20
"""Merges over which rates are taken."""
EVALUATIONS = 10
"""Evaluations through which a metric's line is drawn, and over which a simulation's speed is taken."""

_SECONDS = 10  # over which the trainings of a simulation are counted


@dataclass(frozen=True, slots=True)
class Goals:
    """Limits of a run: updates, seconds, and targets of metrics. The run ends when the first limit is met."""

    max_updates: int | None = None
    max_time_s: float | None = None
    targets: tuple[Target, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the goals as plain data, for the journal."""
        targets = [{"metric": one.metric, "value": one.value, "at_most": one.at_most} for one in self.targets]
        return {"max_updates": self.max_updates, "max_time_s": self.max_time_s, "targets": targets}

    @classmethod
    def from_json(cls, data: Any) -> Goals:
        """Restore goals from the result of `to_json`; the result has no goals if ``data`` has another form."""
        try:
            targets = [
                Target.of(str(one["metric"]), float(one["value"]), "min" if one["at_most"] else "max")
                for one in data["targets"]
            ]
            updates, time_s = data["max_updates"], data["max_time_s"]
            return cls(updates and int(updates), time_s and float(time_s), tuple(targets))
        except (KeyError, TypeError, ValueError, OverflowError):
            return cls()


@dataclass(frozen=True, slots=True)
class Mark:
    """Progress of a run at ``time_s``: number of merged updates and of transferred bytes."""

    time_s: float = 0.0
    updates: int = 0
    num_bytes: int = 0


@dataclass(slots=True)
class Marks:
    """Progress of a run at its most recent merges, from which its speed is computed."""

    marks: deque[Mark] = field(default_factory=lambda: deque([Mark()], MERGES + 1))

    def merged(self, mark: Mark, *, replaces: bool) -> None:
        """Record a run's progress after a merge."""
        if replaces and len(self.marks) > 1:
            last = self.marks.pop()
            mark = Mark(max(mark.time_s, last.time_s), mark.updates, mark.num_bytes)
        self.marks.append(mark)

    def rates(self, now: Mark) -> tuple[float, float]:
        """Return updates per second and bytes per second, averaged over the last `MERGES` merges."""
        then = self.marks[0]
        lasted_s = now.time_s - then.time_s
        if lasted_s <= 0:
            return 0.0, 0.0
        return (now.updates - then.updates) / lasted_s, (now.num_bytes - then.num_bytes) / lasted_s


class Trainings:
    """Times of a simulation's recent training tasks, from which its throughput is computed."""

    def __init__(self) -> None:
        """Start empty."""
        self._num = 0
        self._marks: deque[tuple[float, int]] = deque(maxlen=_SECONDS)

    def arrived(self, at: float) -> None:
        """Record that a training task was finished at the clock time ``at``."""
        self._num += 1
        if self._marks and at == self._marks[-1][0]:
            self._marks[-1] = at, self._num
        elif not self._marks or at - self._marks[-1][0] >= 1.0:
            self._marks.append((at, self._num))

    def per_s(self, now: float) -> float | None:
        """Return the number of training tasks per second; None if unknown."""
        if not self._marks or now <= self._marks[0][0] or self._num == self._marks[0][1]:
            return None
        then, num = self._marks[0]
        return (self._num - num) / (now - then)


@dataclass(frozen=True, slots=True)
class Eta:
    """Estimated seconds until one goal of a run is met; None if unknown."""

    goal: str
    in_s: float | None


def etas(
    goals: Goals,
    now_s: float,
    updates: int,
    updates_per_s: float,
    evaluations: Sequence[Mapping[str, float]],
    reached: Container[Target] = (),
) -> tuple[Eta, ...]:
    """Estimate the seconds until each goal of a run is met."""
    found = []
    if goals.max_updates is not None:
        left = max(goals.max_updates - updates, 0)
        in_s = left / updates_per_s if updates_per_s > 0 else None if left else 0.0
        found.append(Eta("max_updates", in_s))
    if goals.max_time_s is not None:
        found.append(Eta("max_time", max(goals.max_time_s - now_s, 0.0)))
    for target in goals.targets:
        found.append(Eta(str(target), 0.0 if target in reached else _reached_in_s(target, now_s, evaluations)))
    return tuple(found)


def ends_in_s(goals: Goals, etas: Iterable[Eta]) -> float | None:
    """Return the seconds until the first goal ends the run; None if unknown."""
    by_goal = {eta.goal: eta.in_s for eta in etas}
    limits = [by_goal[name] for name in ("max_updates", "max_time") if name in by_goal]
    targets = [by_goal[str(target)] for target in goals.targets]
    known = [in_s for in_s in limits if in_s is not None]
    if targets and None not in targets:
        known.append(max(in_s for in_s in targets if in_s is not None))
    return min(known, default=None)


def _reached_in_s(target: Target, now_s: float, evaluations: Sequence[Mapping[str, float]]) -> float | None:
    points = [(row["time_s"], row[target.metric]) for row in evaluations if target.metric in row][-EVALUATIONS:]
    if len(points) < 3:
        return None
    time_s, value = (math.fsum(column) / len(points) for column in zip(*points, strict=True))
    spread = math.fsum((at - time_s) ** 2 for at, _ in points)
    slope = math.fsum((at - time_s) * (found - value) for at, found in points) / spread if spread > 0 else 0.0
    if slope == 0 or (slope < 0) != target.at_most:
        return None
    return max(time_s + (target.value - value) / slope - now_s, 0.0)


def speed(evaluations: Sequence[Mapping[str, float]]) -> float | None:
    """Return the seconds of the run's clock per second of real time, over the last `EVALUATIONS` evaluations.

    Returns None if unknown.
    """
    points = [(row["wall_s"], row["time_s"]) for row in evaluations if "wall_s" in row][-EVALUATIONS:]
    if len(points) < 2:
        return None
    (wall_s, time_s), (last_wall_s, last_time_s) = points[0], points[-1]
    lasted_s, passed_s = last_wall_s - wall_s, last_time_s - time_s
    return passed_s / lasted_s if lasted_s > 0 and passed_s > 0 else None
