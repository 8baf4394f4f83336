"""TimelyFL, Algorithms 1 to 3, by hand. `Line` trained whole is 56 FLOPs a sample, its last layer alone 32."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from model_zoo import MLP
from raafl.algorithms import fed_avg, fed_opt, timely_fl
from raafl.algorithms.timely_fl import (
    Interval,
    Timely,
    TimelyMemory,
    TimeReport,
    Workload,
    interval,
    last_layers,
    workload,
)
from raafl.compression.plan import CompressionPlan
from raafl.core.algorithm import OwnTests, Training, TriggerContext
from raafl.core.options import Compress
from raafl.core.state import GlobalState, Memory
from raafl.core.types import OUT_OF_MEMORY, Adjusted, Arrived, Assignment, ClientInfo, Joined, SetTimer, Timer, Work
from raafl.devices.profiles import Profile
from raafl.parts.merge.mean import Mean
from raafl.parts.merge.server_optimizer import ServerOptimizer
from raafl.rules import CURRENT, Rules
from raafl.submodel import FULL, Spec, Submodels
from tests.helpers.coordinators import assigned, coordinator_for, join, line_state, update_for
from tests.helpers.refusals import refuses
from tests.helpers.small_runs import experiment, finish, unequal

# ---- TimelyFL, Algorithms 1 to 3, by hand. `Line` trained whole is 56 FLOPs a sample, its last layer alon ----


LAST = Spec.select(trained=["fc2"])
exact = partial(timely_fl, slack=0.0)


# ---- the schedule ----


@pytest.mark.parametrize(
    ("t_cmp", "t_com", "expected"),
    [
        (3.0, 1.0, Workload(3, 1.0, 9.0)),  # floor((10 - 1) / 3) epochs
        (4.0, 1.0, Workload(2, 1.0, 9.0)),  # 2.25
        (9.0, 1.0, Workload(1, 1.0, 9.0)),  # the k-th client itself
        (18.0, 2.0, Workload(1, 0.5, 9.0)),  # 10 / 20 of the model; 10 - 2 * 0.5
        (24.0, 16.0, Workload(1, 0.25, 6.0)),  # its link alone takes longer than T_k
        (0.0, 4.0, Workload(1, 1.0, 6.0)),
    ],
)
def test_algorithm_3(t_cmp, t_com, expected):
    assert workload(10.0, TimeReport(t_cmp, t_com)) == expected


def test_a_rounding_error_costs_no_epoch():
    t_cmp, t_com = 0.1, 0.2
    assert workload(3 * t_cmp + t_com, TimeReport(t_cmp, t_com)).num_units == 3


def test_the_interval_is_the_kth_smallest_total():
    totals = [20.0, 4.0, 10.0]
    assert [interval(totals, share) for share in (0.1, 1 / 3, 0.5, 2 / 3, 0.67, 1.0)] == [
        4.0,
        4.0,
        10.0,
        10.0,
        20.0,
        20.0,
    ]


def test_the_last_layers_are_listed_with_their_share():
    layers = last_layers(Submodels(MLP(8, (7, 5), 3)))
    assert layers == [
        (1.0, FULL),
        ((40 + 18) / 121, Spec.select(trained=["layers.3", "layers.5"])),
        (18 / 121, Spec.select(trained=["layers.5"])),
    ]


# ---- rounds ----


def line_fleet(algorithm, seconds, num_tested=None, **limits):
    """Clients 1, 2, ... that need so many seconds for an epoch of `Line`; their coordinator, and what they are given."""
    coordinator = coordinator_for(algorithm, min_clients=len(seconds), **limits)
    coordinator.change(fleet=replace(coordinator.fleet, own_tests=OwnTests(num_tested or {})))
    speed = {client: 56.0 / s for client, s in enumerate(seconds, start=1)}
    return coordinator, join(coordinator, speed, speed)


def report(coordinator, task, value, now, num_samples=1):
    """Answer at a time."""
    update = update_for(coordinator.state, task, value, num_samples=num_samples)
    return coordinator.handle(Arrived(update), now)


def load(task):
    """Epochs, and what trains."""
    return task.num_epochs or 1, task.spec


def test_a_round_by_hand():
    coordinator, actions = line_fleet(exact(layers="share"), [1.0, 2.0, 4.0])
    first = assigned(actions)  # T_k = 2, the second of three
    assert {client: load(task) for client, task in first.items()} == {1: (2, FULL), 2: (1, FULL), 3: (1, LAST)}
    timers = [a for a in report(coordinator, first[1], 1.0, now=2.0) if isinstance(a, SetTimer)]
    assert [timer.at for timer in timers] == [pytest.approx(2.0)]
    assert assigned(report(coordinator, first[2], 3.0, now=2.0)) == {}
    assert coordinator.state.version == 0
    second = assigned(coordinator.handle(Timer(timers[0].id), timers[0].at))
    assert coordinator.state.version == 1 and set(second) == {1, 2}  # 3 is late: (1 + 3) / 2
    assert all((value == 2.0).all() for _, value in coordinator.state.values.items())

    # 3 is of this round's clients, too: T_k = 2 again, the second of three
    assert second[1].version == 1 and load(second[1]) == (2, FULL) and load(second[2]) == (1, FULL)
    report(coordinator, first[3], 9.0, now=4.0 * 32 / 56)
    report(coordinator, second[2], 6.0, now=4.0)
    assert coordinator.state.version == 1
    third = assigned(report(coordinator, second[1], 3.0, now=4.0))
    assert coordinator.state.version == 2 and set(third) == {1, 2, 3}
    values = dict(coordinator.state.values.items())
    assert (values["fc1.weight"] == 4.5).all()  # (6 + 3) / 2
    assert (values["fc2.weight"] == 6.0).all() and (values["fc2.bias"] == 6.0).all()  # (9 + 6 + 3) / 3


def test_the_interval_does_not_shrink_while_slow_clients_are_late():
    """Of 1, 2, 8 and 9 s the second is 2 s in every round, whoever is still at work from earlier ones."""
    coordinator, actions = line_fleet(exact(), [1.0, 2.0, 8.0, 9.0])
    now, found = 0.0, []
    for _ in range(5):
        found.append(coordinator.state.memory.of(TimelyMemory).T_k)
        given = assigned(actions)
        assert {c: load(task) for c, task in given.items() if c <= 2} == {1: (2, FULL), 2: (1, FULL)}
        timers = [a for c in (1, 2) for a in report(coordinator, given[c], 0.0, now + 2.0) if isinstance(a, SetTimer)]
        now = timers[0].at
        actions = coordinator.handle(Timer(timers[0].id), now)
    assert found == [pytest.approx(2.0)] * 5 and coordinator.state.version == 5


def test_a_task_may_be_charged_the_share_that_trains():
    """5 of 13 parameters: on the paper's clock 5/13 of 4 s, in time for T_k = 2, where a device needs 32/56 of it."""
    for clock, expected_s in (("share", 4.0 * 5 / 13), ("device", 4.0 * 32 / 56)):
        coordinator, actions = line_fleet(exact(layers="share", clock=clock), [1.0, 2.0, 4.0])
        task, fleet = assigned(actions)[3], coordinator.fleet
        assert load(task) == (1, LAST)
        assert fleet.cost_s(fleet.clients[3], Work(task.spec)) == pytest.approx(expected_s)
        assert fleet.cost_s(fleet.clients[3], Work(FULL)) == pytest.approx(4.0)
        # of 13 values of 4 bytes 5 are sent back; all 13 are received, though not on the paper's clock
        cost = fleet.cost(task.spec)
        assert (cost.down_bytes, cost.up_bytes) == ((20, 20) if clock == "share" else (52, 20))
        assert cost.peak_bytes == fleet.state.submodels.cost(LAST, fleet.batch_size).peak_bytes


