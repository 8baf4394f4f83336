"""FedCompass: the groups that its authors' scheduler forms for the same arrivals, and merges by hand."""

from __future__ import annotations

import heapq
import json
from pathlib import Path

import pytest
import torch

from raafl.algorithms import fed_compass
from raafl.algorithms.fed_compass import CompassMemory, Group, GroupDeltas, GroupReported, Pace, StepsByGroup
from raafl.core import restoring, saving
from raafl.core.algorithm import SelectContext, Training
from raafl.core.types import Arrived, Assign, ClientInfo, Joined, Lost, SetTimer, Settled, Timer
from raafl.parts.merge.mean import Staleness
from raafl.parts.select.rate_select import RateSelect
from raafl.parts.select.submodels import Full
from tests.helpers.coordinators import answer, assigned, coordinator_for, join, line_state, update_for, values_of
from tests.helpers.refusals import refuses
from tests.helpers.small_runs import equal_replay, experiment, finish

ORACLE = json.loads(Path(__file__).with_name("fed_compass_groups.json").read_text())
"""Runs of `CompassScheduler` of APPFL 1.12.0 on a clock of its own, with clients whose seconds per step vary.

`starts`: client, time, steps and group (-1 = its first task) of each task; `seconds`: how long it takes; `merges`: time, and client
and staleness of each update.
"""


def test_every_argument_reaches_its_part():
    algorithm = fed_compass(2, 8, 1.5, 0.5, 0.7, "hinge", 0.3, 2.0, submodel=RateSelect())
    pace = Pace(2, 8, 0.5, 1.5)
    assert algorithm.select == StepsByGroup(RateSelect(), pace)
    assert algorithm.trigger == GroupReported()
    assert algorithm.merge == GroupDeltas(0.7, Staleness("hinge", 0.3, 2.0), pace=pace)
    assert fed_compass().select == StepsByGroup(Full(), Pace(20, 100, 0.9, 1.2))


test_wrong_settings_are_refused = refuses(
    fed_compass,
    ({"min_steps": 0}, "min_steps is 0: give a number above 0"),
    ({"min_steps": 9, "max_steps": 8}, r"max_steps is 8: give 9 \(min_steps\) or more"),
    ({"momentum": 0.0}, "momentum is 0"),
    ({"late": 0.9}, "late is 0.9: give a multiple of the expected time, 1 or more"),
)


@pytest.mark.parametrize(
    ("training", "submodel", "unused"),
    [
        (Training(), None, []),
        (Training(num_epochs=3), None, ["train.num_epochs is 3"]),
        (Training(num_epochs=3, num_steps=10), None, ["train.num_steps is 10"]),  # steps come before epochs
        (Training(), RateSelect(steps_within_s=2.5), ["algorithm.submodel.steps_within_s is 2.5"]),
    ],
)
def test_a_length_of_tasks_that_has_no_effect_is_named_before_the_run(training, submodel, unused):
    select = fed_compass(2, 8, submodel=submodel).select
    fleet = SelectContext(line_state(), {}, None, training, batch_size=1)
    more = ", and has no effect: each task has 2 to 8 steps (algorithm.min_steps, algorithm.max_steps)"
    assert select.notes(fleet) == [one + more for one in unused]


class Played:
    """A coordinator whose n-th task takes the n-th of given seconds; all starts and merges are noted."""

    def __init__(self, algorithm, clients, seconds):
        self.coordinator = coordinator_for(algorithm, min_clients=clients, num_clients=clients)
        self.seconds, self.heap, self.starts, self.merges = iter(seconds), [], [], []
        for client in range(1, clients + 1):
            self.follow(self.coordinator.handle(Joined(ClientInfo(client, 1)), 0.0), 0.0)

    def follow(self, actions, now):
        groups = self.coordinator.state.memory.of(CompassMemory).group
        started = [action.assignment for action in actions if isinstance(action, Assign)]
        # tasks that start at one instant: the scheduler has them in the order of speed, raafl in that of ids
        for task in started:
            self.starts.append([task.client, now, task.num_steps, groups.get(task.client, -1), task])
        settled = [a for a in actions if isinstance(a, Settled) and a.outcome == "merged"]
        for version in sorted({one.version for one in settled}):
            self.merges.append([now, sorted([s.client, s.staleness] for s in settled if s.version == version)])
        for action in actions:
            if isinstance(action, SetTimer):
                heapq.heappush(self.heap, (action.at, 0, action.id, Timer(action.id)))
        return started

    def give_seconds(self, task, seconds, now):
        heapq.heappush(self.heap, (now + seconds, 1, task.client, task))

    def step(self):
        now, kind, _, what = heapq.heappop(self.heap)
        event = what if kind == 0 else Arrived(update_for(self.coordinator.state, what, 0.0))
        return now, kind, self.follow(self.coordinator.handle(event, now), now)


