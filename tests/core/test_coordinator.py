from __future__ import annotations

from dataclasses import replace

import pytest

from raafl.algorithms import fed_async, fed_avg, fed_buff, fed_opt, fed_raa
from raafl.core.algorithm import OwnTests
from raafl.core.types import Arrived, ClientInfo, Evaluate, Finish, Joined, Lost, SetTimer, Settled, Stop, Timer, Update
from tests.helpers.coordinators import answer, assigned, coordinator_for, filled, join, update_for, values_of


def outcomes(actions):
    return [(a.client, a.outcome, a.staleness) for a in actions if isinstance(a, Settled)]


def test_nothing_starts_before_min_clients_have_joined():
    coordinator = coordinator_for(fed_async(), min_clients=2)
    assert assigned(join(coordinator, [1])) == {}
    assert sorted(assigned(join(coordinator, [2]))) == [1, 2]


def test_each_arrival_is_merged_at_once_and_its_client_starts_again():
    coordinator = coordinator_for(fed_async(alpha=0.5))
    tasks = assigned(join(coordinator, [1, 2]))
    actions = answer(coordinator, tasks[2], 1.0)
    assert outcomes(actions) == [(2, "merged", 0)]
    again = assigned(actions)
    assert list(again) == [2] and again[2].version == 1 and again[2].task == 1
    assert values_of(coordinator.state).unique().tolist() == [0.5]
    # client 1 still works on version 0: one merge late
    assert outcomes(answer(coordinator, tasks[1], 1.0)) == [(1, "merged", 1)]
    assert values_of(coordinator.state).unique().tolist() == [0.75]


def test_synchronous_rounds_wait_for_all_and_start_all_again():
    coordinator = coordinator_for(fed_avg())
    tasks = assigned(join(coordinator, [1, 2, 3]))
    assert assigned(answer(coordinator, tasks[1], 1.0)) == {}
    assert coordinator.state.version == 0
    answer(coordinator, tasks[2], 2.0)
    actions = answer(coordinator, tasks[3], 6.0)
    assert [o[:2] for o in outcomes(actions)] == [(1, "merged"), (2, "merged"), (3, "merged")]
    assert sorted(assigned(actions)) == [1, 2, 3]
    assert values_of(coordinator.state).unique().tolist() == [3.0]


def test_a_lost_client_does_not_hold_up_a_round():
    coordinator = coordinator_for(fed_avg())
    tasks = assigned(join(coordinator, [1, 2]))
    answer(coordinator, tasks[1], 4.0)
    actions = coordinator.handle(Lost(2, "disconnected"), 1.0)
    assert outcomes(actions) == [(2, "lost:disconnected", 0), (1, "merged", 0)]
    assert sorted(assigned(actions)) == [1]
    assert values_of(coordinator.state).unique().tolist() == [4.0]


def test_a_cohort_replaces_a_lost_member_before_anything_arrived():
    coordinator = coordinator_for(fed_avg(cohort=2), min_clients=4)
    first = assigned(join(coordinator, [1, 2, 3, 4]))
    assert len(first) == 2
    gone, stays = sorted(first)
    replacement = assigned(coordinator.handle(Lost(gone, "killed"), 1.0))
    assert len(replacement) == 1 and not set(replacement) & {gone, stays}


def test_concurrency_caps_a_round_and_the_rest_waits_its_turn():
    coordinator = coordinator_for(fed_avg(concurrency=2), min_clients=5)
    at_work = assigned(join(coordinator, range(1, 6)))
    assert sorted(at_work) == [1, 2]
    done = []
    while at_work:
        client, task = at_work.popitem()
        done.append(client)
        assert coordinator.state.version == 0
        started = assigned(answer(coordinator, task, 1.0))
        at_work |= started if len(done) < 5 else {}
        assert len(coordinator.roster.active) <= 2
    assert sorted(done) == [1, 2, 3, 4, 5] and coordinator.state.version == 1


