"""RAM-Fed: numbers by hand, a slow reference, and what it must equal."""

from __future__ import annotations

import random
from collections import Counter
from tempfile import gettempdir

import pytest
import torch
from torch import nn

from raafl.algorithms import fed_avg, ra_fed, ram_fed
from raafl.algorithms.ra_fed import Regions
from raafl.config.parse import parse
from raafl.core.options import Guard
from raafl.core.sample import Sample
from raafl.core.state import GlobalState
from raafl.core.types import Update
from raafl.errors import BadInput
from raafl.parts.merge.mean import Mean, Staleness
from raafl.parts.merge.remembered import Remembered
from raafl.parts.protect.privacy import Privacy
from raafl.parts.select.coverage import of_regions
from raafl.parts.select.rate_select import RateSelect
from raafl.parts.trigger import AllReported, EachArrival
from raafl.runfolder import checkpoint_reader
from raafl.runtime.replay import replay
from raafl.runtime.run import simulate
from raafl.submodel import FULL, FlatTensors, Spec, Submodels
from tests.helpers.coordinators import answer, assigned, coordinator_for, filled, join, line_state, values_of
from tests.helpers.merges import merge_all, take
from tests.helpers.refusals import refuses
from tests.helpers.small_runs import experiment, finish

TOP, BOTTOM = Spec.select({"hidden": [0]}), Spec.select({"hidden": [1]})


def step(merge, state, *updates):
    """Merge deltas (client, spec, value, staleness), every element of one at its value."""
    for client, spec, value, *staleness in updates:
        update = Update(0, client, 0, filled(state, value, spec), 1)
        take(merge, state, update, spec, *(staleness or (0,)))
    merge_all(merge, state)
    state.version += 1
    return places(state)


def places(state):
    """The first unit's weight, the second's, and the output's bias."""
    units = state.values["fc2.weight"][0].tolist()
    assert state.values["fc1.weight"].tolist() == [[units[0]] * 2, [units[1]] * 2]
    return [*units, state.values["fc2.bias"].item()]


# ---- by hand ----


def test_three_rounds_with_a_region_that_nobody_trains():
    """Two clients, two regions (and the output's bias, in every submodel); -gamma Delta written as d, -gamma v as v."""
    merge, state = Remembered(), line_state(hidden=2)
    # first region: u = (0, 0), v = 0 + ((4 - 0) + (2 - 0)) / 2 = 3, as the bias; second: client 2 alone, v = 0 + (2 - 0) / 1
    assert step(merge, state, (1, TOP, 4.0), (2, FULL, 2.0)) == [3.0, 2.0, 3.0]
    # u = (4, 2) | (0, 2) | (4, 2). First: v = 3 + ((1 - 4) + (3 - 2)) / 2 = 2. Second, by nobody: v = (0 + 2) / 2 = 1
    assert step(merge, state, (1, TOP, 1.0), (2, TOP, 3.0)) == [5.0, 3.0, 5.0]
    # u = (1, 3) | (0, 2) | (1, 3). First: v = 2 + (1 - 3) = 0. Second: v = 1 + (6 - 0) = 7. Bias: 2 + ((6 - 1) + (1 - 3)) / 2
    assert step(merge, state, (1, BOTTOM, 6.0), (2, TOP, 1.0)) == [5.0, 10.0, 8.5]
    assert merge.report(state) == {"memory": {"clients": 2, "bytes": 2 * 7 * 4}}


def test_the_memory_is_of_each_client():
    """One memory for all would give v = 4 in the second round: the difference to what the other client left."""
    merge, state = Remembered(), line_state(hidden=2)
    step(merge, state, (1, FULL, 4.0), (2, FULL, 0.0))
    assert step(merge, state, (1, FULL, 4.0)) == [2.0 + 2.0] * 3  # v = (4 + 0) / 2 + (4 - 4)


def test_one_arrival_at_a_time_moves_by_a_share_of_v_and_less_when_late():
    merge, state = Remembered(server_lr=None, staleness=Staleness("polynomial", a=1.0)), line_state(hidden=2)
    assert step(merge, state, (1, TOP, 4.0)) == [4.0, 0.0, 4.0]  # N = 1, v = 0 + (4 - 0)
    # N = 2: first v = 4 / 2 = 2, second v = 0 + 6, bias v = 2 + 6 = 8; a = 1/2 * s(1) = 1/4
    assert step(merge, state, (2, BOTTOM, 6.0, 1)) == [4.5, 1.5, 6.0]
    # remembered whole: first v = 4 / 2 + (2 - 4) = 0, second v = 6 / 2, bias v = (4 + 6) / 2 + (2 - 4) = 3; a = 1/2
    assert step(merge, state, (1, TOP, 2.0)) == [4.5, 3.0, 7.5]


