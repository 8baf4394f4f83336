"""Compute the real duration of a task on a device whose speed and links vary over time.

Every factor is a pure function of the profile, the moment and a seed, so that the executor, a resumed run and a replay agree.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist
from typing import Literal

from raafl.devices.profiles import Pairs, Profile, TaskTime
from raafl.units import quantity

Draw = Callable[..., int]
"""Makes a 63-bit seed from the parts that it is given; its own seed is that of the run and the client."""

STEPS = 8
"""Number of time steps of a drift between two of its random draws."""
MOST_STEPS = 1000
"""Largest number of changes of speed within one transfer or computation; the rest takes the mean rate until then."""
_MOST_DEVIATIONS = 4.0

_NORMAL = NormalDist()


def real_time(
    profile: Profile, predicted: TaskTime, start_s: float, task: int, draw: Draw, up_from_s: float = 0.0
) -> TaskTime:
    """Compute how long a task takes on a device whose speeds vary over time, from its duration at constant speeds.

    Variation of the link affects the time for the bytes, but not the latency.
    """
    speed, links = _rate(profile, "speed", task, draw), _rate(profile, "link", task, draw)
    if links is not None:
        down_s = links.seconds("down", start_s + predicted.latency_s, predicted.down_s - predicted.latency_s)
        predicted = replace(predicted, down_s=predicted.latency_s + down_s)
    now = start_s + predicted.down_s
    if speed is not None:
        predicted = replace(predicted, compute_s=speed.seconds("compute", now, predicted.compute_s))
    if links is not None:
        now = max(now + predicted.compute_s, up_from_s) + predicted.latency_s
        up_s = links.seconds("up", now, predicted.up_s - predicted.latency_s)
        predicted = replace(predicted, up_s=predicted.latency_s + up_s)
    return predicted


def _rate(profile: Profile, name: Literal["speed", "link"], task: int, draw: Draw) -> _Rate | None:
    """Describe how a device's computing or link speed varies during a task; None if it is constant."""
    changes, drift, jitter = _variation(profile, name)
    if changes is None and not drift and not jitter:
        return None
    return _Rate(changes, profile.repeat_s, drift, profile.drift_s, jitter, partial(draw, name), task)


def _variation(profile: Profile, name: Literal["speed", "link"]) -> tuple[Pairs | None, float, float]:
    """Return a profile's changes, drift and jitter of the computing or link speed."""
    if name == "speed":
        return profile.speed_changes, profile.speed_drift, profile.speed_jitter
    return profile.link_changes, profile.link_drift, profile.link_jitter


def description(profile: Profile) -> str:
    """Describe in words how a device varies; empty if it does not."""
    parts = []
    for name, (changes, drift, jitter) in (
        ("speed", _variation(profile, "speed")),
        ("links", _variation(profile, "link")),
    ):
        repeats = "" if profile.repeat_s is None else f" in {profile.repeat_s:g} s"
        said = [f"{quantity(len(changes), 'change')}{repeats}"] if changes else []
        said += [f"drift {drift:g} over {profile.drift_s:g} s"] if drift else []
        said += [f"jitter {jitter:g}"] if jitter else []
        parts += [f"{name}: {', '.join(said)}"] if said else []
    return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class _Rate:
    """Factor on a device's computing or link speed at any time: recorded changes times drift times the task's jitter."""

    changes: Pairs | None
    repeat_s: float | None
    drift: float
    drift_s: float | None
    jitter: float
    draw: Draw
    task: int

    def seconds(self, phase: str, start_s: float, work_s: float) -> float:
        """Compute the seconds of a piece of work that begins at ``start_s`` and would take ``work_s`` at a constant factor of 1."""
        if self.jitter:
            work_s /= math.exp(self.jitter * _normal(self.draw, "jitter", self.task, phase))
        now, left_s, done_s = start_s, work_s, 0.0
        for _ in range(MOST_STEPS):
            factor, until = self._at(now)
            # rounding can make ``until`` equal ``now``, and the loop endless
            until = max(until, math.nextafter(now, math.inf))
            if left_s <= (until - now) * factor:
                return now + left_s / factor - start_s
            left_s -= (until - now) * factor
            done_s += (until - now) * factor
            now = until
        return (now - start_s) * (work_s / done_s)

    def _at(self, now: float) -> tuple[float, float]:
        """Return the factor at the time ``now``, and the time at which it changes next, both on the run's clock in seconds."""
        factor, until = 1.0, math.inf
        if self.changes is not None:
            begin = 0.0 if self.repeat_s is None else math.floor(now / self.repeat_s) * self.repeat_s
            place = bisect_right(self.changes, now - begin, key=lambda pair: pair[0])
            factor = self.changes[place - 1][1] if place else 1.0
            if place < len(self.changes):
                until = begin + self.changes[place][0]
            elif self.repeat_s is not None:
                until = begin + self.repeat_s
        if self.drift and self.drift_s is not None:
            step_s = self.drift_s / STEPS
            step = math.floor(now / step_s)
            factor *= self._drifted(step)
            until = min(until, (step + 1) * step_s)
        return factor, until

    def _drifted(self, step: int) -> float:
        """Mix the two random draws around a step to the drift's factor; weights cos and sin keep its variance constant."""
        number, part = divmod(step, STEPS)
        angle = math.pi / 2 * part / STEPS
        normal = math.cos(angle) * _normal(self.draw, "drift", number)
        if part:
            normal += math.sin(angle) * _normal(self.draw, "drift", number + 1)
        return math.exp(self.drift * max(-_MOST_DEVIATIONS, min(normal, _MOST_DEVIATIONS)))


def _normal(draw: Draw, *parts: int | str) -> float:
    """Convert the random integer of ``draw`` to a standard normal number, clamped to four standard deviations."""
    share = ((draw(*parts) >> 11) + 0.5) / 2**52  # 52 bits plus a half: exact in a double, and never 0 or 1
    return max(-_MOST_DEVIATIONS, min(_NORMAL.inv_cdf(share), _MOST_DEVIATIONS))
