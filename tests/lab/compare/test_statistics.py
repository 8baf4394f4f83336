"""Statistics over seeds, against values worked out by hand or from tables."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from raafl.lab.compare.statistics import (
    censored_median,
    geometric,
    gini,
    holm,
    interval,
    on_grid,
    paired,
    rank_test,
    smoothed,
    time_to,
)


def test_an_interval_is_students():
    """1, 2, 3: mean 2, standard deviation 1, and t(0.975, 2 degrees of freedom) = 4.3027 of the tables."""
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0 and found.num == 3
    assert found.half == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)


def test_one_value_has_no_interval_and_shows_nothing():
    found = interval([5.0])
    assert found.half is None and not found.excludes_0
    assert interval([]) is None


def test_pairs_are_of_one_seed():
    """Differences 1, 1, 1 of wildly spread values: the pairs agree, and the seed that only one has is left out."""
    found = paired({0: 1.0, 1: 11.0, 2: 101.0, 9: 0.0}, {0: 0.0, 1: 10.0, 2: 100.0, 8: 7.0})
    assert (found.mean, found.half, found.num) == (1.0, 0.0, 3)
    assert found.excludes_0
    assert not paired({0: 1.0, 1: -1.0}, {0: 0.0, 1: 0.0}).excludes_0


def test_smoothing_is_the_mean_of_the_last_points():
    curve = [(1.0, 0.0), (2.0, 3.0), (3.0, 6.0), (4.0, 9.0)]
    assert smoothed(curve, 3) == [(3.0, 3.0), (4.0, 6.0)]
    assert smoothed(curve, 1) == curve
    assert smoothed(curve[:2], 3) == [(2.0, 1.5)]
    assert smoothed([], 3) == []
    curve[1] = (2.0, math.nan)
    assert [math.isnan(value) for _, value in smoothed([*curve, (5.0, 0.0)], 2)] == [True, True, False, False]
    assert all(math.isnan(value) for _, value in smoothed([(1.0, math.inf), (2.0, -math.inf)], 2))


def test_a_target_is_reached_once_or_never():
    curve = [(1.0, 0.2), (2.0, 0.6), (3.0, 0.4)]
    assert time_to(curve, 0.5) == 2.0
    assert time_to(curve, 0.7) is None
    assert time_to(curve, 0.2, maximize=False) == 1.0


@pytest.mark.parametrize(
    ("times", "median"),
    [([3.0, 1.0, 2.0], 2.0), ([3.0, None, 1.0], 3.0), ([None, None, 1.0], None), ([1.0, None], None), ([], None)],
)
def test_runs_that_never_got_there_count_as_later(times, median):
    """Of an even number the later of the two in the middle: a mean with a time that is unknown is unknown."""
    assert censored_median(times) == median


@pytest.mark.parametrize(
    ("counts", "expected"), [([1, 1, 1], 0.0), ([0, 0, 6], 2 / 3), ([1, 3], 0.25), ([0, 0], 0.0), ([], 0.0)]
)
def test_gini(counts, expected):
    """By its definition: the mean absolute difference of all pairs over twice the mean."""
    if sum(counts):
        pairs = [abs(a - b) for a in counts for b in counts]
        assert sum(pairs) / len(pairs) / (2 * sum(counts) / len(counts)) == pytest.approx(expected)
    assert gini(counts) == pytest.approx(expected)


def test_a_value_that_is_not_finite_has_no_interval():
    found = interval([math.nan, 1.0])
    assert found is not None and math.isnan(found.mean) and found.half is None and not found.excludes_0


def test_ratios_have_the_interval_of_their_logarithms():
    """Of 1/2, 2 and 4: logarithms to base 2 of -1, 1 and 2, mean 2/3, standard deviation 1.5275, t(2) = 4.3027."""
    half = 4.302653 * math.sqrt(7 / 3) / math.sqrt(3)
    found = geometric([0.5, 2.0, 4.0])
    assert found == pytest.approx({"ratio": 2 ** (2 / 3), "low": 2 ** (2 / 3 - half), "high": 2 ** (2 / 3 + half)})
    assert geometric([3.0]) == {"ratio": pytest.approx(3.0), "low": None, "high": None}
    assert geometric([]) == {"ratio": None, "low": None, "high": None}


def test_the_p_value_is_that_of_students_t():
    """t of 1, 2, 3 against 0 is 2 sqrt 3; with 2 degrees of freedom P(|T| > t) is 1 - t / sqrt(2 + t^2)."""
    t = 2 * math.sqrt(3)
    assert interval([1.0, 2.0, 3.0]).p == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert interval([5.0]).p is None


def test_equal_differences_decide_nothing():
    assert interval([1.0, 1.0]).p is None and interval([0.0, 0.0]).p == 1.0
    assert paired({0: 0.9, 1: 0.8}, {0: 0.8, 1: 0.7}).p is None  # equal up to rounding: 0.1 and 0.1
    assert interval([0.1, 0.1001]).p == pytest.approx(2 / math.pi * math.atan(0.00005 / 0.10005))  # Cauchy: t = 2001


def test_holm_multiplies_each_by_the_tests_that_are_left():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # 0.04 x 1 is raised to 0.03 x 2
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []


def slow_rank_test(groups):
    """Count over every division of each stratum's runs how many pairs are later, one division at a time."""

    def later(ours, theirs):
        return sum((a > b) + (a == b) / 2 for a in ours for b in theirs) - len(ours) * len(theirs) / 2

    groups = [[[math.inf if t is None else t for t in part] for part in group] for group in groups]
    seen = sum(later(*group) for group in groups)
    divided = [
        [
            later([t for i, t in enumerate(a + b) if i in chosen], [t for i, t in enumerate(a + b) if i not in chosen])
            for chosen in itertools.combinations(range(len(a + b)), len(a))
        ]
        for a, b in groups
    ]
    sums = [sum(some) for some in itertools.product(*divided)]
    return seen + sum(len(a) * len(b) for a, b in groups) / 2, sum(abs(s) >= abs(seen) - 1e-9 for s in sums) / len(sums)


