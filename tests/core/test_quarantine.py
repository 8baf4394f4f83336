from __future__ import annotations

from dataclasses import replace

import pytest

from raafl.algorithms import fed_async, fed_avg, fed_buff, fed_raa
from raafl.core.restoring import restore
from raafl.core.roster import FIRST_S, HOPELESS, LONGEST_S, RefusalBackoff
from raafl.core.saving import save
from raafl.core.types import (
    OUT_OF_MEMORY,
    Arrived,
    Assign,
    ClientInfo,
    Dismiss,
    Fail,
    Joined,
    Lost,
    SetTimer,
    Settled,
    Stop,
    Suspend,
    Timer,
)
from tests.helpers.coordinators import answer, assigned, coordinator_for, join, update_for


def refuse(coordinator, task, now=0.0, reason="non-finite"):
    return coordinator.handle(Arrived(update_for(coordinator.state, task, 1.0, refusal=reason)), now)


def refuse_all(coordinator, task, now=0.0, reason="non-finite"):
    """Refuse a client's tasks until it is given no more; returns the actions, and how many there were."""
    actions, num = [], 0
    while task is not None:
        last = refuse(coordinator, task, now, reason)
        actions, num, task = actions + last, num + 1, assigned(last).get(task.client)
    return actions, num


def failed(actions):
    return [action.reason for action in actions if isinstance(action, Fail)]


def test_a_client_refused_three_times_in_a_row_is_kept_out_for_a_while_and_comes_back_on_probation():
    coordinator = coordinator_for(fed_async(), num_clients=2)
    tasks = assigned(join(coordinator, [1, 2]))
    actions, num = refuse_all(coordinator, tasks[1], now=5.0)
    assert num == 3 and actions[-2:] == [SetTimer(-1, 15.0), Suspend(1, 15.0, "non-finite")]
    assert list(coordinator.roster.clients) == [2] and list(coordinator.roster.suspended) == [1]
    assert coordinator.handle(Timer(-1), 14.9) == []
    task = assigned(coordinator.handle(Timer(-1), 15.0))[1]
    actions, num = refuse_all(coordinator, task, now=16.0)
    assert num == 1 and Suspend(1, 36.0, "non-finite") in actions  # twice as long
    task = assigned(coordinator.handle(Timer(-1), 36.0))[1]
    again = assigned(answer(coordinator, task, 1.0, now=37.0))[1]  # an update that is merged clears it
    actions, num = refuse_all(coordinator, again, now=40.0)
    assert num == 3 and Suspend(1, 50.0, "non-finite") in actions


def test_who_is_kept_out_cannot_come_in_by_joining_anew():
    coordinator = coordinator_for(fed_async(), num_clients=2)
    refuse_all(coordinator, assigned(join(coordinator, [1, 2]))[1])
    assert coordinator.handle(Joined(ClientInfo(1, 1, incarnation=1)), 3.0) == []
    coordinator.handle(Lost(1, "disconnected", 1), 4.0)
    assert not coordinator.roster.suspended and coordinator.handle(Timer(-1), 10.0) == []
    assert assigned(coordinator.handle(Joined(ClientInfo(1, 1, incarnation=2)), 10.0))[1].incarnation == 2


def test_counting_good_clients_looks_at_no_client_without_refusals(monkeypatch):
    coordinator, looked = coordinator_for(fed_async(), num_clients=5), []
    tasks = assigned(join(coordinator, [1, 2, 3, 4, 5]))
    refuse(coordinator, tasks[2])
    answer(coordinator, tasks[3], 1.0, 0.0)

    class Clients(dict):
        def __iter__(self):
            pytest.fail("all clients were iterated")

    admission = coordinator.admission
    admission.roster.clients = Clients(admission.roster.clients)
    monkeypatch.setattr(admission.backoff, "is_bad", lambda client: looked.append(client) or False)
    assert admission.num_good == 5 and looked == [2]


def test_one_client_alone_ends_no_run_that_has_others():
    coordinator = coordinator_for(fed_async(), num_clients=3)
    task, now, ended = assigned(join(coordinator, [1]))[1], 0.0, []
    for _ in range(HOPELESS - 1):
        actions, _ = refuse_all(coordinator, task, now)
        ended += failed(actions)
        now = next(action.at for action in actions if isinstance(action, SetTimer))
        task = assigned(coordinator.handle(Timer(-1), now))[1]
    assert ended == [] and coordinator.admission.num_good == 0
    tasks = assigned(join(coordinator, [2]))
    assert coordinator.admission.num_good == 1
    assert [a.outcome for a in answer(coordinator, tasks[2], 1.0, now) if isinstance(a, Settled)] == ["merged"]


