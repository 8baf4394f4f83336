from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

import raafl.parts
from raafl.algorithms import ALGORITHMS, fed_buff
from raafl.config.parse import load_experiment, parse
from raafl.core import restoring, saving
from raafl.core.algorithm import OwnTests, SelectContext, Training
from raafl.core.coordinator import Coordinator
from raafl.core.state import GlobalState
from raafl.core.types import Assignment, ClientInfo, Work
from raafl.devices.profiles import Profile
from raafl.errors import BadInput
from raafl.parts import RateSelect
from raafl.parts.merge.mean import Mean, Staleness
from raafl.rules import CURRENT
from raafl.runtime.replay import replay
from raafl.runtime.run import simulate
from raafl.submodel import FULL, Spec, Submodels
from tests.helpers.coordinators import Line, answer, assigned, coordinator_for, join, line_state
from tests.helpers.refusals import refuses
from tests.helpers.small_runs import Finished, equal_replay, experiment, finish, unequal

CONFIGS = Path(__file__).parents[3] / "configs"
RATES = [1.0, 0.5625, 0.25, 0.0625]


def client(number=1, **profile):
    return ClientInfo(number, 5, Profile(**profile))


def fleet_of(*clients, state=None, seed=0):
    known = {one.id: one for one in clients}
    return SelectContext(state or line_state(16), known, random.Random(0), Training(num_epochs=1), 1, seed=seed)


def hidden(units):
    return Spec.select({"hidden": units})


# ---- rates ----


def test_rates_are_dealt_to_the_clients():
    clients = [client(number) for number in range(1, 6)]
    select, fleet = RateSelect(rates=RATES), fleet_of(*clients)
    specs = [select(one, fleet).spec for one in clients]
    # roots 1, 3/4, 1/2, 1/4 of 16 units, and from the beginning again
    assert specs == [FULL, hidden(range(12)), hidden(range(8)), hidden(range(4)), FULL]
    assert select.check(fleet) == []


def test_rates_by_name_of_device():
    phone, server = client(1, name="phone"), client(2, name="server")
    select, fleet = RateSelect(rates={"phone": 0.25, "server": 1}), fleet_of(phone, server)
    assert [select(one, fleet).spec for one in (phone, server)] == [hidden(range(8)), FULL]
    other = client(3, name="phony")
    problem = "client 3: rates has none for its device 'phony'; did you mean 'phone'?"
    assert select.check(fleet_of(phone, other)) == [problem]
    with pytest.raises(BadInput, match="client 3: rates has none"):
        select(other, fleet_of(phone, other))


def test_what_a_rate_is_a_share_of():
    one = client()
    assert RateSelect(rates=0.25, rate_of="width")(one, fleet_of(one)).spec == hidden(range(4))
    # 16 units of 3 and a bias are 49 parameters, a quarter is 12.25: 3 units are 10, 4 are 13
    assert RateSelect(rates=0.25, rate_of="parameters")(one, fleet_of(one)).spec == hidden(range(3))
    problems = RateSelect(rates=0.05, rate_of="parameters").check(fleet_of(one))
    assert problems[0].startswith("client 1: params is 2.45, too little for any submodel (the smallest, hidden[0:1]")


@pytest.mark.parametrize("selector", ["leading", "rolling", "random", "magnitude"])
def test_a_client_has_the_same_size_whatever_the_selector(selector):
    one, state = client(), line_state(16)
    state.values["fc1.weight"][5:13] = 1.0
    state.counts[1] = 3
    fleet = fleet_of(one, state=state, seed=9)
    work = RateSelect(selector=selector, rates=0.25)(one, fleet)
    assert len(work.spec.indices("hidden")) == 8 and work.region == 1
    expected = {"leading": range(8), "rolling": range(3, 11), "magnitude": range(5, 13)}
    if selector in expected:
        assert work.spec == hidden(expected[selector])
    else:
        assert work == RateSelect(selector=selector, rates=0.25)(one, fleet)
        assert work != RateSelect(selector=selector, rates=0.25)(one, fleet_of(one, state=state, seed=10))