@pytest.mark.parametrize(("revision", "down_bytes"), [(5, 20 - (52 - 25)), (CURRENT, 10)])
def test_compression_saves_the_share_that_the_papers_clock_charges(revision, down_bytes):
    """All 52 bytes are 25 with int8: 13 values and three scales; 5/13 of the parameters are charged, of which 20 bytes are 13."""
    algorithm = exact(layers="share", clock="share")
    coordinator, _ = line_fleet(algorithm, [1.0, 2.0, 4.0])
    submodels = coordinator.state.submodels
    submodels.rules = Rules(revision)
    plan = CompressionPlan.of(submodels, Compress("int8", "int8"), "values", algorithm.local)
    cost = replace(coordinator.fleet, plan=plan).cost(LAST)
    assert (cost.down_bytes, cost.up_bytes) == (down_bytes, 13)
    assert replace(coordinator.fleet, plan=plan).cost(FULL).down_bytes == 25


@pytest.mark.parametrize("compress", [Compress("int8", "int8"), Compress("top_k", "top_k", 0.1)], ids=str)
def test_whatever_is_compressed_the_papers_clock_charges_no_more_than_the_share(tmp_path, compress):
    """A quarter of the speed is a quarter of the time: fc2 trains, of 64 * 24 + 24 + 24 * 10 + 10 parameters the last 250."""
    algorithm = exact(layers="share", clock="share", participation=0.25)
    devices = unequal((8e7, 2e7), latency_s=0.0)
    run = finish(experiment(tmp_path / "run", algorithm, clients=2, devices=devices, max_updates=6, compress=compress))
    whole, part = ([row for row in run.rows() if row["client"] == client] for client in ("1", "2"))
    for full, some in zip(whole[:2], part[:2], strict=True):
        assert int(some["bytes_down"]) == pytest.approx(int(full["bytes_down"]) * 250 / 1810, abs=2)
    assert run.summary["bytes_down"] > 0


