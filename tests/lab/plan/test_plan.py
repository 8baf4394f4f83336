"""A plan says what the runs then take: hand counts for the table and the advice, real simulated runs for the predictions."""

import json
import math
import random
import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from lightning import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from model_zoo import MLP
from raafl.algorithms import ALGORITHMS, fed_avg, fed_raa, hetero_fl
from raafl.algorithms.q_vit import Quantised
from raafl.commands.cli import main
from raafl.config.parse import load_experiment
from raafl.core.algorithm import Local, SelectContext, Training
from raafl.core.state import GlobalState
from raafl.core.types import ClientInfo, Warn
from raafl.devices import Profile, measure
from raafl.devices.files import load_devices
from raafl.devices.measure import Answerer
from raafl.errors import BadInput
from raafl.lab.plan import dry, show
from raafl.lab.plan import plan as planning
from raafl.lab.plan.dry import World, predict
from raafl.local.train import FabricOptions
from raafl.runtime.run import simulate
from raafl.submodel import Submodels
from raafl.submodel.spec import AxisTable
from tests.helpers import small_runs
from tests.helpers.cached_models import reuse_findings
from tests.helpers.coordinators import line_state

SMALL = ["--config", "configs/quickstart.yaml", "--progress", "quiet"]


@pytest.fixture(scope="module")
def world():
    return World(load_experiment("configs/quickstart.yaml", "--max_updates", "24"))


def fleet_of(*profiles, hidden=4, samples=6):
    clients = {i: ClientInfo(i, samples, profile) for i, profile in enumerate(profiles, start=1)}
    return SelectContext(line_state(hidden), clients, random.Random(0), Training(), 2), list(clients.values())


def test_a_plan_names_devices_that_vary(world):
    plain, varying = Profile(name="steady"), Profile(name="phone", speed_jitter=0.1)
    rows = planning.device_rows(*fleet_of(plain, varying), planning.submodel_rows(fleet_of(plain)[0]))
    assert [row.varies for row in rows] == ["", "speed: jitter 0.1"]
    plan = replace(planning.make_plan(world.experiment, ["fed_avg"], 8), devices=rows)
    assert "Times are at the rates that profiles state; phone varies: speed: jitter 0.1." in show.text(
        plan, 100, terminal=False
    )


class Rows(LightningModule):
    """A table of words, and a head on the mean of a text's words."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(50, 8), nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        texts, labels = batch
        return nn.functional.cross_entropy(self.head(self.words(texts).mean(dim=1)), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Words(LightningDataModule):
    """Forty texts of five words."""

    def train_dataloader(self):
        words = torch.randint(0, 50, (40, 5), generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(words, words[:, 0] % 2), batch_size=4)


# ---- what a run then takes ----


def test_a_task_without_products_takes_the_time_of_its_arithmetic(capsys):
    """The client's part of SplitFed is the table: rows are looked up in it, and added to where the gradient comes back."""
    argv = ["--model", f"{__name__}.Rows", "--data", f"{__name__}.Words", "--algorithm", "fed_avg", "--clients", "2"]
    argv += ["--devices", "null", "--max_updates", "4", "--algorithms", "split_fed"]
    assert main(["plan", "--config", "configs/quickstart.yaml", *argv, "--json"]) == 0
    own, split = json.loads(capsys.readouterr().out)["algorithms"]
    assert 0 < split["time_s"] < own["time_s"] and split["note"] is None


def test_a_plan_works_out_no_places_of_values(world, monkeypatch):
    """Which elements of a tensor a submodel has takes a list of them: layouts and costs need only how many."""
    algorithms = fed_avg(), ALGORITHMS["fed_rolex"](), ALGORITHMS["ist"]()
    for algorithm in algorithms:
        world.submodels(algorithm)  # whose proof needs places
    monkeypatch.setattr(AxisTable, "selections", refuse_scattered(AxisTable.selections))
    for algorithm in algorithms:
        assert predict(world, algorithm, max_updates=8).problem is None


def refuse_scattered(selections):
    """Fail where places are asked for that are no single run."""

    def checked(table, spec):
        assert spec == spec.leading
        return selections(table, spec)

    return checked


