from __future__ import annotations

import math

import pytest

from raafl.algorithms import fed_buff
from raafl.core.algorithm import TriggerContext
from raafl.core.options import Guard, Privacy, Rounds
from raafl.core.types import Adjusted, Assignment
from raafl.errors import BadInput
from raafl.parts.protect.assembly import with_options
from raafl.parts.trigger import AllReported, Buffered, BufferMemory, EachArrival, MinRatio
from raafl.submodel import FULL
from tests.helpers.coordinators import coordinator_for, cut_in_the_middle, line_state
from tests.helpers.refusals import refuses
from tests.helpers.small_runs import equal_replay, experiment, finish, windows


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


test_a_round_that_could_close_before_its_median_is_refused = refuses(
    AllReported,
    ({"close_at": 0.0}, "rounds.close_at is 0.0: give"),
    ({"close_at": 1.5}, "rounds.close_at is 1.5: give"),
    ({"deadline": 1.0}, "rounds.deadline is 1.0: give"),
    ({"deadline": math.inf}, "rounds.deadline is inf: give"),
)


# ---- a buffer in proportion to the clients at work ----


def arrivals(trigger, state, num, at_work):
    """Let ``num`` updates arrive, one a second, while ``at_work`` clients are at work; return what was changed."""
    found = []
    for _ in range(num):
        task = Assignment(1, 1, 0, 0, 0, FULL, 0, None, None, 0, assigned_s=state.now_s)
        state.now_s += 1.0
        found.append(trigger.on_update(task, at_work, state))
    return [one for one in found if one is not None]


def test_a_buffer_keeps_its_proportion_to_the_clients_at_work():
    """K = 4 is meant for 9 clients at work, so that for L of them it is 4 (L - 1) / 8; after 8 x 9 updates L is compared with it.

    L = 6 asks for 2.5, which is 1.5 away; (36 x 6 + 36 x 7) / 72 = 6.5 for 2.75, which is near enough; 7 for 3.
    """
    trigger, state = Buffered(4, at_work=9.0), line_state()
    state.now_s = 5.0
    assert arrivals(trigger, state, 71, at_work=6) == [] and trigger._size(state.memory) == 4
    (changed,) = arrivals(trigger, state, 1, at_work=6)
    assert changed == Adjusted("buffer_size", 4, 2, 6.0, 9.0, "the mean number of clients at work")
    assert arrivals(trigger, state, 36, at_work=6) + arrivals(trigger, state, 36, at_work=7) == []
    assert [one.after for one in arrivals(trigger, state, 72, at_work=7)] == [3]
    context = TriggerContext([1.0, 2.0, 3.0], 6, 9, 0.0, 3.0, state.memory)
    assert trigger.due(context) and not Buffered(4).due(context)


def test_a_buffer_stays_between_half_and_twice_its_size():
    """One of several updates never becomes one of a single update, which no robust mean protects."""
    assert [Buffered(6, at_work=5.0).size_for(at_work) for at_work in (0.0, 4.0, 5.0, 50.0)] == [3, 4.5, 6, 12]
    assert [Buffered(size, at_work=5.0).size_for(1.0) for size in (1, 2, 3)] == [1, 2, 2]
    assert arrivals(Buffered(4), state := line_state(), 500, at_work=9) == []
    assert state.memory.find(BufferMemory) is None


def test_a_run_whose_clients_leave_merges_fewer_at_a_time_and_replays(tmp_path):
    """Two of four clients leave after a second: of 3 beside each only 1 is left; 6 x 1 / 3 is below 3, the least."""
    devices = windows(((0.0, 1e6), 2e6), ((0.0, 1e6), 2e6), ((0.0, 1.0), 2e6), ((0.0, 1.0), 2e6))
    algorithm = fed_buff(buffer_size=6, clients_at_work=4.0)
    made = experiment(tmp_path / "run", algorithm, devices=devices, max_updates=120)
    run = finish(made)
    rows = run.events("adjusted")
    sizes = [rows[0]["before"], *(row["after"] for row in rows)]
    assert sizes[0] == 6 and sizes[-1] == 3 and sizes == sorted(sizes, reverse=True)
    assert {row["setting"] for row in rows} == {"buffer_size"} and rows[-1]["measured"] == pytest.approx(2.0, abs=0.2)
    assert equal_replay(made, run)


def test_measurements_and_the_size_are_in_a_checkpoint():
    whole, again = cut_in_the_middle(
        lambda: coordinator_for(fed_buff(buffer_size=2, clients_at_work=1.1), min_clients=4), cut=5, value=float
    )
    assert whole.state.memory.of(BufferMemory) == again.state.memory.of(BufferMemory)


@pytest.mark.parametrize("at_work", [1.0, math.inf])
def test_clients_at_work_must_be_several(at_work):
    with pytest.raises(
        BadInput, match=r"clients_at_work is .*: give the mean number of clients at work, above 1, or null"
    ):
        fed_buff(clients_at_work=at_work)


def test_noise_for_merges_of_one_size_needs_a_buffer_of_one_size():
    with pytest.raises(BadInput, match=r"privacy\.clip_norm is 1, .*: leave clients_at_work out"):
        with_options(fed_buff(clients_at_work=4.0), Rounds(), Guard(), Privacy(clip_norm=1.0), 4)