def test_on_the_papers_clock_everybody_is_in_time(tmp_path):
    fields = {"devices": unequal((8e7, 6e7, 2e7, 1e7)), "max_updates": 24}
    late = {}
    for clock in ("share", "device"):
        algorithm = exact(layers="share", clock=clock)
        summary = finish(experiment(tmp_path / clock, algorithm, **fields)).summary
        late[clock] = summary["staleness"]["max"]
    assert late["share"] == 0 < late["device"]


def test_slack_is_waited_for_and_lets_who_is_a_little_late_train_all():
    # T_k = 2, 10 % slack: client 3, predicted for 2.15 s, trains all; client 4, for 2.25, the last layer
    coordinator, actions = line_fleet(timely_fl(slack=0.1), [1.0, 2.0, 2.15, 2.25])
    first = assigned(actions)
    assert {c: load(task) for c, task in first.items()} == {1: (2, FULL), 2: (1, FULL), 3: (1, FULL), 4: (1, LAST)}
    (timer,) = (a for a in report(coordinator, first[1], 1.0, now=1.9) if isinstance(a, SetTimer))
    assert timer.at == pytest.approx(2.2)
    for client, now in ((2, 2.05), (4, 2.1)):
        assert assigned(report(coordinator, first[client], 1.0, now=now)) == {}
    assert set(assigned(report(coordinator, first[3], 1.0, now=2.15))) == {1, 2, 3, 4}
    assert coordinator.state.version == 1


def test_layers_that_would_not_be_done_in_time_do_not_train():
    # 32 of 56 FLOPs: at T_k = 2 and 3.4 s the last layer takes 1.94 s; alpha = 0.59 allows it, 5 of 13 parameters
    _, actions = line_fleet(exact(), [1.0, 2.0, 3.4, 2.1])
    assert {c: load(task) for c, task in assigned(actions).items()} == {
        1: (2, FULL),
        2: (1, FULL),
        3: (1, LAST),
        4: (1, LAST),
    }


def test_what_a_client_measures_itself_is_part_of_its_time():
    # three samples' forward passes take as long as one sample's step: 2.4 s in all for client 3, where T_k = 2
    _, actions = line_fleet(exact(), [1.0, 2.0, 1.2], num_tested={3: 3})
    assert {c: load(task) for c, task in assigned(actions).items()} == {1: (2, FULL), 2: (1, FULL), 3: (1, LAST)}
    _, actions = line_fleet(exact(), [1.0, 2.0, 1.2])
    assert load(assigned(actions)[3]) == (1, FULL)