def test_of_a_large_model_other_algorithms_are_predicted_when_asked_for(world, monkeypatch):
    monkeypatch.setattr(planning, "_others", lambda world, name, advice, most: [dry.Prediction(name)])
    monkeypatch.setattr(planning, "MOST_VALUES", 15_000)
    monkeypatch.setattr(show, "MOST_VALUES", 15_000)
    few = planning.make_plan(world.experiment, None, 8)
    assert len(few.algorithms) == 1 and "--algorithms all" in show.text(few, 100, terminal=False)
    every = planning.make_plan(world.experiment, ["all"], 8)
    assert [one.name for one in every.algorithms[1:]] == list(ALGORITHMS)
    assert "--algorithms all" not in show.text(every, 100, terminal=False)
    monkeypatch.setattr(planning, "MOST_VALUES", 15_010)
    assert len(planning.make_plan(world.experiment, None, 8).algorithms) == 1 + len(ALGORITHMS)


@pytest.mark.quick_cases(3, 5, 6, 8, 9)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fed_raa", []),
        ("fed_avg", []),
        ("fed_buff", ["--algorithm.buffer_size", "3"]),
        ("timely_fl", ["--algorithm.participation", "0.75"]),
        ("timely_fl", ["--partition.test_share", "0.3"]),
        ("fed_raa", ["--partition.test_share", "0.3"]),
        ("hetero_fl", []),
        ("fed_async", ["--algorithm.concurrency", "2"]),
        ("fed_compass", ["--algorithm.min_steps", "5", "--algorithm.max_steps", "25"]),
        ("fed_buff", ["--algorithm.buffer_size", "3", "--overlap", "true"]),
    ],
)
def test_a_prediction_is_what_the_simulated_run_takes(name, options, tmp_path):
    """The simulated run trains; the plan goes by the same clock, the same choices and the same seed."""
    chosen = ["--algorithm", name, *options, "--max_updates", "24", "--train.num_epochs", "1"]
    agrees("configs/quickstart.yaml", *chosen, "--output", str(tmp_path / "run"))


@pytest.mark.long("tests/conformance/test_bases.py::test_each_client_has_what_its_memory_allows_and_the_plan_says_so")
def test_a_frozen_base_travels_in_no_plan(tmp_path):
    """As in a run: adapters alone go down and up, and a client holds the base besides."""
    small = ["--max_updates", "8", "--train.num_steps", "1", "--data.num_test", "8", "--output", str(tmp_path / "run")]
    experiment = agrees("configs/llm-lora.yaml", *small)
    world = World(experiment)
    submodels = world.submodels(experiment.algorithm)
    whole, *smaller = planning.submodel_rows(world.fleet(experiment.algorithm))
    adapters = sum(size for name, size in submodels.parameters.items() if ".lora_" in name)
    assert whole.params > 2 * adapters
    assert whole.down_bytes == whole.up_bytes == 4 * adapters
    assert all(row.down_bytes <= whole.down_bytes and row.peak_bytes > 4 * whole.params for row in smaller)


def agrees(config, *options):
    """Hold a prediction against the run; return the experiment."""
    experiment = load_experiment(config, *options, "--progress", "quiet")
    with reuse_findings():
        found = predict(World(experiment), experiment.algorithm)
        summary, _ = simulate(experiment)
    assert found.problem is None
    assert (found.updates, found.versions) == (summary["updates_merged"], summary["versions"])
    assert found.time_s == pytest.approx(summary["time_s"], rel=1e-9)
    assert found.utilisation == pytest.approx(summary["utilisation"])
    assert found.staleness == pytest.approx(summary["staleness"]["mean"])
    moved = summary["bytes_up"] + summary["bytes_down"]
    assert found.bytes_per_update == pytest.approx(moved / summary["updates_merged"])
    return experiment