def test_a_run_whose_every_client_is_refused_fails_after_three_each_and_goes_on_until_it_is_told_to_stop():
    coordinator = coordinator_for(fed_async(), min_clients=2, num_clients=2)
    tasks = assigned(join(coordinator, [1, 2]))
    assert failed(refuse_all(coordinator, tasks[1])[0]) == []
    actions, num = refuse_all(coordinator, tasks[2], reason="outlier")
    (reason,) = failed(actions)
    assert num == 3 and reason.startswith(
        "failed: the last 3 updates of every client were refused, those of client 2 as"
    )
    assert coordinator.finished is None
    coordinator.handle(Stop(reason), 1.0)
    assert coordinator.finished == reason


def test_with_a_client_that_was_merged_once_and_left_there_is_hope_for_a_while():
    """It may come back; only when those that are there were kept out again and again is there none."""
    coordinator = coordinator_for(fed_async(), min_clients=2, num_clients=2)
    tasks = assigned(join(coordinator, [1, 2]))
    answer(coordinator, tasks[1], 1.0)
    coordinator.handle(Lost(1, "gone"), 1.0)
    task, now, rounds = tasks[2], 1.0, 0
    while True:
        actions, _ = refuse_all(coordinator, task, now)
        rounds += 1
        if failed(actions):
            break
        now = next(action.at for action in actions if isinstance(action, SetTimer))
        task = assigned(coordinator.handle(Timer(-2), now))[2]
    assert rounds == HOPELESS and now == 1.0 + FIRST_S * (2 ** (HOPELESS - 1) - 1)


@pytest.mark.parametrize("reason", ["bad-checksum", "bad-record", "slow"])
def test_what_was_damaged_on_its_way_speaks_against_no_client(reason):
    coordinator = coordinator_for(fed_async())
    task = assigned(join(coordinator, [1]))[1]
    for _ in range(10):
        actions = refuse(coordinator, task, reason=reason)
        assert failed(actions) == []
        task = assigned(actions)[1]
    assert coordinator.admission.refused[reason] == 10


def test_answers_to_nothing_speak_against_no_client():
    """A client that comes back reports what it could not send; that must not keep it out."""
    coordinator = coordinator_for(fed_async())
    task = assigned(join(coordinator, [1]))[1]
    task = assigned(answer(coordinator, task, 1.0))[1]
    for _ in range(10):
        update = update_for(coordinator.state, task, 1.0, refusal="late")
        update.assignment = 1
        coordinator.handle(Arrived(update), 0.0)
    assert coordinator.admission.num_good == 1 and coordinator.admission.refused["repeated"] == 10


def test_a_round_goes_on_without_those_who_are_kept_out():
    coordinator = coordinator_for(fed_avg(), min_clients=2, num_clients=2)
    tasks = assigned(join(coordinator, [1, 2]))
    refuse_all(coordinator, tasks[1])
    actions = answer(coordinator, tasks[2], 1.0)
    assert coordinator.state.version == 1 and list(assigned(actions)) == [2]


def test_a_restored_coordinator_keeps_out_whom_it_kept_out():
    def fresh():
        return coordinator_for(fed_buff(buffer_size=3), num_clients=2)

    whole = fresh()
    tasks = assigned(join(whole, [1, 2]))
    refuse_all(whole, tasks[1])
    refuse(whole, tasks[2])
    saved = save(whole)
    again = fresh()
    restore(again, saved)
    assert saved["min_clients"] == 1
    for coordinator in (whole, again):
        assert coordinator.handle(Timer(-1), 9.0) == []
    theirs, ours = (coordinator.handle(Timer(-1), 10.0) for coordinator in (whole, again))
    assert theirs == ours and isinstance(ours[0], Assign)
    for coordinator in (whole, again):
        assert Suspend(1, 31.0, "non-finite") in refuse(coordinator, ours[0].assignment, 11.0)
    assert save(again) == save(whole)


def test_a_server_that_was_started_anew_waits_for_as_many_as_at_the_start_and_holds_nothing_against_anybody():
    coordinator = coordinator_for(fed_async(), min_clients=2, num_clients=3)
    refuse_all(coordinator, assigned(join(coordinator, [1, 2]))[1])
    coordinator.restart()
    for client in (1, 2):
        coordinator.handle(Lost(client, "restart"), 5.0)
    assert assigned(join(coordinator, [1], now=5.0)) == {}
    tasks = assigned(join(coordinator, [2], now=6.0))
    assert sorted(tasks) == [1, 2] and refuse_all(coordinator, tasks[1], 6.0)[1] == 3


