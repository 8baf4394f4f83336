"""Compute statistics over several seeds: means with intervals, paired differences, times to a target, tests by ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

Curve = Sequence[tuple[float, float]]
"""Time in seconds and value of each evaluation, in order."""
ALPHA = 0.05
"""A difference is shown if its p-value, after Holm's correction for all tests of its table, is at most this."""
_NO_SPREAD = 1e-9
"""Half of an interval, as a share of the mean, below which values are equal up to rounding."""


@dataclass(frozen=True)
class Interval:
    """Mean over seeds, and its 95 % confidence interval."""

    mean: float  # mean of the values
    half: float | None  # half the width of the 95 % interval, by Student's t; None for a single value
    num: int  # number of values

    @property
    def excludes_0(self) -> bool:
        """Whether the whole interval lies above 0 or below 0; False for one value."""
        return self.half is not None and abs(self.mean) > self.half

    @property
    def p(self) -> float | None:
        """Two-sided p-value of Student's t test that the mean is 0; None for one value, and for equal ones other than 0."""
        if self.half is None:
            return None
        # equal values say nothing about the spread, by which the test judges the mean: two seeds would have p = 0
        if self.half <= _NO_SPREAD * abs(self.mean):
            return None if self.mean else 1.0
        from scipy.special import stdtr, stdtrit

        t = abs(self.mean) / self.half * float(stdtrit(self.num - 1, 0.975))
        return 2 * float(stdtr(self.num - 1, -t))


def interval(values: Sequence[float]) -> Interval | None:
    """Return the mean and 95 % confidence interval of some values; None if there are none."""
    if not values:
        return None
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Interval(mean, None, 1)
    # Student's t quantile from scipy.special: scipy.stats takes two seconds to import
    from scipy.special import stdtrit

    if not math.isfinite(mean):
        return Interval(mean, None, len(values))
    half = float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, half, len(values))


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Interval | None:
    """Return mean and interval of the differences ours minus theirs, over the seeds that both have; None if there are none."""
    return interval([ours[seed] - theirs[seed] for seed in ours if seed in theirs])


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number by Holm's method, in the same order.

    With each correction the chance that any true null hypothesis among them is rejected stays at the level of the test,
    whatever the dependence between the tests. The k-th smallest of n values is multiplied by n - k + 1; no corrected
    value is below that of a smaller one.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    found, least = [1.0] * len(p_values), 0.0
    for place, i in enumerate(order):
        least = max(least, min(1.0, p_values[i] * (len(order) - place)))
        found[i] = least
    return found


@dataclass(frozen=True)
class RankTest:
    """Comparison of two groups of runs by the order of their times: the Mann-Whitney test, exact, with ties.

    Since all runs of a comparison end at the same limit, a run that did not reach the target is later than all that did,
    and level with the others that did not. For such times Gehan's test is the same.
    """

    # number of pairs (a run of each group) in which the first group's run is later; ties count as half
    later: float
    pairs: int  # number of pairs
    p: float  # two-sided p-value over all ways to divide the runs into two groups of these sizes
    least_p: float  # smallest p-value that groups of this size can have


def rank_test(groups: Sequence[tuple[Sequence[float | None], Sequence[float | None]]]) -> RankTest | None:
    """Compare the times of two methods by ranks, within each of several strata, such as the cells of a grid.

    `groups`: times of the first and of the second method in each stratum; None = the target was not reached.

    Returns:
        The test over all strata in which both methods have a run; None if there is none.
    """
    groups = [(ours, theirs) for ours, theirs in groups if ours and theirs]
    if not groups:
        return None
    # the statistic is twice the number of later pairs minus its mean: an integer, symmetric about 0 if there are no ties
    whole, untied = {0: 1}, {0: 1}
    seen = 0
    for ours, theirs in groups:
        times = [math.inf if one is None else one for one in (*ours, *theirs)]
        seen += _excess(times[: len(ours)], times[len(ours) :])
        whole = _sums(whole, _null(times, len(ours)))
        untied = _sums(untied, _null(list(range(len(times))), len(ours)))
    pairs = sum(len(ours) * len(theirs) for ours, theirs in groups)
    total, most = sum(whole.values()), max(untied)
    p = sum(ways for excess, ways in whole.items() if abs(excess) >= abs(seen)) / total
    return RankTest((seen + pairs) / 2, pairs, p, sum(w for e, w in untied.items() if abs(e) == most) / total)


def _excess(ours: Sequence[float], theirs: Sequence[float]) -> int:
    """Count the pairs (ours, theirs) in which ours is later, minus those in which ours is earlier."""
    return sum((one > other) - (one < other) for one in ours for other in theirs)


def _null(times: Sequence[float], num: int) -> Mapping[int, int]:
    """Compute the null distribution of `_excess`: by value, the number of ways to choose ``num`` of the runs that give it."""
    # pairs within the choice cancel, so the excess over the others is the sum of each run's excess over all runs
    return _chosen(tuple(sorted(_excess([one], times) for one in times)), num)


@lru_cache(maxsize=64)  # without ties it is the same for all pairs of groups of these sizes
def _chosen(excesses: tuple[int, ...], num: int) -> Mapping[int, int]:
    ways: list[dict[int, int]] = [{0: 1}, *({} for _ in range(num))]
    for excess in excesses:
        for chosen in range(num, 0, -1):
            for total, count in ways[chosen - 1].items():
                ways[chosen][total + excess] = ways[chosen].get(total + excess, 0) + count
    return ways[num]


def _sums(one: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    """Convolve two distributions of `_excess`, given and returned as counts by value: the distribution of the sum."""
    found: dict[int, int] = {}
    for a, ways in one.items():
        for b, more in other.items():
            found[a + b] = found.get(a + b, 0) + ways * more
    return found


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


def on_grid(curve: Curve, every_s: float) -> list[tuple[float, float]]:
    """Return the value of the last evaluation at each multiple of ``every_s`` seconds, up to the end of the curve.

    So curves that are measured at different times, such as those of slow rounds, are read at the same times. The last
    evaluation has a point of its own, at its own time.
    """
    if not curve:
        return []
    found: list[tuple[float, float]] = []
    place = 0
    for step in range(math.ceil(curve[0][0] / every_s - 1e-9), math.floor(curve[-1][0] / every_s + 1e-9) + 1):
        at = step * every_s
        while place + 1 < len(curve) and curve[place + 1][0] <= at + 1e-9 * every_s:
            place += 1
        found.append((at, curve[place][1]))
    return found if found and found[-1][0] >= curve[-1][0] - 1e-9 * every_s else [*found, (curve[-1][0], curve[-1][1])]


def smoothed(curve: Curve, num: int) -> list[tuple[float, float]]:
    """Return the moving average of a curve over ``num`` evaluations; each point has the time of its last evaluation.

    It is NaN where a value is not finite.
    """
    num = min(num, len(curve))
    windows = (curve[end - num : end] for end in range(num, len(curve) + 1)) if num else ()
    return [(window[-1][0], _finite_mean([value for _, value in window])) for window in windows]


def _finite_mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if all(map(math.isfinite, values)) else math.nan


def time_to(curve: Curve, target: float, maximize: bool = True) -> float | None:
    """Return the time in seconds at which a curve first reaches a target; None if it never does.

    `curve`: points (seconds, value) in the order of time.
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
