"""Clients that take a task and do not answer: a round closes without them, nobody waits for them again, and it counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raafl.algorithms import fed_async, fed_avg
from raafl.core import restoring, saving
from raafl.core.restoring import event_from_json
from raafl.core.saving import event_to_json
from raafl.core.types import Arrived, ClientInfo, Joined, Lost, SetTimer, Settled, Suspend, Timer
from raafl.parts.trigger import AllReported
from tests.helpers.coordinators import answer, assigned, coordinator_for, join, update_for, values_of


def rounds(close_at=1.0, deadline=None, num_clients=3, **more):
    trigger = AllReported(close_at, deadline)
    return coordinator_for(replace(fed_avg(**more), trigger=trigger), min_clients=num_clients, num_clients=num_clients)


def outcomes(actions):
    return [(action.client, action.outcome) for action in actions if isinstance(action, Settled)]


def wake(actions):
    return [(action.id, action.at) for action in actions if isinstance(action, SetTimer)]


def test_a_round_closes_at_its_deadline_and_the_next_ones_wait_for_the_silent_client_no_more():
    coordinator = rounds(deadline=5.0)
    tasks = assigned(join(coordinator, [1, 2, 3]))
    answer(coordinator, tasks[1], 1.0, now=1.0)
    ((timer, at),) = wake(answer(coordinator, tasks[2], 3.0, now=2.0))
    assert at == 10.0  # five times what the second of three took
    actions = coordinator.handle(Timer(timer), 10.0)
    assert outcomes(actions) == [(1, "merged"), (2, "merged")] and sorted(assigned(actions)) == [1, 2]
    assert values_of(coordinator.state).unique().tolist() == [2.0]
    for version in (2, 3):
        tasks = assigned(actions)
        answer(coordinator, tasks[1], 4.0, now=10.0 + version)
        actions = answer(coordinator, tasks[2], 4.0, now=10.5 + version)  # all that the round waits for
        assert coordinator.state.version == version and sorted(assigned(actions)) == [1, 2]


def test_what_comes_after_its_round_is_refused_as_late_and_its_client_works_again():
    coordinator = rounds(close_at=0.6)
    tasks = assigned(join(coordinator, [1, 2, 3]))
    answer(coordinator, tasks[1], 1.0)
    fresh = assigned(answer(coordinator, tasks[2], 3.0))  # two of three
    assert coordinator.state.version == 1 and sorted(fresh) == [1, 2]
    actions = answer(coordinator, tasks[3], 99.0)
    assert outcomes(actions) == [(3, "refused:late")] and list(assigned(actions)) == [3]  # in the round that is open
    assert assigned(actions)[3].version == 1
    assert outcomes(answer(coordinator, assigned(actions)[3], 5.0)) == []
    assert outcomes(answer(coordinator, fresh[1], 7.0)) == [(3, "merged"), (1, "merged")]
    assert values_of(coordinator.state).unique().tolist() == [6.0]


def test_with_all_of_n_a_round_is_what_it_was():
    plain, closing = coordinator_for(fed_avg(), min_clients=3, num_clients=3), rounds(deadline=1e6)
    for coordinator in (plain, closing):
        tasks = assigned(join(coordinator, [1, 2, 3]))
        for step in range(9):
            client = 1 + step % 3
            tasks |= assigned(answer(coordinator, tasks.pop(client), float(step), now=1.0 + step))
    assert values_of(plain.state).equal(values_of(closing.state)) and plain.state.version == closing.state.version == 3


@pytest.mark.parametrize("more", [{"cohort": 2}, {"concurrency": 2}])
def test_silent_clients_take_nobodys_place_in_a_cohort_or_at_work(more):
    coordinator = rounds(deadline=2.0, num_clients=4, **more)
    at_work, timers, now, silent = assigned(join(coordinator, [1, 2, 3, 4])), [], 0.0, set()
    for _ in range(60):
        now += 1.0
        speaks = [client for client in at_work if client < 3]
        silent |= at_work.keys() - set(speaks)
        actions = answer(coordinator, at_work.pop(speaks[0]), 1.0, now=now) if speaks else []
        timers += wake(actions)
        due = [timer for timer in timers if timer[1] <= now]
        for timer in due:
            timers.remove(timer)
            actions += coordinator.handle(Timer(timer[0]), now)
            timers += wake(actions)
        at_work |= assigned(actions)
    assert coordinator.state.version > 10 or silent == {3, 4}
    assert coordinator.roster.num_at_work <= 2


def lost(coordinator, client, incarnation, now, **fields):
    return coordinator.handle(Lost(client, "timeout: nothing from the peer within 5 s", incarnation, **fields), now)


def test_tasks_left_unanswered_until_the_timeout_count_as_refusals_do():
    coordinator = coordinator_for(fed_async(), num_clients=2)
    join(coordinator, [1, 2])
    for life in range(3):
        actions = lost(coordinator, 2, life, now=float(life), counts=True)
        assert outcomes(actions) == [(2, "lost:timeout")]
        again = coordinator.handle(Joined(ClientInfo(2, 1, incarnation=life + 1)), float(life))
        assert bool(assigned(again)) is (life < 2)
    assert [action for action in actions if not isinstance(action, Settled)] == [
        SetTimer(-2, 12.0),
        Suspend(2, 12.0, "not answered"),
    ]
    assert list(coordinator.roster.suspended) == [2]
    assert list(assigned(coordinator.handle(Timer(-2), 12.0))) == [2]


def test_a_loss_of_an_earlier_journal_counts_nothing():
    event = Lost(2, "timeout: x", 0, counts=True)
    row = event_to_json(event)
    assert event_from_json(row) == event and "counts" not in event_to_json(replace(event, counts=False))
    del row["counts"]
    coordinator = coordinator_for(fed_async(), num_clients=2)
    join(coordinator, [1, 2])
    coordinator.handle(event_from_json(row), 1.0)
    assert not coordinator.admission.backoff.refused


@pytest.mark.parametrize("leaves", ["answers", "disconnects", "joins again"])
def test_who_is_late_again_and_again_is_suspended_however_it_ends(leaves):
    coordinator = rounds(close_at=0.6)
    tasks, life = assigned(join(coordinator, [1, 2, 3])), 0
    for turn in range(3):
        now = float(turn)
        silent = tasks.pop(3)
        for client in (1, 2):
            tasks |= assigned(answer(coordinator, tasks.pop(client), 1.0, now=now))
        if leaves == "answers":
            actions = coordinator.handle(Arrived(update_for(coordinator.state, silent, 1.0)), now)
        else:
            actions = coordinator.handle(Lost(3, "disconnected", life), now) if leaves == "disconnects" else []
            life += 1
            actions += coordinator.handle(Joined(ClientInfo(3, 1, incarnation=life)), now)
        tasks |= assigned(actions)
    assert 3 not in tasks and list(coordinator.roster.suspended) == [3]
    assert [action.at for action in actions if isinstance(action, SetTimer) and action.id == -3] == [12.0]


def test_who_is_late_is_known_after_a_restart_from_a_checkpoint():
    coordinator, again = rounds(close_at=0.6), rounds(close_at=0.6)
    tasks = assigned(join(coordinator, [1, 2, 3]))
    answer(coordinator, tasks[1], 1.0)
    answer(coordinator, tasks[2], 1.0)
    restoring.restore(again, saving.save(coordinator))
    assert again.roster.late == coordinator.roster.late == {tasks[3].id}
    assert outcomes(answer(again, tasks[3], 1.0)) == [(3, "refused:late")]