def test_a_server_that_was_started_anew_gives_no_task_to_clients_from_before():
    """Needed is one client, and two are not yet lost when the first one is; what waits for a merge waits for them, too."""
    coordinator = coordinator_for(fed_avg(), min_clients=3)
    tasks = assigned(join(coordinator, [1, 2, 3]))
    answer(coordinator, tasks[1], 1.0)
    coordinator.restart()
    coordinator.change(limits=replace(coordinator.limits, min_clients=1))
    for client in (1, 2, 3):
        assert assigned(coordinator.handle(Lost(client, "restart"), 5.0)) == {}
    assert coordinator.state.version == 0
    assert list(assigned(join(coordinator, [2], now=6.0))) == [2] and coordinator.state.version == 1


def test_an_end_that_can_be_resumed_folds_in_nothing():
    """What waits is in the checkpoint, and is merged when the run goes on."""
    coordinator = coordinator_for(fed_buff(buffer_size=2))
    answer(coordinator, assigned(join(coordinator, [1]))[1], 1.0)
    coordinator.handle(Stop("failed: of something"), 1.0)
    assert coordinator.merged == coordinator.state.version == 0


def test_no_client_is_kept_out_for_longer_than_an_hour():
    backoff = RefusalBackoff(1)
    waits = [backoff.refuse(7, 100.0) - 100.0 for _ in range(2000)]
    assert waits[:3] == [10.0, 20.0, 40.0] and waits[-1] == LONGEST_S == max(waits)


@pytest.mark.parametrize(
    ("by_time", "task_s", "waits"),
    [
        (True, 20.0, [20.0, 40.0, 80.0]),
        (True, 600.0, [600.0, 1200.0, 2400.0]),
        (True, 1.0, [10.0, 20.0, 40.0]),
        (False, 20.0, [10.0, 20.0, 40.0]),
    ],
)
def test_who_never_answers_is_kept_out_for_as_long_as_its_tasks_took(by_time, task_s, waits):
    """Else a server that waits 20 s for each of its tasks keeps it out for 10 s, and waits again."""
    coordinator = coordinator_for(fed_avg(), min_clients=2, num_clients=2, suspends_by_time=by_time)
    join(coordinator, [1, 2])
    now, life, found = 0.0, 0, []
    while len(found) < len(waits):
        now += task_s
        actions = coordinator.handle(Lost(2, "timeout: nothing from the peer", life, counts=True), now)
        suspended = [action.until for action in actions if isinstance(action, Suspend)]
        if suspended:
            found.append(suspended[0] - now)
            again = coordinator_for(fed_avg(), min_clients=2, num_clients=2, suspends_by_time=by_time)
            restore(again, save(coordinator))
            assert again.admission.backoff.unanswered_s == coordinator.admission.backoff.unanswered_s
            coordinator, now = again, suspended[0]
        life += 1
        assert 2 in assigned(coordinator.handle(Joined(ClientInfo(2, 1, incarnation=life)), now))
    assert found == waits


def test_an_answer_that_counts_clears_what_was_left_unanswered():
    backoff = RefusalBackoff(1)
    assert backoff.refuse(1, 0.0, unanswered_s=100.0) == 100.0
    backoff.accept(1)
    assert backoff.refuse(1, 0.0) == 10.0
    backoff.refuse(2, 0.0, unanswered_s=100.0)
    for _ in range(20):  # the median of the latest tasks, whatever one long one took
        until = backoff.refuse(2, 0.0, unanswered_s=1.0)
    assert backoff.unanswered_s[2] == [1.0] * 9 and until == LONGEST_S
    backoff.forgive()
    assert backoff.unanswered_s == {}


def test_who_is_kept_out_for_want_of_memory_is_given_what_suited_it_before():
    """All fragments were too large in the end: none is left that suits, and the client is not dismissed for it."""
    coordinator = coordinator_for(fed_raa(fragments=2, K=1e9), num_clients=2)
    task = assigned(join(coordinator, [1, 2]))[1]
    actions, num = refuse_all(coordinator, task, reason=OUT_OF_MEMORY)
    assert num == 3 and Suspend(1, 10.0, OUT_OF_MEMORY) in actions
    actions = coordinator.handle(Timer(-1), 10.0)
    assert assigned(actions)[1] and not [action for action in actions if isinstance(action, Dismiss)]


def test_who_was_lost_before_the_start_is_remembered_until_the_server_begins_anew():
    coordinator = coordinator_for(fed_avg(), num_clients=3, min_clients=3, count_lost=True)
    coordinator.handle(Lost(3, "gone"), 0.0)
    join(coordinator, [1])
    again = coordinator_for(fed_avg(), num_clients=3, min_clients=3, count_lost=True)
    restore(again, save(coordinator))
    assert again.admission.absent == {3}
    assert set(assigned(join(again, [2]))) == {1, 2}  # two are there, one was counted as lost
    again.restart()
    assert again.admission.absent == set()
