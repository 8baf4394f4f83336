from __future__ import annotations

import pytest

from raafl.core.algorithm import Waiting
from raafl.errors import BadInput
from raafl.parts.trigger import AllReported, Buffered, EachArrival, MinRatio


def waiting(arrived, active, now=10.0, opened=0.0):
    return Waiting(arrived, active, len(arrived) + active, opened, now)


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