@pytest.mark.parametrize("run", ORACLE, ids=["20 to 100 steps", "4 to 16 steps, impatient", "10 to 40 steps"])
def test_the_same_arrivals_give_the_groups_of_the_authors_scheduler(run):
    min_steps, max_steps, momentum, late = run["pace"]
    played = Played(fed_compass(min_steps, max_steps, late, momentum), run["clients"], run["seconds"])
    expected = [(*start, seconds) for start, seconds in zip(run["starts"], run["seconds"], strict=True)]
    given = 0
    while given < len(expected):
        for client, now, steps, group, task in played.starts[given:]:
            match = [e for e in expected if e[0] == client and e[1] == pytest.approx(now, abs=1e-5)]
            assert [(e[2], e[3]) for e in match] == [(steps, group)], (client, now)
            played.give_seconds(task, match[0][4], now)
            given += 1
        if given < len(expected):
            played.step()
    # the scheduler's buffers hold one update for each client: a late one is lost where its client's next is in the same merge
    merges = [
        [now, sorted([c, min(s for d, s in all_ if d == c)] for c in {c for c, _ in all_})]
        for now, all_ in played.merges
    ]
    assert len(merges) >= len(run["merges"]) - 1
    for (now, updates), (expected_s, those) in zip(merges, run["merges"], strict=False):
        assert (now, updates) == (pytest.approx(expected_s, abs=1e-5), sorted(those))


def deltas(algorithm, steps):
    """Play (client, value, time) through a coordinator of two clients; return it."""
    coordinator = coordinator_for(algorithm, min_clients=2, num_clients=2)
    tasks = assigned(join(coordinator, [1, 2]))
    for client, value, now in steps:
        tasks |= assigned(answer(coordinator, tasks[client], value, now))
    return coordinator, tasks


def test_first_updates_are_merged_alone_and_then_a_group_together():
    """Client 1 takes 1 s a step, client 2 takes 2: its group expects 1 after 4 more steps, when 2 has made 2."""
    algorithm = fed_compass(1, 4, alpha=0.5, staleness="constant")
    coordinator, tasks = deltas(algorithm, [(1, 8.0, 4.0)])
    assert coordinator.state.values["fc2.bias"].item() == 0.5 / 2 * 8.0
    assert tasks[1].num_steps == 4  # until 8 s
    tasks |= assigned(answer(coordinator, tasks[2], 4.0, 8.0 - 4.0))  # 1 s a step as well: 4 steps until 8 s
    assert coordinator.state.version == 2
    assert coordinator.state.values["fc2.bias"].item() == 2.0 + 1.0
    assert tasks[2].num_steps == 4
    assert not assigned(answer(coordinator, tasks[1], 2.0, 8.0))  # waits for its group
    assert coordinator.state.version == 2
    again = assigned(answer(coordinator, tasks[2], 6.0, 8.5))
    assert set(again) == {1, 2} and coordinator.state.version == 3
    assert coordinator.state.values["fc2.bias"].item() == 3.0 + 0.5 / 2 * (2.0 + 6.0)


