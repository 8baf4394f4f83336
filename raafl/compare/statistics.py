"""Compute what several seeds show: means with intervals, paired differences, smoothed times to a target."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Curve = Sequence[tuple[float, float]]
"""Time in seconds and value of each evaluation, in order."""


@dataclass(frozen=True)
class Interval:
    """Mean over seeds, with its 95 % confidence interval.

    Attributes:
        mean: mean of the values.
        half: half the width of Student's t interval; None = a single value, which has no interval.
        num: number of values.
    """

    mean: float
    half: float | None
    num: int

    @property
    def excludes_0(self) -> bool:
        """Whether the interval lies on one side of 0; False for a single value."""
        return self.half is not None and abs(self.mean) > self.half


def interval(values: Sequence[float]) -> Interval | None:
    """Return mean and 95 % interval (Student's t, `n - 1` degrees of freedom) of ``values``; None if there are none."""
    if not values:
        return None
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Interval(mean, None, 1)
    from scipy.special import stdtrit  # Student's t quantile; scipy.stats takes two seconds to import

    if not math.isfinite(mean):
        return Interval(mean, None, len(values))
    half = float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, half, len(values))


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Interval | None:
    """Return the mean of ours minus theirs over the seeds that both have, with its interval; None if they share no seed."""
    return interval([ours[seed] - theirs[seed] for seed in ours if seed in theirs])


def geometric(ratios: Sequence[float]) -> dict[str, float | None]:
    """Return the geometric mean of ratios above 0 with the ends of its 95 % interval: `ratio`, `low`, `high`.

    The interval is that of the logarithms. Of one ratio the ends are None, of none all three.
    """
    found = interval([math.log(ratio) for ratio in ratios])
    if found is None:
        return {"ratio": None, "low": None, "high": None}
    low, high = (None, None) if found.half is None else (found.mean - found.half, found.mean + found.half)
    ends = {"ratio": found.mean, "low": low, "high": high}
    return {name: None if value is None else math.exp(value) for name, value in ends.items()}


def smoothed(curve: Curve, num: int) -> list[tuple[float, float]]:
    """Return the moving average of a curve over ``num`` evaluations, each at the time of its last one."""
    num = min(num, len(curve))
    windows = (curve[end - num : end] for end in range(num, len(curve) + 1)) if num else ()
    return [(window[-1][0], statistics.fmean(value for _, value in window)) for window in windows]


def time_to(curve: Curve, target: float, maximize: bool = True) -> float | None:
    """Return the time in seconds at which a curve first reaches a target; None if it never does.

    Args:
        curve: points of time (seconds) and value, ascending in time.
        target: value that the curve is to reach.
        maximize: whether the value must rise to the target; else it must fall to it.
    """
    return next((time_s for time_s, value in curve if (value >= target if maximize else value <= target)), None)


def censored_median(times_s: Sequence[float | None]) -> float | None:
    """Return the median of times to a target; None, a target never reached, counts as later than any, and may be the median.

    Of an even number of times, the median is the later of the two in the middle.
    """
    if not times_s:
        return None
    median = statistics.median_high(sorted(math.inf if one is None else one for one in times_s))
    return None if math.isinf(median) else median


def gini(counts: Sequence[float]) -> float:
    """Return the Gini coefficient: 0 if all counts are equal (or there are none), (n - 1) / n if one client has all."""
    ordered, total = sorted(counts), sum(counts)
    if not total:
        return 0.0
    weighted = sum(rank * count for rank, count in enumerate(ordered, 1))
    return 2 * weighted / (len(ordered) * total) - (len(ordered) + 1) / len(ordered)