def test_a_client_short_of_time_may_train_fewer_units_instead():
    # a unit is 14 of the 56 FLOPs: 0.85 s of client 3's 3.4, 0.525 of client 4's 2.1; T_k = 2
    _, actions = line_fleet(exact(cut="width"), [1.0, 2.0, 3.4, 2.1])
    assert {c: load(task) for c, task in assigned(actions).items()} == {
        1: (2, FULL),
        2: (1, FULL),
        3: (1, Spec.select({"hidden": range(2)})),
        4: (1, Spec.select({"hidden": range(3)})),
    }


def test_time_and_share_differ_where_frozen_layers_cost():
    """T_k is 24.8 s (248 FLOPs at 10/s); at 5/s alpha is 1/2: 25 of 57 parameters would do, but take 136 FLOPs, 27.2 s."""
    held = {}
    for how in ("time", "share"):
        model = MLP(2, (4, 4, 4), 1)
        submodels = Submodels(model, (torch.zeros(2, 2), torch.zeros(2, dtype=torch.long)))
        state = GlobalState(submodels, submodels.state(model))
        coordinator = coordinator_for(exact(layers=how), state, min_clients=2)
        task = assigned(join(coordinator, (1, 2), {1: 10.0, 2: 5.0}))[2]
        assert state.memory.of(TimelyMemory).T_k == pytest.approx(24.8)
        assert (submodels.cost(task.spec, 1).flops_per_sample / 5.0 <= 24.8) == (how == "time")
        held[how] = submodels.layout(task.spec, "trained").num_bytes // 4
    assert held == {"time": 5, "share": 25}


def test_a_device_that_slows_down_gets_less_and_catches_up():
    coordinator, actions = line_fleet(exact(layers="share"), [2.0, 2.0])
    first = assigned(actions)
    assert {load(task) for task in first.values()} == {(1, FULL)}
    (timer,) = (a for a in report(coordinator, first[2], 0.0, now=2.0) if isinstance(a, SetTimer))
    second = assigned(coordinator.handle(Timer(timer.id), timer.at))
    assert set(second) == {2}
    report(coordinator, first[1], 0.0, now=4.0)  # twice as long as it said
    third = assigned(report(coordinator, second[2], 0.0, now=timer.at + 2.0))
    assert {c: load(task) for c, task in third.items()} == {
        1: (1, LAST),
        2: (1, FULL),
    }  # T_k = 2 of 4 and 2: alpha = 1/2
    opened_s = third[1].assigned_s
    report(coordinator, third[1], 0.0, now=opened_s + 2.0 * 32 / 56)  # as fast as ever
    fourth = assigned(report(coordinator, third[2], 0.0, now=opened_s + 2.0))
    assert {client: load(task) for client, task in fourth.items()} == {1: (1, FULL), 2: (1, FULL)}


def test_a_device_that_comes_back_is_measured_anew():
    coordinator, actions = line_fleet(exact(participation=1.0), [2.0, 4.0])
    first = assigned(actions)
    assert load(first[1]) == (2, FULL)
    report(coordinator, first[1], 0.0, now=8.0)
    assert coordinator.state.memory.of(TimelyMemory).ratio == {1: 2.0}
    coordinator.handle(Joined(ClientInfo(1, 1, Profile(flops_per_s=28.0), incarnation=1)), 8.0)
    assert coordinator.state.memory.of(TimelyMemory).ratio == {}


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_fixed_workload_is_that_of_the_first_round(adaptive):
    coordinator, actions = line_fleet(exact(adaptive=adaptive, participation=1.0), [1.0, 2.0])
    loads = {1: set(), 2: set()}
    for now in range(10, 100, 10):  # far slower than they said, and client 1 no faster than client 2
        for task in assigned(actions).values():
            loads[task.client].add(load(task))
        actions = report(
            coordinator, min(coordinator.roster.active.values(), key=lambda task: task.id), 0.0, float(now)
        )
    assert loads[1] >= {(2, FULL)} and loads[2] >= {(1, FULL)}
    assert (loads == {1: {(2, FULL)}, 2: {(1, FULL)}}) == (not adaptive)