def test_rounds_are_the_clients_own_or_the_servers():
    one, state = client(2), line_state(16)
    state.version, state.counts[2], state.counts[1] = 7, 3, 4
    fleet = fleet_of(one, state=state)
    assert RateSelect(selector="rolling", rates=0.25)(one, fleet).spec == hidden(range(3, 11))
    assert RateSelect(selector="rolling", rates=0.25, rounds="server")(one, fleet).spec == hidden(range(7, 15))


# ---- limits ----


def needed(spec):
    return line_state(16).submodels.cost(spec, 1)


def test_memory_decides_what_a_client_may_get():
    room = needed(hidden(range(6))).peak_bytes
    exact, short = client(1, memory_bytes=room), client(2, memory_bytes=room - 1)
    fleet = fleet_of(exact, short)
    assert RateSelect()(exact, fleet).spec == hidden(range(6))
    assert RateSelect()(short, fleet).spec == hidden(range(5))
    # a rate is the most it gets
    assert RateSelect(rates=1 / 16)(short, fleet_of(exact, short)).spec == hidden(range(4))
    assert all(fleet.fits(one, RateSelect()(one, fleet).spec) for one in (exact, short))
    least = needed(hidden([0])).peak_bytes
    none = client(3, memory_bytes=least - 1)
    problem = f"client 3: memory_bytes is {least - 1:.4g}, too little for any submodel (the smallest, hidden[0:1]"
    assert RateSelect().check(fleet_of(none))[0].startswith(problem)
    with pytest.raises(BadInput, match="raise memory_bytes"):
        RateSelect()(none, fleet_of(none))


def test_limits_of_a_task():
    one = client(1, flops_per_s=100.0, down_bytes_per_s=50.0, up_bytes_per_s=50.0)
    cost = needed(hidden(range(6)))
    seconds = 5 * cost.flops_per_sample / 100 + 2 * cost.up_bytes / 50  # 5 samples
    limits = {"seconds": seconds, "flops": 5 * cost.flops_per_sample, "wire_bytes": 2.0 * cost.up_bytes}
    for name, limit in limits.items():
        assert RateSelect(**{name: limit})(one, fleet_of(one)).spec == hidden(range(6)), name
        assert RateSelect(**{name: 0.99 * limit})(one, fleet_of(one)).spec == hidden(range(5)), name
    tightest = {**limits, "flops": 0.6 * limits["flops"]}
    assert (
        RateSelect(**tightest)(one, fleet_of(one)).spec == RateSelect(flops=tightest["flops"])(one, fleet_of(one)).spec
    )


def test_what_a_client_measures_itself_is_part_of_its_seconds():
    one, flops = client(1, flops_per_s=100.0), needed(hidden(range(6))).flops_per_sample

    def given(**limits):
        fleet = replace(fleet_of(one), own_tests=OwnTests({1: 3}))  # as long as one sample more than its five
        work = RateSelect(**limits)(one, fleet)
        assert "seconds" not in limits or fleet.cost_s(one, work) <= limits["seconds"]
        return work.spec

    assert given(seconds=1.001 * 5 * flops / 100) == hidden(range(5))
    assert given(seconds=1.001 * 6 * flops / 100) == hidden(range(6))
    assert given(flops=5 * flops) == hidden(range(6))


def test_who_is_too_slow_makes_only_the_steps_that_the_seconds_allow():
    spec = hidden(range(8))
    cost = needed(spec)
    link = {"down_bytes_per_s": 50.0, "up_bytes_per_s": 100.0}
    slow, fast, dear = (
        client(number, flops_per_s=speed, **link) for number, speed in ((1, 100.0), (2, 1000.0), (3, 1.0))
    )
    linked = client(4, flops_per_s=float("inf"), down_bytes_per_s=0.01)
    fleet = fleet_of(slow, fast, dear, linked)  # an epoch is 5 steps of one sample
    linked_s, step_s = cost.down_bytes / 50 + cost.up_bytes / 100, cost.flops_per_sample / 100

    def given(steps):
        select = RateSelect(rates=0.25, steps_within_s=linked_s + steps * step_s)
        works = [select(one, fleet) for one in (slow, fast, dear, linked)]
        assert {work.spec for work in works} == {spec} and select.check(fleet) == []
        return [work.num_steps for work in works]

    assert given(3) == [3, None, 1, 1]
    assert given(2.99) == [2, None, 1, 1]
    assert given(0.45) == [1, 4, 1, 1]
    assert given(5) == [None, None, 1, 1]
    assert fleet.cost_s(
        slow, RateSelect(rates=0.25, steps_within_s=linked_s + 3 * step_s)(slow, fleet)
    ) == pytest.approx(linked_s + 3 * step_s)
    assert RateSelect(rates=0.25)(slow, fleet).num_steps is None


