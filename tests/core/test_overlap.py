"""A client that works on its next task while its update travels: who may, and that each task is settled once."""

from __future__ import annotations

import pytest

from raafl.algorithms import ALGORITHMS, co_s2p, diloco, fed_async, fed_buff, fed_compass, platon, scaffold, split_fed
from raafl.config.problems import overlap_problem
from raafl.core import restoring, saving
from raafl.core.types import Arrived, ClientInfo, Joined, Lost, Sending, Settled, Stop, Suspend
from tests.helpers.coordinators import answer, assigned, coordinator_for, join, update_for, values_of


def outcomes(actions):
    return [(a.assignment.id, a.outcome, a.staleness) for a in actions if isinstance(a, Settled) and a.assignment]


def send(coordinator, task, now=0.0):
    return coordinator.handle(Sending(task.client, task.incarnation, task.id), now)


def two_in_flight(algorithm, **limits):
    """Return a coordinator whose only client has an update on its way and its next task."""
    coordinator = coordinator_for(algorithm, **limits)
    first = assigned(join(coordinator, [1]))[1]
    return coordinator, first, assigned(send(coordinator, first))[1]


def test_a_client_has_its_next_task_while_its_update_travels_and_staleness_is_counted_as_ever():
    coordinator, first, second = two_in_flight(fed_async(alpha=0.5))
    assert (first.version, second.version, second.task) == (0, 0, 1)
    # version 0 -> 1 by the first; the second was assigned before that merge, so it is one merge late
    assert outcomes(answer(coordinator, first, 1.0)) == [(first.id, "merged", 0)]
    third = assigned(send(coordinator, second))[1]
    assert third.version == 1
    assert outcomes(answer(coordinator, second, 1.0)) == [(second.id, "merged", 1)]
    # 0 -> 0.5 -> 0.75, by alpha = 1/2 and values of 1
    assert values_of(coordinator.state).unique().tolist() == [0.75]
    assert coordinator.roster.busy == {1: third.id} and not coordinator.roster.sending


def test_an_update_that_arrives_before_the_next_task_was_asked_for_brings_it():
    coordinator = coordinator_for(fed_async())
    first = assigned(join(coordinator, [1]))[1]
    assert list(assigned(answer(coordinator, first, 1.0))) == [1]
    assert assigned(send(coordinator, first)) == {}  # of a task that is settled


def test_at_most_one_update_of_a_client_travels_beside_a_task():
    coordinator, _, second = two_in_flight(fed_async())
    assert send(coordinator, second) == []
    assert coordinator.roster.busy == {1: second.id}


@pytest.mark.parametrize("client, incarnation, number", [(2, 0, 1), (1, 1, 1), (1, 0, 7)])
def test_nobody_speaks_for_another_clients_task(client, incarnation, number):
    coordinator = coordinator_for(fed_async(concurrency=1), min_clients=1)
    task = assigned(join(coordinator, [1, 2]))[1]
    assert task.id == 1
    assert coordinator.handle(Sending(client, incarnation, number), 0.0) == []
    assert coordinator.roster.busy == {1: 1}


def test_a_travelling_update_leaves_its_place_to_another_client():
    coordinator = coordinator_for(fed_async(concurrency=1), min_clients=2)
    task = next(iter(assigned(join(coordinator, [1, 2])).values()))
    started = assigned(send(coordinator, task))
    assert len(started) == 1 and coordinator.roster.num_at_work == 1 and len(coordinator.roster.active) == 2
    assert assigned(answer(coordinator, task, 1.0)) == {}  # its arrival frees no second place


def test_a_buffer_is_merged_without_giving_a_busy_client_a_third_task():
    coordinator, first, second = two_in_flight(fed_buff(buffer_size=2))
    answer(coordinator, first, 1.0)
    third = assigned(send(coordinator, second))[1]
    actions = answer(coordinator, second, 1.0)
    assert outcomes(actions) == [(first.id, "merged", 0), (second.id, "merged", 0)]
    assert assigned(actions) == {} and coordinator.roster.busy == {1: third.id}


@pytest.mark.parametrize(
    "event", [Lost(1, "disconnected"), Joined(ClientInfo(1, 1, incarnation=1)), Stop("interrupted")]
)
def test_both_tasks_end_with_their_client_or_the_run(event):
    coordinator, first, second = two_in_flight(fed_async())
    outcome = {Lost: "lost:disconnected", Joined: "lost:replaced", Stop: "unused"}[type(event)]
    assert outcomes(coordinator.handle(event, 1.0)) == [(first.id, outcome, 0), (second.id, outcome, 0)]
    for task in (first, second):
        late = coordinator.handle(Arrived(update_for(coordinator.state, task, 1.0)), 2.0)
        assert outcomes(late) == []


def test_a_suspended_client_loses_its_other_task():
    coordinator, first, second = two_in_flight(fed_async(), max_refused=1)
    refused = update_for(coordinator.state, first, 1.0, refusal="non-finite")
    actions = coordinator.handle(Arrived(refused), 1.0)
    assert outcomes(actions) == [(first.id, "refused:non-finite", 0), (second.id, "lost:kept-out", 0)]
    assert any(isinstance(action, Suspend) for action in actions)
    assert not coordinator.roster.active and not coordinator.roster.sending and not coordinator.roster.busy


def test_two_in_flight_survive_a_checkpoint():
    coordinator, first, second = two_in_flight(fed_async(alpha=0.5))
    again = coordinator_for(fed_async(alpha=0.5))
    restoring.restore(again, saving.save(coordinator))
    for one in (coordinator, again):
        answer(one, first, 1.0)
        answer(one, second, 1.0)
    assert values_of(again.state).equal(values_of(coordinator.state))
    assert again.roster.busy == coordinator.roster.busy and again.roster.num_at_work == 1


# ---- which methods ----

ALLOWED = {"ca2fl", "fadas", "fed_async", "fed_buff", "fed_raa", "streaming_diloco"}
"""By their defaults; the others wait for merges, but for those below."""


@pytest.mark.parametrize("name", ALGORITHMS)
def test_methods_whose_clients_have_something_to_do_meanwhile_allow_it(name):
    assert (overlap_problem(ALGORITHMS[name]()) is None) == (name in ALLOWED)


@pytest.mark.parametrize(
    "algorithm, says",
    [
        (fed_compass(), "waits for the merge"),
        (scaffold(buffer_size=2), "depends on its last update"),
        (co_s2p(trigger="async"), "depends on its last update"),
        (platon(trigger="each"), "depends on its last update"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_methods_that_need_a_clients_last_update_are_refused_by_name(algorithm, says):
    problem = overlap_problem(algorithm)
    assert algorithm.name in problem and says in problem


def test_asynchronous_diloco_allows_it():
    assert overlap_problem(diloco(trigger="each")) is None
    assert "waits" in overlap_problem(split_fed())