def test_a_round_of_fed_avg_takes_what_its_slowest_client_takes(world):
    """By hand: an MLP of 64-200-10 has 15010 parameters; two epochs on the client's share, and both ways over its link."""
    found = predict(world, fed_avg())
    slowest = max(
        4 * 15010 / client.profile.down_bytes_per_s
        + 4 * 15010 / client.profile.up_bytes_per_s
        + 2 * client.num_samples * 63200 / client.profile.flops_per_s
        for client in world.clients
    )
    assert found.version_s == pytest.approx(slowest) and found.update_s == pytest.approx(slowest / 4)
    assert (found.updates, found.versions, found.least, found.most) == (24, 6, 6, 6)
    assert found.run_s == pytest.approx(6 * slowest)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_is_predicted_or_says_why_not(name, world, monkeypatch):
    found = predict(world, ALGORITHMS[name](), max_updates=8)
    assert found.problem or (found.version_s > 0 and 0 < found.utilisation <= 1 and found.updates >= 8)
    assert "need trained updates" not in (found.problem or "")
    monkeypatch.setattr(dry, "MOST_VALUES", 0)
    without_values = predict(world, ALGORITHMS[name](), max_updates=8)
    if name in ("fed_pm", "oap"):  # their masks follow from values
        assert "need trained updates" in (without_values.problem or "")
    else:
        assert without_values == found


class Prickly(nn.Module):
    """A module that gives no answer to ==, as a metric of torchmetrics gives one that is always true."""

    __hash__ = nn.Module.__hash__

    def __eq__(self, other):
        raise AssertionError(f"a module was compared by value with a {type(other).__name__}")


class WithPrickly(MLP):
    """A perceptron that owns such modules, before and after its layers."""

    def __init__(self):
        super().__init__(64, (24,), 10, lr=0.1)
        self.metrics = nn.ModuleList([Prickly(), Prickly()])


@pytest.mark.quick_cases("fed_raa", "q_vit", "split_fed")
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_modules_are_told_apart_by_identity(name, tmp_path):
    """For each method, in its plan and in a run."""
    made = small_runs.experiment(tmp_path / "run", name, model=WithPrickly, max_updates=4)
    found = predict(World(made), made.algorithm, max_updates=4)
    assert found.problem is None and found.updates >= 4
    assert small_runs.finish(made).summary["updates_merged"] >= 4


def test_a_method_that_cannot_be_planned_is_a_line_of_the_table(world, monkeypatch):
    def fails(self, module):
        raise AttributeError("no weight")

    monkeypatch.setattr(Quantised, "prepare", fails)
    plan = planning.make_plan(world.experiment, ["q_vit", "fed_avg"], 8)
    own, failed, other = plan.algorithms
    assert failed.problem.startswith("it cannot be planned (AttributeError: no weight")
    assert own.problem is other.problem is None
    (line,) = [line for line in show.text(plan, 100, terminal=False).splitlines() if line.startswith("q_vit")]
    assert "cannot be planned" in line


def test_updates_that_come_too_late_to_learn_from_are_said_at_the_start_and_in_the_plan(world, monkeypatch):
    """Nineteen merges late on average, 0.9 of each: 17.1 / 18.1 of the work is taken back."""
    fleet, late = world.fleet(fed_raa()), fed_raa(staleness="constant")
    (said,) = [note for note in late.notes(fleet, 20) if "taken back" in note]
    assert (
        isinstance(said, Warn) and said.startswith("will hardly learn: updates come 19 merges late") and "94%" in said
    )
    for good in (fed_raa(), fed_raa(staleness="constant", concurrency=8), fed_raa(staleness="constant", trigger="all")):
        assert not any("taken back" in note for note in good.notes(fleet, 20))

    assert predict(world, late).note is None  # four clients
    monkeypatch.setattr("raafl.parts.merge.mean.MOST_UNDONE", 2.0)
    plan = planning.make_plan(replace(world.experiment, algorithm=late), [], 24)
    assert "fed_raa (as configured) will hardly learn: updates come 2." in show.text(plan, 100, terminal=False)


def test_clients_without_the_memory_are_the_reason_why_not(world):
    poor = [replace(c, profile=replace(c.profile, memory_bytes=1e5)) for c in world.clients]
    small = World.__new__(World)
    small.__dict__.update(world.__dict__, clients=poor)
    assert "memory_bytes is 1e+05" in (predict(small, fed_avg()).problem or "")
    assert predict(small, fed_raa(fragments=3)).problem is None
    with pytest.raises(BadInput, match="algorithms has 'fed_avgg'"):
        planning.make_plan(world.experiment, ["fed_avgg"])