def test_concurrency_caps_an_asynchronous_run_and_everyone_gets_a_turn():
    coordinator = coordinator_for(fed_async(concurrency=3), min_clients=10)
    at_work = assigned(join(coordinator, range(1, 11)))
    assert len(at_work) == 3
    seen = set(at_work)
    for _ in range(100):
        client = min(at_work)
        new = assigned(answer(coordinator, at_work.pop(client), 0.0))
        assert len(new) == 1 and len(coordinator.roster.active) == 3
        at_work |= new
        seen |= set(new)
    assert seen == set(range(1, 11))


def test_an_update_is_merged_at_most_once_and_strangers_are_refused():
    coordinator = coordinator_for(fed_async())
    task = assigned(join(coordinator, [1, 2]))[1]
    answer(coordinator, task, 1.0)
    before = values_of(coordinator.state).clone()
    assert outcomes(answer(coordinator, task, 9.0)) == [(1, "refused:repeated", 0)]
    unknown = Update(999, 1, 0, filled(coordinator.state, 9.0), 1)
    assert outcomes(coordinator.handle(Arrived(unknown), 0.0)) == [(1, "refused:unknown-assignment", 0)]
    assert values_of(coordinator.state).equal(before)
    assert dict(coordinator.admission.refused) == {"repeated": 1, "unknown-assignment": 1}


def test_another_client_cannot_answer_in_its_place():
    coordinator = coordinator_for(fed_async())
    task = assigned(join(coordinator, [1, 2]))[1]
    forged = update_for(coordinator.state, task, 9.0)
    forged.client = 2
    assert outcomes(coordinator.handle(Arrived(forged), 0.0)) == [(2, "refused:wrong-client", 0)]
    assert task.id in coordinator.roster.active  # the real answer is still welcome
    assert outcomes(answer(coordinator, task, 1.0)) == [(1, "merged", 0)]


def test_a_refused_update_settles_its_assignment_and_the_client_tries_again():
    coordinator = coordinator_for(fed_async())
    task = assigned(join(coordinator, [1]))[1]
    actions = coordinator.handle(Arrived(update_for(coordinator.state, task, 1.0, refusal="non-finite")), 0.0)
    assert outcomes(actions) == [(1, "refused:non-finite", 0)]
    assert list(assigned(actions)) == [1] and coordinator.state.version == 0


def test_a_wrong_shape_is_refused():
    coordinator = coordinator_for(fed_raa(fragments=2))
    task = assigned(join(coordinator, [1, 2]))[1]
    whole = Update(task.id, 1, 0, filled(coordinator.state, 1.0), 1)
    assert outcomes(coordinator.handle(Arrived(whole), 0.0)) == [(1, "refused:wrong-layout", 0)]


def test_an_update_without_samples_is_refused_whatever_the_merge_goes_by():
    for algorithm in (fed_avg(), fed_avg(by_samples=False), fed_buff(buffer_size=1), fed_async(), fed_opt()):
        coordinator = coordinator_for(algorithm)
        task = assigned(join(coordinator, (1,)))[1]
        empty = update_for(coordinator.state, task, 9.0, num_samples=0)
        assert outcomes(coordinator.handle(Arrived(empty), 0.0)) == [(1, "refused:no-samples", 0)]
        assert coordinator.state.version == 0 and coordinator.admission.refused == {"no-samples": 1}


def test_an_answer_from_an_earlier_incarnation_is_refused():
    coordinator = coordinator_for(fed_async())
    old = assigned(join(coordinator, [1]))[1]
    coordinator.handle(Lost(1, "killed"), 1.0)
    actions = coordinator.handle(Joined(ClientInfo(1, 1, incarnation=1)), 2.0)
    new = assigned(actions)[1]
    assert new.id != old.id and new.incarnation == 1 and new.task == 1
    assert outcomes(answer(coordinator, old, 5.0)) == [(1, "refused:repeated", 0)]
    assert coordinator.state.version == 0