def test_what_is_too_old_is_forgotten():
    merge, state = Remembered(max_age=2), line_state(hidden=2)
    step(merge, state, (1, FULL, 4.0))
    assert step(merge, state, (1, TOP, 0.0)) == [4.0, 8.0, 4.0]  # a merge old
    assert step(merge, state, (1, TOP, 0.0)) == [4.0, 12.0, 4.0]  # two
    assert step(merge, state, (1, TOP, 0.0)) == [4.0, 12.0, 4.0]
    assert step(merge, state, (1, BOTTOM, 1.0)) == [4.0, 13.0, 5.0]


# ---- a slow reference ----


class Net(nn.Module):
    """Two hidden layers: fc2's weights lie between two regions."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.norm = nn.BatchNorm1d(2)

    def submodel_axes(self):
        return {
            "one": [("fc1.weight", 0), ("fc1.bias", 0), ("fc2.weight", 1)],
            "two": [("fc2.weight", 0), ("fc2.bias", 0), ("fc3.weight", 1)],
        }


def masks(module, regions):
    """Elements that a client of these regions (two units each) trains, and those its regions own."""
    units = torch.tensor([unit // 2 in regions for unit in range(6)])
    held = {name: torch.ones_like(p, dtype=torch.bool) for name, p in module.named_parameters()}
    for name in ("fc1.weight", "fc2.weight", "fc1.bias", "fc2.bias"):
        held[name][~units] = False
    held["fc3.weight"][:, ~units] = False
    owned = {name: mask.clone() for name, mask in held.items()}
    held["fc2.weight"][:, ~units] = False
    return held, owned


def test_against_a_slow_reference_with_weights_between_regions():
    torch.manual_seed(0)
    module, draw, merge = Net(), random.Random(0), Remembered()
    submodels = Submodels(module)
    state = GlobalState(submodels, submodels.state(module))
    names = [name for name, _ in module.named_parameters()]
    theta = {name: state.values[name].clone() for name in names}
    mean = state.values["norm.running_mean"].clone()
    latest: dict[int, dict[str, torch.Tensor]] = {}
    for _ in range(12):
        fresh = {}
        statistics = []
        for client in draw.sample([1, 2, 3], draw.choice([1, 2, 3])):
            regions = sorted(draw.sample(range(3), draw.choice([1, 1, 2, 3])))
            spec = of_regions(submodels.axes, regions, 3)
            whole = FlatTensors.zeros(submodels.layout())
            for dtype, buffer in whole.buffers.items():
                if dtype.is_floating_point:
                    buffer.normal_()
            update = Update(0, client, 0, submodels.plan(spec).gather(whole), 1)
            take(merge, state, update, spec, 0)
            held, owned = masks(module, regions)
            fresh[client] = {name: (owned[name], whole[name] * held[name]) for name in names}
            statistics.append(whole["norm.running_mean"])
        merge_all(merge, state)
        state.version += 1
        mean += torch.stack(statistics).mean(dim=0)  # never remembered
        for client in fresh:
            latest.setdefault(client, {name: torch.zeros_like(theta[name]) for name in names})
        for name in names:
            v = torch.stack([mine[name] for mine in latest.values()]).mean(dim=0)
            gamma = sum(given[name][0].float() for given in fresh.values())
            late = sum(given[name][0] * (given[name][1] - latest[n][name]) for n, given in fresh.items())
            theta[name] += v + late / gamma.clamp_min(1)
            for n, given in fresh.items():
                latest[n][name] = torch.where(given[name][0], given[name][1], latest[n][name])
        for name in names:
            torch.testing.assert_close(state.values[name], theta[name], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state.values["norm.running_mean"], mean, rtol=1e-5, atol=1e-5)


# ---- arguments ----


def test_every_argument_reaches_its_part():
    algorithm = ram_fed(
        mask="S-Arb",
        trained=3,
        every=2,
        coverage=1,
        full_first=True,
        trigger="each",
        server_lr=0.5,
        staleness="hinge",
        staleness_a=2.0,
        staleness_b=7.0,
        max_age=9,
        concurrency=2,
    )
    assert algorithm.select == Regions("S-Arb", 4, 3, 2, 1, None, True, "client")
    assert algorithm.merge == Remembered(0.5, Staleness("hinge", 2.0, 7.0), 9)
    assert (algorithm.trigger, algorithm.sample) == (EachArrival(), Sample(None, 2))
    in_rounds = ram_fed(mask=[1, 2, 3], regions=5, rest=4)
    assert in_rounds.select == Regions([1, 2, 3], 5, rest=4)
    assert (in_rounds.trigger, in_rounds.merge) == (AllReported(), Remembered(1.0))
    assert ram_fed(trigger="each").merge.server_lr is None
    assert ram_fed(submodel=RateSelect(rates=0.5)).select == RateSelect(rates=0.5)
    assert ram_fed(memory="disk", memory_folder="there").merge.folder == "there"
    assert ram_fed(memory="disk").merge.folder == gettempdir() and ram_fed().merge.folder is None
    assert ra_fed(rest=9).select == ram_fed(rest=9).select and ra_fed().merge == Mean(by_samples=False)


test_bad_arguments_are_named = refuses(
    ram_fed,
    ({"trigger": "al"}, "trigger is 'al'.*all"),
    ({"staleness": "hinge"}, "staleness is 'hinge', but in a round no update is late"),
    ({"server_lr": 0.0}, "server_lr is 0"),
    ({"max_age": 0}, "max_age is 0"),
    ({"memory": "disc"}, "memory is 'disc': did you mean 'disk'"),
    ({"memory_folder": "there"}, "memory_folder is there, but there are no files if memory is ram"),
    ({"mask": "M-Arb"}, "mask is 'M-Arb'"),
    ({"cohort": 2, "rest": 5}, "cohort is 2, but trained, coverage, rest and hold"),
    ({"submodel": RateSelect(), "mask": "S-Arb", "rest": 5}, "mask is S-Arb, rest is 5, but submodel says"),
)


# ---- full coverage ----


def test_full_coverage_in_every_round_is_fed_avg_to_the_last_bit():
    """With all of N clients fresh v = mean u + mean (d - u) = mean d, whatever is remembered; quarters are exact in binary."""
    deltas = {1: [1.0, -2.0, 0.5], 2: [2.0, 4.0, -0.25], 3: [-4.0, 1.5, 0.25], 4: [3.0, 0.5, 1.5]}
    # sums 2, 4, 2; so the mean moves the model by 0.5, 1, 0.5 from 0.125 on
    expected = [0.625, 1.625, 2.125]
    algorithms = {
        "ram_fed": ram_fed(mask=[4]),
        "disk": ram_fed(mask=[4], memory="disk"),
        "fed_avg": fed_avg(by_samples=False),
    }
    for name, algorithm in algorithms.items():
        coordinator = coordinator_for(algorithm, line_state(value=0.125), min_clients=4)
        asked = assigned(join(coordinator, deltas))
        for round, after in enumerate(expected):
            assert {task.spec for task in asked.values()} == {FULL}
            before, tasks = values_of(coordinator.state)[0].item(), asked
            for client in (3, 1, 4, 2):
                delta = deltas[client][round]
                # fed_avg is sent values, ram_fed differences
                asked = assigned(answer(coordinator, tasks[client], before + delta if name == "fed_avg" else delta))
            assert values_of(coordinator.state).unique().tolist() == [after]


# ---- whole runs ----


def weights(run):
    return checkpoint_reader.load(run.folder).state_dict


def test_full_coverage_in_every_round_is_fed_avg(tmp_path):
    remembered = weights(finish(experiment(tmp_path / "ram", ram_fed(mask=[4]))))
    averaged = weights(finish(experiment(tmp_path / "avg", fed_avg(by_samples=False))))
    for name, tensor in remembered.items():
        torch.testing.assert_close(tensor, averaged[name], rtol=1e-5, atol=1e-6)


IN_TURN = "--algorithm.trigger=each --rounds.deadline=null --algorithm.trained=null --algorithm.every=1"


@pytest.mark.quick_cases("in turn")
@pytest.mark.parametrize(
    ("config", "options"), [("ra-fed", ""), ("ram-fed", ""), ("ram-fed", IN_TURN)], ids=["ra", "ram", "in turn"]
)
def test_a_run_of_the_config_repeats_and_replays_bit_for_bit(tmp_path, config, options):
    summaries = []
    for name in "ab":
        given = f"--config configs/{config}.yaml --progress=quiet --max_updates=30 --eval_every=30 {options}".split()
        parsed = parse("simulate", [*given, f"--output={tmp_path / name}"])
        summaries.append(simulate(parsed.experiment, parsed.config_yaml)[0])
    assert summaries[0]["model_digest"] == summaries[1]["model_digest"]
    assert config == "ra-fed" or summaries[0]["memory"]["clients"] == 10
    assert replay(tmp_path / "a")["equal"] is True


def test_a_joint_result_is_of_no_client(tmp_path):
    pytest.importorskip("dp_accounting")
    with pytest.raises(BadInput, match=r"guard.combine is 'median', but ram_fed merges each client's update"):
        finish(experiment(tmp_path / "run", ram_fed(), guard=Guard(combine="median")))
    with pytest.raises(BadInput, match="ram_fed merges each client's update"):
        finish(experiment(tmp_path / "run", ram_fed(), privacy=Privacy(clip_norm=1.0, delta=1e-3)))


def test_a_held_assignment_leaves_one_region_to_nobody_after_the_first_round(tmp_path):
    algorithm = ram_fed("S-Arb", trained=3, coverage=1, full_first=True, hold=True)
    run = finish(experiment(tmp_path / "run", algorithm, clients=10, max_updates=40))
    specs = [(row["client"], row["task"], str(row["spec"])) for row in run.events("assigned")]
    later = {client: {spec for one, task, spec in specs if one == client and task > 0} for client, _, _ in specs}
    assert all(len(mine) == 1 for mine in later.values())
    counts = Counter(next(iter(mine)) for mine in later.values())
    assert len(counts) == 3 and min(counts.values()) == 1
    assert len({spec for _, task, spec in specs if task == 0}) == 1