def test_of_data_that_only_a_client_has_the_test_part_goes_by_its_share():
    tests, one = OwnTests({1: 100}, share=0.2), client(1)
    assert tests.of(one) == 100 and tests.of(client(2)) == 0
    assert tests.of(replace(one, num_samples=8, own_data=True)) == pytest.approx(2)


def test_a_client_that_comes_back_with_less_memory_gets_less():
    fleet = fleet_of(client(1), client(2))
    select = RateSelect()
    assert select(fleet.clients[1], fleet).spec == FULL
    weaker = client(1, memory_bytes=needed(hidden(range(6))).peak_bytes)
    select.on_loss(fleet.clients[1], fleet)
    fleet.clients[1] = weaker
    select.on_join(weaker, fleet)
    assert select(weaker, fleet).spec == hidden(range(6))


# ---- what cannot be had ----


@pytest.mark.parametrize("rate_of", ["model", "width", "parameters"])
def test_where_there_is_nothing_to_cut_all_is_trained_and_this_is_said(rate_of):
    class Fixed(Line):
        def submodel_axes(self):
            return {}

    state = GlobalState(Submodels(Fixed()), Submodels(Fixed()).state(Fixed()))
    peak = state.submodels.cost(FULL, 1).peak_bytes
    one, small = client(memory_bytes=peak), client(2, memory_bytes=peak - 1)
    fleet = fleet_of(one, state=state)
    for rates in (1.0, 0.5, [1.0, 0.25]):
        select = RateSelect(rates=rates, rate_of=rate_of)
        assert select(one, fleet).spec == FULL and select.check(fleet) == []
        notes = select.notes(fleet)
        assert len(notes) == (rates != 1.0)
        assert all("trains all of the model, which has no axes to cut by rates: " in note for note in notes)
        assert all("submodel_axes" in note for note in notes)
        (problem,) = select.check(fleet_of(one, small, state=state))
        assert problem.startswith("client 2: memory_bytes is") and "use a smaller batch or model" in problem
    assert RateSelect(rates=0.5, rate_of=rate_of).notes(fleet_of(one)) == []


test_bad_arguments_are_named = refuses(
    RateSelect,
    ({"selector": "leadin"}, "selector is 'leadin': did you mean 'leading'"),
    ({"rates": [1.0, 0.0]}, "a rate in rates is 0.0"),
    ({"rates": {"phone": 2.0}}, "a rate in rates is 2.0"),
    ({"rates": []}, "rates is empty"),
    (
        {"rates": {"phone": 0.5, 1: 0.5}},
        "rates has the key 1, which is no text: give names of devices, such as '1' in quotes",
    ),
    ({"rate_of": "params"}, "rate_of is 'params': did you mean 'parameters'"),
    ({"rounds": "clients"}, "rounds is 'clients': did you mean 'client'"),
    ({"seconds": 0}, "seconds is 0"),
    ({"steps_within_s": 0}, "steps_within_s is 0"),
    ({"seconds": 1.0, "relative": True}, "relative is true, but measured is false"),
    ({"measured": True}, "measured is true, but seconds, the limit that it adjusts to measured speed, is null"),
    ({"steps_within_s": 9, "seconds": 9}, "seconds is 9, but steps_within_s says how many steps"),
)


# ---- measured times ----


def reported(select, one, fleet, factor):
    """Let the client report a task of the submodel that it has now, which took ``factor`` times the predicted seconds."""
    work = select(one, fleet)
    task = Assignment(1, one.id, 0, 0, 0, work.spec, one.id, None, None, 0, 0.0)
    select.on_update(one, task, factor * fleet.cost_s(one, work), fleet)
    return select(one, fleet).spec