# ---- who is slow, and what to choose ----


def test_stragglers_and_choices_follow_from_the_times():
    """Whole-model times go as 1/speed: 1, 1, 1.25, 2.5 and 10 of the median 1.25; more than twice that is 10 alone."""
    fleet, clients = fleet_of(*(Profile(flops_per_s=speed) for speed in (100.0, 100.0, 80.0, 40.0, 10.0)))
    unit = fleet.cost_s(clients[2], planning.Work())
    advice = planning.advise(fleet, clients)
    assert advice.stragglers == [5] and advice.median_s == unit
    assert (advice.buffer_size, advice.participation) == (4, 0.8)
    assert advice.deadline_s == pytest.approx(2 * unit) and advice.slowest_s == pytest.approx(8 * unit)


def test_fragments_are_the_fewest_with_which_the_slowest_keeps_up():
    """With 100 units the smallest of M fragments has 100, 40, 20, 10, 5 of them (Table 4), and nearly that share of the time."""
    for ratio, fragments in ((1.0, 1), (2.0, 2), (4.0, 3), (8.0, 4), (15.0, 5), (60.0, 5)):
        speeds = (100.0, 100.0, 100.0, 100.0 / ratio)
        fleet, clients = fleet_of(*(Profile(flops_per_s=s) for s in speeds), hidden=100)
        assert planning.advise(fleet, clients).fragments == fragments, ratio


class Stacked(MLP):
    """Two equal blocks, either of which may be absent, between the first and the last layer."""

    def __init__(self):
        super().__init__(8, (6,), 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8)) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return super().forward(x)

    def submodel_blocks(self):
        return {"depth": "blocks"}


def test_a_rate_of_the_table_is_a_share_of_the_width_as_methods_take_it_and_keeps_all_blocks():
    module, batch = Stacked(), (torch.zeros(2, 8), torch.zeros(2, dtype=torch.long))
    submodels = Submodels(module, batch)
    assert submodels.stacks and len(submodels.axes) == 3
    clients = {1: ClientInfo(1, 6, Profile())}
    state = GlobalState(submodels, submodels.state(module))
    fleet = SelectContext(state, clients, random.Random(0), Training(), 2)
    half = planning.submodel_rows(fleet)[1]
    assert half.name == "1/2" and half.spec == hetero_fl(rates=0.5).select(clients[1], fleet).spec
    # each of the two blocks keeps 2 of 4 units (2 * 8 + 2 + 8 * 2 + 8), the MLP 3 of 6 (3 * 8 + 3 + 3 * 3 + 3)
    assert half.params == 2 * 42 + 39


def test_a_client_that_cannot_hold_the_model_is_a_straggler_and_gets_no_time_for_it():
    fleet, clients = fleet_of(Profile("big"), Profile("small"))
    need = fleet.cost(planning.FULL).peak_bytes
    fleet, clients = fleet_of(Profile("big"), Profile("small", memory_bytes=need - 1))
    rows = planning.submodel_rows(fleet)
    assert [row.name for row in rows] == ["1", "1/2", "1/4"]  # of 4 units 2 and 1; 1/8 and 1/16 keep one, too
    big, small = planning.device_rows(fleet, clients, rows)
    assert big.stragglers == [] and small.stragglers == [2]
    assert small.seconds[0] is None and small.seconds[1:] == big.seconds[1:]


def test_a_model_without_axes_has_no_fragments():
    from torch import nn

    from raafl.core.state import GlobalState
    from raafl.submodel import Submodels

    fleet, clients = fleet_of(Profile())
    module = nn.Linear(3, 2)
    submodels = Submodels(module)
    bare = replace(fleet, state=GlobalState(submodels, submodels.state(module)), cache={})
    assert [row.name for row in planning.submodel_rows(bare)] == ["1"]
    assert planning.advise(bare, clients).fragments is None


# ---- the command ----


