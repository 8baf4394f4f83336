"""Statistics over seeds, against values worked out by hand or from tables."""

from __future__ import annotations

import math

import pytest

from raafl.compare.statistics import censored_median, geometric, gini, interval, paired, smoothed, time_to


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