@pytest.mark.parametrize(("revision", "spec"), [(5, FULL), (CURRENT, LAST)])
def test_a_fixed_workload_is_less_for_a_client_that_ran_out_of_memory(revision, spec):
    coordinator, actions = line_fleet(exact(adaptive=False, participation=1.0), [1.0, 2.0])
    coordinator.change(fleet=replace(coordinator.fleet, rules=Rules(revision)))
    refused = update_for(coordinator.state, assigned(actions)[1], 0.0, refusal=OUT_OF_MEMORY)
    assert assigned(coordinator.handle(Arrived(refused), 1.0))[1].spec == spec


def test_only_those_drawn_count_for_the_interval():
    coordinator, actions = line_fleet(exact(cohort=1), [1.0, 2.0, 4.0])
    (task,) = assigned(actions).values()
    assert coordinator.state.memory.of(TimelyMemory).T_k == {1: 1.0, 2: 2.0, 3: 4.0}[task.client]
    assert load(task) == (1, FULL)


def test_the_unit_is_the_runs_own_work():
    coordinator, _ = line_fleet(exact(), [1.0, 2.0], max_updates=2)
    for training, expected in (
        (Training(num_epochs=3), {"num_epochs": 6, "num_steps": None}),
        (Training(num_epochs=None, num_steps=5), {"num_epochs": None, "num_steps": 10}),
    ):
        object.__setattr__(coordinator.fleet, "training", training)
        work = Timely()._work(2, FULL, coordinator.fleet)
        assert {"num_epochs": work.num_epochs, "num_steps": work.num_steps} == expected
        alone = Timely()._work(1, FULL, coordinator.fleet)
        assert (alone.num_epochs, alone.num_steps) == (None, None)


def test_memory_bounds_what_trains():
    coordinator = coordinator_for(exact(), min_clients=2)
    for client, memory_bytes in ((1, 250.0), (2, float("inf"))):
        profile = Profile(flops_per_s=56.0, memory_bytes=memory_bytes)
        actions = coordinator.handle(Joined(ClientInfo(client, 1, profile)), 0.0)
    assert {client: load(task) for client, task in assigned(actions).items()} == {1: (1, LAST), 2: (1, FULL)}
    assert exact().select.check(coordinator.fleet) == []
    coordinator.roster.clients[1] = ClientInfo(1, 1, Profile(memory_bytes=10.0))
    (problem,) = exact().select.check(coordinator.fleet)
    assert problem.startswith(
        "client 1: memory_bytes is 10, training the last layer alone needs 204: raise memory_bytes"
    )


def test_the_trigger():
    def at(now, active):
        memory = Memory()
        memory.put(TimelyMemory(T_k=8.0))
        return TriggerContext([1.0], active, 3, 5.0, now, memory)

    assert not Interval().due(at(12.9, 1))
    assert Interval().due(at(13.1, 1)) and Interval().due(at(6.0, 0))
    assert Interval().due(at(Interval().wake_at(at(6.0, 1)), 1))


# ---- whole runs ----


@pytest.mark.parametrize(
    ("timely", "plain"),
    [
        (timely_fl(), fed_avg()),
        (timely_fl(cut="width"), fed_avg()),
        (timely_fl(cohort=2), fed_avg(cohort=2)),
        (timely_fl(server_optimizer="adam", server_lr=0.02), fed_opt(server_lr=0.02)),
    ],
    ids=["FedAvg", "FedAvg, by width", "FedAvg, cohort", "FedOpt"],
)
def test_with_equal_devices_and_work_it_is_the_synchronous_method(tmp_path, timely, plain):
    """Bit for bit, and in the same time."""
    fields = {"devices": unequal((5e7,) * 4), "max_updates": 8}
    ours, theirs = (finish(experiment(tmp_path / a.name, a, **fields)) for a in (timely, plain))
    assert ours.digest == theirs.digest
    assert ours.summary["time_s"] == pytest.approx(theirs.summary["time_s"])