def test_ranks_are_those_of_every_division_of_the_runs():
    draw = random.Random(0)
    for _ in range(40):
        groups = [
            [[draw.choice([None, 1.0, 2.0, 3.0, 4.5]) for _ in range(draw.randint(1, 3))] for _ in "ab"]
            for _ in range(draw.randint(1, 2))
        ]
        found, (later, p) = rank_test(groups), slow_rank_test(groups)
        assert found.later == later and found.p == pytest.approx(p)


def test_a_run_that_did_not_reach_is_later_than_all_that_did():
    """Of the C(6, 3) = 20 divisions two are as uneven as this one; six more pairs of runs are level than without a tie."""
    found = rank_test([([None, None, 9.0], [1.0, 2.0, 3.0])])
    assert (found.later, found.pairs, found.p, found.least_p) == (9, 9, 0.1, 0.1)
    assert rank_test([([None, None], [None, None])]).p == 1.0
    assert rank_test([]) is None and rank_test([([1.0], [])]) is None
    assert rank_test([([3.0, 4.0], [1.0, 2.0])] * 3).p == pytest.approx(2 / 6**3)


def test_curves_are_read_at_the_same_times():
    curve = [(0.0, 1.0), (0.4, 2.0), (2.5, 3.0), (3.0, 4.0)]
    assert on_grid(curve, 1.0) == [(0.0, 1.0), (1.0, 2.0), (2.0, 2.0), (3.0, 4.0)]
    assert on_grid([(0.7, 1.0), (2.5, 3.0)], 1.0) == [(1.0, 1.0), (2.0, 1.0), (2.5, 3.0)]
    assert on_grid([(0.3, 5.0)], 1.0) == [(0.3, 5.0)] and on_grid([], 1.0) == []
    tenths = [(round(i * 0.1, 10), float(i)) for i in range(8)]
    assert [value for _, value in on_grid(tenths, 0.1)] == list(map(float, range(8)))
