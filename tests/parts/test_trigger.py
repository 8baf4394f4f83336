from __future__ import annotations

import math

import pytest

from raafl.core.algorithm import TriggerContext
from raafl.errors import BadInput
from raafl.parts.trigger import AllReported, Buffered, EachArrival, MinRatio


def waiting(arrived, active, now=10.0, opened=0.0):
    return TriggerContext(arrived, active, len(arrived) + active, opened, now)


def test_each_arrival_is_always_due():
    assert EachArrival().due(waiting([1.0], 9))


def test_a_buffer_is_due_when_full():
    assert not Buffered(3).due(waiting([1.0, 2.0], 5))
    assert Buffered(3).due(waiting([1.0, 2.0, 3.0], 5))


def test_all_is_due_when_nothing_is_out():
    assert not AllReported().due(waiting([1.0], 1))
    assert AllReported().due(waiting([1.0], 0))


def test_min_ratio_waits_after_enough_have_reported():
    trigger = MinRatio(min_ratio=0.5, wait_s=2.0)
    assert trigger.wake_at(waiting([1.0], 3)) is None  # 1 of 4
    assert trigger.wake_at(waiting([1.0, 4.0], 2)) == 6.0  # 2 of 4 at second 4
    assert not trigger.due(waiting([1.0, 4.0], 2, now=5.9))
    assert trigger.due(waiting([1.0, 4.0], 2, now=6.0))
    assert trigger.due(waiting([1.0], 0, now=1.0))


def test_a_rounding_error_waits_for_nobody_more():
    # 0.28 * 25 is a little more than 7
    trigger = MinRatio(min_ratio=0.28)
    assert not trigger.due(waiting([1.0] * 6, 19, now=1.0))
    assert trigger.due(waiting([1.0] * 7, 18, now=1.0))


def test_each_merge_makes_the_tasks_of_all_others_one_version_older():
    assert [EachArrival().staleness(num) for num in (0, 1, 20)] == [0, 0, 19]
    assert AllReported().staleness(20) == MinRatio().staleness(20) == 0


def test_min_ratio_zero_without_wait_is_asynchronous_and_one_is_synchronous():
    assert MinRatio(0.0, 0.0).due(waiting([1.0], 99, now=1.0))
    assert not MinRatio(1.0, 0.0).due(waiting([1.0, 2.0], 1, now=99.0))
    assert MinRatio(1.0, 0.0).due(waiting([1.0, 2.0, 3.0], 0, now=3.0))


@pytest.mark.parametrize("make", [lambda: Buffered(0), lambda: MinRatio(1.5), lambda: MinRatio(0.5, -1.0)])
def test_values_out_of_range_are_named(make):
    with pytest.raises(BadInput, match=r"is (0|0\.0|1\.5|-1\.0): give"):
        make()


def test_what_has_to_arrive_before_so_many_are_merged():
    assert EachArrival().needed(5, 0) == 5
    assert [Buffered(4).needed(num, waiting) for num, waiting in [(8, 0), (7, 0), (5, 3), (1, 3)]] == [8, 8, 5, 1]
    assert AllReported().needed(5, 2) is None


def test_all_without_close_at_and_deadline_is_as_it_always_was():
    for arrived, active in (([], 1), ([1.0], 1), ([1.0, 2.0], 8), ([1.0], 0)):
        seen = waiting(arrived, active, now=1e9)
        assert AllReported(1.0, None).due(seen) is (active == 0) and AllReported().wake_at(waiting([1.0], 1)) is None
    assert not AllReported().refuses_late and AllReported(0.9).refuses_late and AllReported(deadline=2).refuses_late


@pytest.mark.parametrize(("close_at", "needed"), [(1.0, 10), (0.91, 10), (0.9, 9), (0.7, 7), (0.05, 1)])
def test_a_round_closes_at_its_share_of_ten_tasks_rounded_up(close_at, needed):
    for num in range(1, 11):
        arrived = [float(i) for i in range(num)]
        assert AllReported(close_at).due(waiting(arrived, 10 - num, now=arrived[-1])) is (num >= needed)


def test_a_round_closes_at_a_multiple_of_the_median_time_of_its_tasks():
    trigger = AllReported(deadline=4.0)
    assert trigger.wake_at(waiting([3.0], 3, opened=2.0)) is None  # of four, the second says what the median is
    assert trigger.wake_at(waiting([3.0, 5.0], 2, opened=2.0)) == 2.0 + 4.0 * 3.0
    assert trigger.wake_at(waiting([3.0, 5.0, 13.0], 1, opened=2.0)) == 2.0 + 4.0 * 3.0
    assert not trigger.due(waiting([3.0, 5.0], 2, now=13.9, opened=2.0))
    assert trigger.due(waiting([3.0, 5.0], 2, now=14.0, opened=2.0))
    assert trigger.wake_at(waiting([2.0], 1, opened=2.0)) is None  # who answers at once says nothing of the others


@pytest.mark.parametrize(("fields", "named"), [
    ({"close_at": 0.0}, "rounds.close_at is 0.0: give"), ({"close_at": 1.5}, "rounds.close_at is 1.5: give"),
    ({"deadline": 1.0}, "rounds.deadline is 1.0: give"), ({"deadline": math.inf}, "rounds.deadline is inf: give"),
])  # fmt: skip
def test_a_round_that_could_close_before_its_median_is_refused(fields, named):
    with pytest.raises(BadInput, match=named):
        AllReported(**fields)