def test_a_client_that_takes_twice_the_predicted_time_gets_what_half_of_it_allows():
    slow, fleet = client(flops_per_s=100.0), fleet_of(client(flops_per_s=100.0))
    whole_s = fleet.cost_s(slow, Work())
    select = RateSelect(seconds=whole_s, measured=True)
    assert select(slow, fleet).spec == FULL
    assert reported(select, slow, fleet, 1.08) == FULL  # less than a tenth
    half = RateSelect(seconds=whole_s / 2)(slow, fleet_of(slow)).spec
    assert reported(select, slow, fleet, 2.0) == half != FULL
    assert reported(select, slow, fleet, 2.1) == half
    assert reported(select, slow, fleet, 1.0) == FULL
    assert reported(select, slow, fleet, 2.0) == half
    select.on_join(slow, fleet)  # again, maybe on another device
    assert select(slow, fleet).spec == FULL
    assert reported(RateSelect(seconds=whole_s), slow, fleet_of(slow), 2.0) == FULL


def test_a_client_that_becomes_ever_so_slow_gets_the_smallest_submodel():
    """It was dismissed for good, with a message that told of too little time."""
    slow, fleet = client(flops_per_s=100.0), fleet_of(client(flops_per_s=100.0))
    select = RateSelect(seconds=fleet.cost_s(slow, Work()), measured=True)
    smallest = reported(select, slow, fleet, 1e4)
    assert len(smallest.indices("hidden")) == 1
    assert reported(select, slow, fleet, 1.0) == FULL
    too_short_s = fleet.cost_s(slow, Work(smallest)) / 2
    told = [RateSelect(seconds=too_short_s, measured=measured).check(fleet_of(slow)) for measured in (True, False)]
    assert told[0] == told[1] != []


def test_beside_the_others_who_all_take_twice_the_time_nobody_gets_less():
    """Of three clients the median is 2 once two have reported; the third, as fast as it said, then gets what 2 x as long allows."""
    clients = [client(one, flops_per_s=100.0) for one in (1, 2, 3)]
    fleet = fleet_of(*clients)
    half_s = fleet.cost_s(clients[0], Work()) / 2
    select = RateSelect(seconds=half_s, measured=True, relative=True)
    half = select(clients[0], fleet).spec
    quarter = RateSelect(seconds=half_s / 2)(clients[0], fleet_of(*clients)).spec
    assert reported(select, clients[0], fleet, 2.0) == quarter != half  # one of three: it is slow
    assert reported(select, clients[1], fleet, 2.0) == half  # two of three: all are
    assert select(clients[0], fleet).spec == half and select(clients[2], fleet).spec == FULL


@pytest.mark.parametrize(("revision", "shrinks"), [(9, True), (CURRENT, False)])
def test_a_wait_for_the_uplink_is_no_slowness_of_a_client(tmp_path, revision, shrinks):
    """All send for longer than they train: with `overlap` an update waits until the one before is sent."""
    devices = unequal(up_bytes_per_s=4e4)
    select = RateSelect(seconds=0.2, measured=True)
    options = {"devices": devices, "overlap": True, "max_updates": 24, "rules": revision}
    run = finish(experiment(tmp_path / "run", fed_buff(buffer_size=2, submodel=select), **options))
    sizes = {}
    for row in run.events("assigned"):
        sizes.setdefault(row["client"], []).append(str(row["spec"]))
    assert any(len(set(each)) > 1 for each in sizes.values()) == shrinks
    says = "measured has no effect with overlap, where measured times contain waits for the uplink"
    assert (says in run.summary["warnings"]) == (not shrinks)
    assert equal_replay(experiment(tmp_path / "run", fed_buff(buffer_size=2, submodel=select), **options), run)


def test_sizes_by_measured_times_replay(tmp_path):
    """Every device computes at half of what its profile says, so that from the second task on all submodels are smaller."""
    devices = [replace(device, speed_changes=((0.0, 0.5),)) for device in unequal()]
    algorithm = fed_buff(buffer_size=2, submodel=RateSelect(seconds=0.08, measured=True))
    made = experiment(tmp_path / "run", algorithm, devices=devices)
    run = finish(made)
    sizes = {}
    for row in run.events("assigned"):
        sizes.setdefault(row["client"], []).append(str(row["spec"]))
    assert any(first != second for first, second, *_ in sizes.values())
    assert equal_replay(made, run)