def test_a_late_update_is_merged_with_the_next_group_by_its_staleness_then():
    """Group 0 of both clients is expected at 8 s and closed at 9.6 s; 2 comes at 10 s."""
    algorithm = fed_compass(1, 4, alpha=1.0, staleness="polynomial", staleness_a=1.0)
    coordinator, tasks = deltas(algorithm, [(1, 0.0, 4.0), (2, 0.0, 4.0)])
    actions = answer(coordinator, tasks[1], 2.0, 8.0)
    timer = next(action for action in actions if isinstance(action, SetTimer))
    assert timer.at == pytest.approx(4.0 + 4 * 1.2)
    tasks |= assigned(coordinator.handle(Timer(timer.id), timer.at))
    # version 1 when client 1 was sent its model, 2 now: s = 1/2
    assert coordinator.state.values["fc2.bias"].item() == pytest.approx(0.5 * 2.0 / 2)
    tasks |= assigned(answer(coordinator, tasks[2], 6.0, 10.0))
    assert coordinator.state.version == 3  # it waits, its client goes on
    assert tasks[2].version == 3
    memory = coordinator.state.memory.of(CompassMemory)
    assert len(memory.late) == len(memory.copies) == 1
    before = coordinator.state.values["fc2.bias"].item()
    assert not assigned(answer(coordinator, tasks[1], 0.0, 12.0))  # client 2 has one step in its group, until 12.8 s
    settled = [a for a in answer(coordinator, tasks[2], 0.0, 12.0) if isinstance(a, Settled)]
    # cut from version 2, merged into version 3: s = 1/2
    assert coordinator.state.values["fc2.bias"].item() == pytest.approx(before + 0.5 * 6.0 / 2)
    assert sorted((one.client, one.staleness) for one in settled) == [(1, 0), (2, 0), (2, 1)]


def test_a_group_is_complete_without_a_client_that_is_lost():
    coordinator, tasks = deltas(fed_compass(1, 4), [(1, 0.0, 4.0), (2, 0.0, 4.0)])
    answer(coordinator, tasks[1], 1.0, 8.0)
    assert coordinator.state.version == 2
    assert set(assigned(coordinator.handle(Lost(2, "disconnected"), 8.1))) == {1}
    assert coordinator.state.version == 3
    assert 2 not in coordinator.state.memory.of(CompassMemory).speed


def test_a_group_all_of_whose_clients_are_lost_does_not_stop_others_from_starting():
    """Its updates wait, and nobody's speed tells when its next round would end."""
    pace, memory = Pace(2, 10), CompassMemory()
    memory.groups[0] = Group([], [1], [11], 20.0, 22.0)
    memory.num_groups, memory.group, memory.speed = 1, {1: 0}, {1: 1.0, 2: 2.0}
    memory.forget(1)
    assert memory.groups[0].tasks == [11] and not memory.groups[0].reported
    assert memory.plan_task(2, 21.0, pace) == 10  # as in a first group: the most steps
    assert memory.groups[1].expected_s == 21.0 + 10 * 2.0


def test_an_update_that_is_refused_leaves_no_group_waiting():
    coordinator, tasks = deltas(fed_compass(1, 4), [(1, 0.0, 4.0), (2, 0.0, 4.0)])
    coordinator.handle(Arrived(update_for(coordinator.state, tasks[2], 1.0, refusal="non-finite")), 6.0)
    groups = coordinator.state.memory.of(CompassMemory).groups
    assert sorted(client for group in groups.values() for client in group.out) == [1, 2]


def test_the_record_survives_a_checkpoint():
    coordinator, tasks = deltas(fed_compass(1, 4), [(1, 1.0, 4.0), (2, 2.0, 4.0), (1, 3.0, 8.0)])
    again = coordinator_for(fed_compass(1, 4), min_clients=2, num_clients=2)
    again.state.values.copy_(coordinator.state.values)
    restoring.restore(again, restoring.from_plain(saving.to_plain(saving.save(coordinator))))
    assert isinstance(next(iter(again.state.memory.of(CompassMemory).groups.values())), Group)
    for one in (coordinator, again):
        answer(one, tasks[2], 5.0, 8.5)
    assert torch.equal(values_of(coordinator.state), values_of(again.state))
    assert coordinator.state.version == again.state.version == 3


def test_a_run_replays_and_merges_in_groups(tmp_path):
    made = experiment(tmp_path / "run", fed_compass(2, 6), max_updates=24)
    run = finish(made)
    assert equal_replay(made, run)
    assert run.summary["versions"] < run.summary["updates_merged"]
