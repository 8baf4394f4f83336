"""Compute statistics over several seeds: means with intervals, paired differences, times to a target."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Curve = Sequence[tuple[float, float]]
"""Time in seconds and value of each evaluation, in order."""


@dataclass(frozen=True)
class Interval:
    """Mean over seeds, and its 95 % confidence interval.

    Attributes:
        mean: mean of the values.
        half: half the width of the interval (Student's t); None for a single value.
        num: number of values.
    """

    mean: float
    half: float | None
    num: int

    @property
    def excludes_0(self) -> bool:
        """Whether the whole interval lies above 0 or below 0, so that the difference is significant; False for one value."""
        return self.half is not None and abs(self.mean) > self.half


def interval(values: Sequence[float]) -> Interval | None:
    """Return the mean and 95 % confidence interval of some values; None if there are none."""
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
    """Return mean and interval of the differences ours minus theirs, over the seeds that both have; None if there are none."""
    return interval([ours[seed] - theirs[seed] for seed in ours if seed in theirs])


def geometric(ratios: Sequence[float]) -> dict[str, float | None]:
    """Return the geometric mean of positive ratios and its 95 % interval, under the keys `ratio`, `low` and `high`.

    The interval is computed from the logarithms. It is None for a single ratio; without ratios, all three are None.
    """
    found = interval([math.log(ratio) for ratio in ratios])
    if found is None:
        return {"ratio": None, "low": None, "high": None}
    low, high = (None, None) if found.half is None else (found.mean - found.half, found.mean + found.half)
    ends = {"ratio": found.mean, "low": low, "high": high}
    return {name: None if value is None else math.exp(value) for name, value in ends.items()}


def smoothed(curve: Curve, num: int) -> list[tuple[float, float]]:
    """Return the moving average of a curve over ``num`` evaluations; each point has the time of its last evaluation."""
    num = min(num, len(curve))
    windows = (curve[end - num : end] for end in range(num, len(curve) + 1)) if num else ()
    return [(window[-1][0], statistics.fmean(value for _, value in window)) for window in windows]


def time_to(curve: Curve, target: float, maximize: bool = True) -> float | None:
    """Return the time in seconds at which a curve first reaches a target; None if it never does.

    Args:
        curve: points (seconds, value) in the order of time.
        target: value to be reached.
        maximize: whether the value must rise to the target; else it must fall to it.
    """
    return next((time_s for time_s, value in curve if (value >= target if maximize else value <= target)), None)


def censored_median(times_s: Sequence[float | None]) -> float | None:
    """Return the median of times to a target, where None (never reached) counts as later than any time.

    The median may be None. For an even number of times it is the later of the two in the middle.
    """
    if not times_s:
        return None
    median = statistics.median_high(sorted(math.inf if one is None else one for one in times_s))
    return None if math.isinf(median) else median


def gini(counts: Sequence[float]) -> float:
    """Return the Gini coefficient of some counts: 0 if all are equal, (n - 1) / n if one has everything."""
    ordered, total = sorted(counts), sum(counts)
    if not total:
        return 0.0
    weighted = sum(rank * count for rank, count in enumerate(ordered, 1))
    return 2 * weighted / (len(ordered) * total) - (len(ordered) + 1) / len(ordered)