def test_a_late_loss_of_an_earlier_incarnation_changes_nothing():
    coordinator = coordinator_for(fed_async())
    join(coordinator, [1])
    coordinator.handle(Joined(ClientInfo(1, 1, incarnation=1)), 1.0)
    assert coordinator.handle(Lost(1, "late news", incarnation=0), 2.0) == []
    assert coordinator.roster.clients[1].incarnation == 1


def test_fed_buff_merges_k_and_folds_in_the_rest_at_the_end():
    coordinator = coordinator_for(fed_buff(buffer_size=2, staleness="constant"))
    tasks = assigned(join(coordinator, [1, 2, 3]))
    assert outcomes(answer(coordinator, tasks[1], 1.0)) == []
    assert [o[0] for o in outcomes(answer(coordinator, tasks[2], 3.0))] == [1, 2]
    assert values_of(coordinator.state).unique().tolist() == [2.0]  # (1 + 3) / 2
    answer(coordinator, tasks[3], 5.0)
    actions = coordinator.handle(Stop("target"), 9.0)
    assert (3, "merged", 1) in outcomes(actions)
    assert values_of(coordinator.state).unique().tolist() == [7.0]
    assert coordinator.state.version == 2 and isinstance(actions[-1], Finish)


def test_the_end_settles_every_assignment_and_nothing_follows():
    coordinator = coordinator_for(fed_avg())
    tasks = assigned(join(coordinator, [1, 2]))
    answer(coordinator, tasks[1], 1.0)
    actions = coordinator.handle(Stop("enough"), 1.0)
    assert sorted(outcomes(actions)) == [(1, "unused", 0), (2, "unused", 0)]
    assert coordinator.handle(Joined(ClientInfo(3, 1)), 2.0) == []


def test_max_updates_and_max_time():
    coordinator = coordinator_for(fed_async(), max_updates=1, max_time_s=10.0)
    actions = join(coordinator, [1])
    assert SetTimer(0, 10.0) in actions
    actions = answer(coordinator, assigned(actions)[1], 1.0)
    assert actions[-1] == Finish("max_updates") and Evaluate(1) in actions
    other = coordinator_for(fed_async(), max_time_s=10.0)
    join(other, [1])
    assert other.handle(Timer(0), 10.0)[-1] == Finish("max_time")


def test_evaluations_come_every_so_many_versions_and_once_at_the_end():
    coordinator = coordinator_for(fed_async(), eval_every=2, max_updates=3)
    actions = join(coordinator, [1])
    versions = []
    for _ in range(3):
        actions = answer(coordinator, assigned(actions)[1], 1.0)
        versions += [a.version for a in actions if isinstance(a, Evaluate)]
    assert versions == [2, 3]


@pytest.mark.parametrize(
    ("every", "unit", "versions"),
    [
        (1.0, "seconds", [3, 5, 6, 8]),  # merged at 0.2, 0.8, 1.0, 1.9, 2.0, 4.5, 4.5, 4.6 s: and once at the end
        (0.2, "seconds", [1, 2, 3, 4, 5, 6, 8]),  # 0.6 / 0.2 and the like are not whole in floating point
        (10, "samples", [2, 4, 5, 7, 8]),  # 6 samples a task: 6, 12, 18, 24, 30, 36, 42, 48
    ],
)
def test_evaluations_by_seconds_or_samples_are_the_first_versions_at_or_after_each_multiple(every, unit, versions):
    coordinator = coordinator_for(fed_async(), eval_every=every, eval_unit=unit, max_updates=8)
    actions = join(coordinator, [1])
    found = []
    for now in (0.2, 0.8, 1.0, 1.9, 2.0, 4.5, 4.5, 4.6):
        actions = answer(coordinator, assigned(actions)[1], 1.0, now=now, num_samples=6)
        found += [a.version for a in actions if isinstance(a, Evaluate)]
    assert found == versions