def test_a_run_is_repeated_to_the_last_bit(tmp_path):
    first, second = (finish(experiment(tmp_path / name, timely_fl())) for name in "ab")
    assert first.digest == second.digest and first.journal() == second.journal()


# ---- the factory ----


def test_every_argument_reaches_its_part():
    algorithm = timely_fl(0.3, True, "share", "yogi", 0.5, slack=0.2, most_slack=0.3)
    assert algorithm.select == Timely(0.3, True, "share", slack=0.2, most_slack=0.3)
    assert algorithm.trigger == Interval(0.2, 0.3)
    assert algorithm.merge == ServerOptimizer("yogi", 0.5)
    assert timely_fl().merge == Mean() and timely_fl(by_samples=False).merge == Mean(by_samples=False)


test_bad_arguments_are_named = refuses(
    timely_fl,
    ({"participation": 0.0}, r"participation is 0\.0"),
    ({"participation": 1.5}, r"participation is 1\.5"),
    ({"slack": -0.1}, r"slack is -0\.1: give 0 or more, a share of the round's length"),
    ({"slack": 0.2, "most_slack": 0.2}, r"most_slack is 0\.2, but slack is 0\.2: give more, or null"),
    ({"adaptive": False, "most_slack": 0.2}, "most_slack is given, but adaptive is false"),
    ({"layers": "tine"}, "layers is 'tine': did you mean 'time'"),
    ({"clock": "papers"}, "clock is 'papers': known: device, share"),
    ({"cut": "width", "clock": "share"}, "clock is share, but cut is 'width'"),
    ({"cut": "width", "layers": "share"}, "layers is share, but cut is 'width'"),
    ({"server_optimizer": "sgd"}, "server optimizer is 'sgd'"),
    ({"server_lr": 0.5}, r"server_lr is 0\.5, but there is no server_optimizer: leave it out"),
)


# ---- How long TimelyFL waits for late clients, by how late their tasks were ----


def test_the_slack_follows_how_late_four_fifths_of_the_tasks_are():
    """Of 20 tasks 16 are at most 0.16 late. A change of less than a quarter is none, and 0.3 is the most."""
    trigger, state = Interval(0.0, 0.3), line_state()
    memory, task = state.memory.of(TimelyMemory), Assignment(1, 1, 0, 0, 0, FULL, 0, None, None, 0, 0.0)

    def after(late):
        memory.late += late
        return trigger.on_update(task, 1, state)

    assert after([0.01 * i for i in range(1, 20)]) is None and memory.slack is None
    assert after([0.2]) == Adjusted("slack", 0.0, 0.16, 0.16, 0.0, "the share of its time by which a task is late")
    waiting = TriggerContext([1.0], 1, 3, 5.0, 6.0, state.memory)
    memory.T_k = 8.0
    assert trigger.wake_at(waiting) == pytest.approx(5.0 + 8.0 * 1.16)
    assert after([0.2] * 20) is None and memory.slack == 0.16 and memory.late == []
    assert after([0.9] * 20).after == 0.3 and after([-0.5] * 20).after == 0.0


def test_a_task_is_late_by_what_it_takes_more_than_the_one_before():
    coordinator, actions = line_fleet(timely_fl(layers="share", slack=0.0, most_slack=0.5), [2.0, 2.0])
    first = assigned(actions)
    (timer,) = (a for a in report(coordinator, first[2], 0.0, now=2.0) if isinstance(a, SetTimer))
    second = assigned(coordinator.handle(Timer(timer.id), timer.at))
    assert coordinator.state.memory.of(TimelyMemory).late == []  # nothing is known of a client's first
    report(coordinator, second[2], 0.0, now=timer.at + 2.5)
    assert coordinator.state.memory.of(TimelyMemory).late == [pytest.approx(0.25)]