def test_methods_that_prepare_the_model_and_print_alike_have_submodels_of_their_own():
    @dataclass(frozen=True)
    class Widened(Local):
        """Adds a layer as wide as an array's sum, of which its text does not show the middle."""

        widths: object = None

        def prepare(self, module):
            module.more = nn.Linear(1, int(self.widths.sum()))
            return module

    usual, two = load_experiment(*SMALL[1:]), np.zeros(2000)
    two[1000] = 2.0
    methods = [replace(usual.algorithm, local=Widened(widths=widths)) for widths in (two, 2 * two, two.copy())]
    assert len({repr(one.local) for one in methods}) == 1
    world = World(usual)
    found = [world.submodels(method) for method in methods]
    assert [one.parameters["more.weight"] for one in found] == [2, 4, 2]
    assert found[0] is found[2]


def test_why_clients_are_trained_one_after_the_other():
    usual = load_experiment(*SMALL[1:])
    submodels = World(usual).submodels(usual.algorithm)
    reasons = {
        "the algorithm has steps of its own": replace(usual, algorithm=ALGORITHMS["scaffold"]()),
        "fabric.accumulate_grad_batches is 2": replace(usual, fabric=FabricOptions(accumulate_grad_batches=2)),
        None: replace(usual, workers=2),
    }
    assert [planning._by_the_loop(one, submodels) for one in reasons.values()] == list(reasons)
    submodels.module.configure_optimizers = lambda: torch.optim.Rprop(submodels.module.parameters())
    assert planning._by_the_loop(usual, submodels) == "its optimizer is Rprop"


def test_whether_steps_can_be_captured_on_a_gpu():
    usual = load_experiment(*SMALL[1:])
    submodels = World(usual).submodels(usual.algorithm)
    reasons = {
        "the algorithm has steps of its own": replace(usual, algorithm=ALGORITHMS["fed_mezo"]()),
        "fabric.accumulate_grad_batches is 2": replace(usual, fabric=FabricOptions(accumulate_grad_batches=2)),
        "fabric.capture is off": replace(usual, fabric=FabricOptions(capture=False)),
    }
    assert [planning._not_captured(one, submodels) for one in reasons.values()] == [[reason] for reason in reasons]
    assert planning._not_captured(usual, submodels) == []


def test_why_steps_of_batches_of_clients_are_eager_on_a_gpu():
    usual, shown = load_experiment(*SMALL[1:]), []
    for dropout in (0.1, 0.0):
        one = replace(usual, model=lambda dropout=dropout: MLP(64, (8,), 10, dropout=dropout), algorithm=fed_avg())
        shown.append(show.text(planning.make_plan(one, (), 8, on_gpu=True), 200, terminal=False))
    reason = "Steps of batches of clients are eager on a GPU: clients draw random numbers of their own, in 'layers.3'."
    assert [reason in text for text in shown] == [True, False]


def test_steps_on_a_gpu_by_submodel_are_in_the_plan(capsys):
    assert main(["plan", *SMALL, "--max_updates", "8", "--algorithms", "", "--device", "cuda", "--json"]) == 0
    gpu = json.loads(capsys.readouterr().out)["gpu"]
    assert (gpu["device"], [row["name"] for row in gpu["rows"]][:2]) == ("h200", ["1", "1/2"])
    for row in gpu["rows"]:
        assert row["eager_s"] == max(row["host_s"], row["device_s"]) > row["captured_s"] >= 40 * 1.5e-5
    assert gpu["pool_bytes"] == gpu["rows"][0]["pool_bytes"] > gpu["rows"][1]["pool_bytes"] > 0
    assert main(["plan", *SMALL, "--max_updates", "8", "--algorithms", "", "--device", "cuda"]) == 0
    shown = capsys.readouterr().out
    assert "Milliseconds of a training step on h200" in shown and "Graphs of all these submodels: " in shown