def test_q_counts_merges_of_each_fragment():
    coordinator = coordinator_for(fed_raa(fragments=2, alpha=0.5))
    at_work = assigned(join(coordinator, [1, 2, 3, 4]))
    for _ in range(20):
        client = min(at_work)
        at_work |= assigned(answer(coordinator, at_work[client], 0.0))
    assert sum(coordinator.state.counts.values()) == 20 == coordinator.merged
    assert abs(coordinator.state.counts[1] - coordinator.state.counts[2]) <= 2


def test_the_same_events_give_the_same_actions():
    def history(seed):
        coordinator = coordinator_for(fed_raa(fragments=2, cohort=3), seed=seed, min_clients=6)
        at_work, trace = assigned(join(coordinator, range(1, 7))), []
        for _ in range(30):
            client = min(at_work)
            trace.append(at_work[client])
            at_work |= assigned(answer(coordinator, at_work.pop(client), 1.0))
        return trace

    assert history(1) == history(1)
    assert history(1) != history(2)


def test_own_data_weigh_no_more_than_so_many_times_the_median():
    coordinator = coordinator_for(fed_avg(), min_clients=3, max_weight=10.0)
    samples = {1: 6, 2: 5, 3: 1 << 52}
    for client, num in samples.items():
        actions = coordinator.handle(Joined(ClientInfo(client, num, own_data=client != 1)), 0.0)
    for client, task in assigned(actions).items():
        answer(coordinator, task, float(client), num_samples=samples[client])
    # client 3 counts as 10 times the median of 5, 6 and 2^52; client 2's 5 are below it: (6 + 5 * 2 + 60 * 3) / 71
    assert dict(coordinator.admission.clipped) == {3: 1}
    (value,) = values_of(coordinator.state).unique().tolist()
    assert abs(value - (6 + 10 + 180) / 71) < 1e-6


def test_a_dealt_share_weighs_what_it_is_and_null_bounds_nothing():
    for own_data, bound in ((False, 10.0), (True, None)):
        coordinator = coordinator_for(fed_avg(), min_clients=2, max_weight=bound)
        coordinator.handle(Joined(ClientInfo(1, 1)), 0.0)
        tasks = assigned(coordinator.handle(Joined(ClientInfo(2, 99, own_data=own_data)), 0.0))
        answer(coordinator, tasks[1], 0.0)
        answer(coordinator, tasks[2], 1.0, num_samples=99)
        (value,) = values_of(coordinator.state).unique().tolist()
        assert abs(value - 0.99) < 1e-6 and not coordinator.admission.clipped


def test_a_client_s_own_tests_count_by_what_it_was_dealt_or_may_weigh():
    """Clients 1 and 2 hold out 4 of the run's samples each, client 3 a fifth of 1,000 of its own: of 100, ten times the median."""
    coordinator = coordinator_for(fed_avg(), min_clients=3, max_weight=10.0)
    coordinator.change(fleet=replace(coordinator.fleet, own_tests=OwnTests({1: 4, 2: 4}, 0.2)))
    tasks = {}
    for client, samples in ((1, 10), (2, 10), (3, 1000)):
        tasks |= assigned(coordinator.handle(Joined(ClientInfo(client, samples, own_data=client == 3)), 0.0))
    found = {}
    for client, said in ((1, 2.0**53 - 1), (2, 3.0), (3, 250.0)):
        update = update_for(
            coordinator.state, tasks[client], 1.0, num_samples=coordinator.roster.clients[client].num_samples
        )
        update.metrics = {"test/num_samples": said, "test/accuracy": 0.5}
        coordinator.handle(Arrived(update), 0.0)
        found[client] = update.metrics
    # of 125 samples 100 are left to train on; one and a quarter is for rounding
    assert {client: metrics["test/num_samples"] for client, metrics in found.items()} == {1: 4.0, 2: 3.0, 3: 26.0}
    assert all(metrics["test/accuracy"] == 0.5 for metrics in found.values())