def test_in_words():
    assert str(RateSelect(seconds=9, measured=True)) == "leading units, at most 1 of the model, 9 s as measured"
    assert str(RateSelect(rates=RATES)) == "leading units, at most 1, 0.5625, 0.25, 0.0625 of the model"
    assert (
        str(RateSelect("rolling", {"phone": 0.5}, "width", seconds=9))
        == "rolling units, at most phone 0.5 of the width, 9 s"
    )
    assert str(RateSelect(steps_within_s=9)) == "leading units, at most 1 of the model, only the steps that 9 s allow"


# ---- in algorithms ----


FIXED = {"ada_vit", "fiarse", "platon", "split_fed", "streaming_diloco", "timely_fl"}
"""Methods whose submodels, or whole models, are what they are about."""


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in FIXED])
def test_every_other_algorithm_takes_a_submodel(name):
    rated = RateSelect(rates=RATES)
    algorithm = ALGORITHMS[name](submodel=rated)
    assert getattr(algorithm.select, "inner", algorithm.select) is rated
    assert algorithm.describe()["select"].startswith(str(rated))  # with the steps, of a method that chooses them
    assert algorithm.merge == ALGORITHMS[name]().merge


def test_the_unequal_clients_of_sst2_can_be_said_in_a_config(tmp_path):
    file = tmp_path / "rated.yaml"
    file.write_text("""
algorithm:
  class_path: raafl.fed_raa
  init_args:
    alpha: 0.6
    staleness: polynomial
    submodel:
      class_path: raafl.parts.Rated
      init_args: {rates: [1, 0.5625, 0.25, 0.0625]}
""")
    experiment = load_experiment(CONFIGS / "sst2-minilm.yaml", "--config", str(file))
    rated = RateSelect(rates=RATES, rate_of="width", selector="magnitude")  # both as the config has them
    assert experiment.algorithm.select == rated
    assert experiment.algorithm.merge == Mean(0.6, Staleness("polynomial"), by_samples=False)
    assert experiment.algorithm.trigger.restart == "arrival"
    other = load_experiment(CONFIGS / "sst2-minilm.yaml", "--config", str(file), "--algorithm", "fed_buff")
    assert other.algorithm.select == rated  # a rival's clients have the same submodels


def test_a_run_on_digits_replays_to_the_last_bit(tmp_path):
    argv = [
        "--config",
        str(CONFIGS / "quickstart.yaml"),
        "--progress=quiet",
        f"--output={tmp_path / 'run'}",
        "--max_updates=16",
        "--algorithm",
        "fed_async",
        "--algorithm.submodel",
        "raafl.parts.Rated",
        "--algorithm.submodel.rates",
        str(RATES),
        "--algorithm.submodel.selector=magnitude",
        "--train.num_steps=3",
    ]
    parsed = parse("simulate", argv)
    run = Finished(*simulate(parsed.experiment, parsed.config_yaml))
    result = replay(tmp_path / "run")
    assert result["equal"] is True and result["model_digest"] == run.digest
    merged = [row for row in run.rows() if row["outcome"] == "merged"]
    assert {row["client"] for row in merged} == {"1", "2", "3", "4"}
    for row in merged:
        # 200 units: the share kept of each client, in bytes of 64 inputs, a bias and 10 outputs for each
        units = {"1": 200, "2": 150, "3": 100, "4": 50}[row["client"]]
        assert int(row["bytes_down"]) == 4 * (units * 75 + 10)


def test_a_window_rolls_on_after_a_checkpoint():
    def rolled() -> Coordinator:
        return coordinator_for(ALGORITHMS["fed_async"](submodel=RateSelect("rolling", 0.25)), line_state(16))

    first = rolled()
    tasks = assigned(join(first, [1, 2]))
    for value in range(5):
        tasks |= assigned(answer(first, tasks[1], float(value)))
    assert tasks[1].spec == hidden(range(5, 13)) and tasks[2].spec == hidden(range(8))
    second = rolled()
    restoring.restore(second, saving.save(first))
    assert assigned(answer(second, tasks[1], 0.0))[1].spec == hidden(range(6, 14))
    assert assigned(answer(second, tasks[2], 0.0))[2].spec == hidden(range(1, 9))


def test_configs_may_use_the_older_name():
    assert raafl.parts.Rated is RateSelect