def test_json_alone_on_standard_output(capsys):
    assert main(["plan", *SMALL, "--max_updates", "8", "--algorithms", "fed_avg", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["name"], plan["num_clients"], plan["params"]) == ("quickstart", 4, 15010)
    assert [one["name"] for one in plan["algorithms"]] == ["fed_raa (as configured)", "fed_avg"]
    assert plan["submodels"][0] == {
        "name": "1",
        "params": 15010,
        "peak_bytes": 274216,
        "down_bytes": 60040,
        "up_bytes": 60040,
        "flops_per_sample": 63200.0,
        "spec": "full",
    }
    assert [row["name"] for row in plan["devices"]] == ["fast", "middling", "slow", "slowest"]
    assert plan["by_the_loop"] is None
    assert plan["devices"][0]["memory_bytes"] is None and plan["advice"]["stragglers"] == [4]


def test_plain_text_in_a_pipe_and_colour_on_a_terminal(world):
    plan = planning.make_plan(world.experiment, [], 8)
    plain, coloured = (show.text(plan, 140, terminal=terminal) for terminal in (False, True))
    assert "\x1b" not in plain and "\x1b" in coloured
    for words in ("15,010", "straggler", "fragments: 3", "buffer_size: 3", "fed_raa (as configured)"):
        assert words in plain and words in coloured


def test_bad_options_name_the_remedy(capsys, tmp_path):
    for argv, said in (
        ([], "`raafl plan` needs a config"),
        ([*SMALL, "--updates", "0"], "updates is 0"),
        ([*SMALL, "--algorithms", "fedavg"], "algorithms has 'fedavg': did you mean 'fed_avg'"),
        (["--address", "h:1", *SMALL], "--address needs --measure"),
        (["--measure", "x.txt"], "measure is 'x.txt'"),
        (["--measure", str(tmp_path / "x.yaml"), "--device", "cuda:99x"], "device is 'cuda:99x'"),
        ([*SMALL, "--device", "gpu"], "device is 'gpu': give cpu or cuda"),
        ([*SMALL, "--max_updatess", "3"], "unknown option --max_updatess"),
    ):
        assert main(["plan", *argv]) == 2
        assert said in capsys.readouterr().err


def test_help_and_the_profiles_that_a_config_may_name(capsys):
    assert main(["plan", "--help"]) == 0
    assert "--measure" in capsys.readouterr().out
    assert main(["plan", "--profiles"]) == 0
    shown = capsys.readouterr().out
    assert "jetson-nano" in shown and "PKU-Chengxu/FLASH" in shown and "fleet:phones: " in shown and "\x1b" not in shown
    assert main(["plan", "--profiles", "--json"]) == 0
    assert {"device", "field", "value", "source"} == set(json.loads(capsys.readouterr().out)[0])


def test_a_file_that_cannot_be_written_is_named_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measure, "measure_machine", lambda *_, **__: pytest.fail("it measures"))
    (tmp_path / "folder.yaml").mkdir()
    for name, why in (("no/x.yaml", "No such file"), ("folder.yaml", "Is a direc"), ("x" * 250 + ".yaml", "File name")):
        assert main(["plan", "--measure", str(tmp_path / name)]) == 2
        assert f"{name}', which cannot be written ({why}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["folder.yaml"]


def test_a_measured_profile_is_json_without_infinity(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measure, "measure_machine", lambda name, device, address: Profile(name))
    assert main(["plan", "--measure", str(tmp_path / "here.yaml"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (found["name"], found["flops_per_s"], found["down_bytes_per_s"]) == ("here", 1e9, None)  # null: no limit


def test_this_machine_is_measured_into_a_file_that_devices_reads(tmp_path, capsys, monkeypatch):
    quick = measure.measure_speeds
    monkeypatch.setattr(measure, "measure_speeds", lambda device, duration_s: quick(device, 0.02))
    answerer = Answerer("127.0.0.1:0", deadline_s=20.0)
    thread = threading.Thread(target=answerer.serve, kwargs={"num_peers": 1}, daemon=True)
    thread.start()
    file = tmp_path / "here.yaml"
    assert main(["plan", "--measure", str(file), "--address", f"127.0.0.1:{answerer.port}"]) == 0
    thread.join(20)
    answerer.close()
    assert str(file) in capsys.readouterr().out
    (here,) = load_devices(file)
    assert here.name == "here" and 0 < here.flops_per_s < math.inf and 0 < (here.bytes_per_s or 0) < math.inf
    assert 0 <= here.launch_s < 0.1
    assert 1e5 < here.down_bytes_per_s < math.inf and 1e5 < here.up_bytes_per_s < math.inf and here.memory_bytes > 1e6
    options = ["--devices", str(file), "--max_updates", "4", "--algorithms", "", "--json"]
    assert main(["plan", *SMALL, *options]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["clients"]) for row in plan["devices"]] == [("here", [1, 2, 3, 4])]
