"""A method is chosen by seconds of an update here and updates of near fleets; the choice is in config and journal."""

import json
import math
from dataclasses import replace

import pytest
import yaml

import raafl
from raafl.commands.auto import parse_run
from raafl.commands.cli import main
from raafl.config.parse import load_experiment, parse
from raafl.core.options import Privacy
from raafl.devices import Device
from raafl.errors import BadInput
from raafl.lab.plan.choose import (
    Candidate,
    Cell,
    Features,
    FleetSummary,
    Table,
    auto,
    choose,
    chosen,
    chosen_by,
    is_open,
)
from raafl.lab.plan.dry import World
from raafl.runtime.run import simulate
from tests.helpers.cached_models import reuse_findings
from tests.helpers.small_runs import digits, small_mlp

EQUAL = Features(slowest=0.0, fastest=0.0, link=0.0, fits=1.0, present=1.0, clients=1.0)
BUFFERED = Candidate("FedBuff", "fed_buff", {"buffer_size": 4}, num_clients=12)
ROUNDS = Candidate("FedAvg", "fed_avg", {}, num_clients=12)
SUBMODELS = Candidate("HeteroFL", "hetero_fl", {"submodel": {"seconds": "{task_s}"}}, num_clients=12)
TIMELY = Candidate("TimelyFL", "timely_fl", {"slack": 0}, num_clients=12)


def table(**updates):
    """What one fleet of the grid has shown."""
    candidates = [one for one in (BUFFERED, ROUNDS, SUBMODELS) if one.label in updates]
    held_out = {"median": 1.25, "worst": 2.0, "cells": 8}
    return Table(candidates, [Cell("equal", "mnist", EQUAL, updates)], held_out, {"pairs": 14, "same": 13})


@pytest.fixture(autouse=True)
def cached():
    with reuse_findings():
        yield


@pytest.fixture(scope="module")
def experiment():
    """Four clients, of which the slowest takes 3.6 times the median's seconds."""
    found = load_experiment("configs/quickstart.yaml", "--max_updates", "8", "--progress", "quiet")
    return replace(found, algorithm=auto())


# ---- a fleet in numbers ----


def test_a_fleet_is_described_by_its_tasks():
    """Of four clients with equal shares: speeds 8 : 4 : 4 : 1, no transfers, one of them there half of the time."""
    devices = [Device(name=f"d{i}", flops_per_s=speed * 1e8) for i, speed in enumerate((8, 4, 4, 1))]
    devices[0] = replace(devices[0], availability=((0.0, 1.0),), period_s=2.0)
    options = ["--partition", "raafl.data.Iid", "--train.num_steps", "7"]
    found = load_experiment("configs/quickstart.yaml", *options)
    fleet = FleetSummary.of(World(replace(found, devices=devices)))
    assert (fleet.num_clients, fleet.steps) == (4, 7)
    assert fleet.features == Features(2.0, 1.0, 0.0, 1.0, pytest.approx(0.875), math.log10(4))


def test_a_typical_task_of_two_kinds_of_devices_is_between_theirs():
    """Speeds 16, 16, 1, 1: 4 times as long as the fast ones', whose own time is the (lower) median. Submodels follow it."""
    devices = [Device(name=f"d{i}", flops_per_s=speed * 1e8) for i, speed in enumerate((16, 16, 1, 1))]
    options = ["--partition", "raafl.data.Iid", "--train.num_steps", "7"]
    found = load_experiment("configs/quickstart.yaml", *options)
    fleet = FleetSummary.of(World(replace(found, devices=devices)))
    assert fleet.typical_s == pytest.approx(4 * fleet.median_s)
    limit = SUBMODELS.for_fleet(fleet).settings["submodel"]["seconds"]
    assert limit == pytest.approx(1.2 * 4 * fleet.median_s, rel=1e-3)


def test_each_number_counts_by_its_own_scale():
    """A factor of 2 more, and 60 percent more transfers, at a scale of 30 percent: sqrt(1 + 4)."""
    assert EQUAL.distance(replace(EQUAL, slowest=1.0, link=0.6)) == pytest.approx(math.sqrt(5))


# ---- settings carried over ----


def fleet_of(num_clients, typical_s=2.0, steps=10):
    return FleetSummary(replace(EQUAL, clients=math.log10(num_clients)), num_clients, typical_s, typical_s, steps)


def test_a_buffer_grows_so_that_the_staleness_stays():
    """With 12 clients and K = 4 the mean staleness is 11 / 4; with 23 it is 22 / 8. No buffer is below 1."""
    assert BUFFERED.for_fleet(fleet_of(23)).settings == {"buffer_size": 8}
    assert BUFFERED.for_fleet(fleet_of(12)).settings == {"buffer_size": 4}
    assert BUFFERED.for_fleet(fleet_of(2)).settings == {"buffer_size": 1}


def test_without_a_buffer_as_many_work_at_once_as_in_the_grid():
    each = Candidate("FedAsync", "fed_async", {"alpha": 0.4}, num_clients=12)
    assert each.for_fleet(fleet_of(23)).settings == {"alpha": 0.4, "concurrency": 12}
    assert each.for_fleet(fleet_of(12)).settings == {"alpha": 0.4}
    assert ROUNDS.for_fleet(fleet_of(23)).settings == {}


def test_limits_of_steps_and_seconds_are_those_of_the_fleet():
    compass = Candidate("FedCompass", "fed_compass", {"min_steps": 5, "max_steps": 25}, 12, steps=10)
    assert compass.for_fleet(fleet_of(12, steps=20)).settings == {"min_steps": 10, "max_steps": 50}
    found = SUBMODELS.for_fleet(fleet_of(12, typical_s=2.0))
    assert (
        found.settings == {"submodel": {"seconds": 2.4, "measured": True, "relative": True}}
        and str(found) == "hetero_fl (submodels of 2.4 s)"
    )
    assert found.algorithm().select.seconds == 2.4


# ---- what the grid says ----


def test_near_fleets_count_more():
    """At distance 0 FedBuff needs twice the updates of the best, at distance 1 eight times: weights 1 and 1/e."""
    far = replace(EQUAL, slowest=1.0)
    cells = [
        Cell("near", "mnist", EQUAL, {"FedBuff": 200.0, "FedAvg": 100.0}),
        Cell("far", "mnist", far, {"FedBuff": 800.0, "FedAvg": 100.0}),
    ]
    found = Table([BUFFERED, ROUNDS], cells).updates(EQUAL)
    assert found["FedAvg"] == 1.0
    weight = math.exp(-1)
    assert found["FedBuff"] == pytest.approx(2.0 ** ((1 + 3 * weight) / (1 + weight)))
    assert Table([BUFFERED, ROUNDS], cells).nearest(far) == ["far", "near"]


def test_waiting_costs_an_unequal_fleet_more_than_stale_updates(experiment):
    """Four clients whose tasks take 3.6 to 0.85 of the median's seconds."""
    found = choose(experiment, table(FedBuff=100.0, FedAvg=100.0))
    # all of them, always
    assert found.candidate == replace(BUFFERED, settings={"buffer_size": 1, "clients_at_work": 4.0})
    assert list(found.scores) == ["FedBuff", "FedAvg"] and found.scores["FedBuff"] == 1.0 < found.scores["FedAvg"]
    worse = choose(experiment, table(FedBuff=1e4, FedAvg=100.0))
    assert worse.candidate == ROUNDS
    for line in found.reasons:
        assert line.startswith("auto: ")
    assert "1.25 x the best time, 2.00 x at worst" in found.reasons[1]
    assert found == choose(experiment, table(FedBuff=100.0, FedAvg=100.0))


def test_where_tasks_take_no_time_updates_alone_decide(experiment):
    instant = replace(experiment, devices=[Device(flops_per_s=math.inf)], max_updates=200)
    known = table(FedBuff=200.0, FedAvg=100.0)
    choice = choose(instant, known)
    assert choice.candidate.method == "fed_avg" and choice.scores == {"FedAvg": 1.0, "FedBuff": pytest.approx(2.0)}
    tried = choose(instant, known, share=0.1).trials  # a share of no time is a run each
    assert tried is not None and (tried.metric, tried.updates) == ("loss", 2 * 200)


def test_a_method_that_a_memory_does_not_fit_is_not_chosen(experiment):
    small = [Device(name="small", flops_per_s=1e8, memory_bytes=1.5e5)]
    found = choose(replace(experiment, devices=small), table(FedBuff=100.0, HeteroFL=1000.0))
    assert found.candidate.method == "hetero_fl" and found.features.fits == 0.0
    assert "memory_bytes is 1.5e+05" in found.problems["FedBuff"]
    with pytest.raises(
        BadInput, match="none of the methods to choose from can run here; FedBuff: client 1: memory_bytes"
    ):
        choose(replace(experiment, devices=small), table(FedBuff=100.0))


def test_the_user_may_say_among_which(experiment):
    known = table(FedBuff=100.0, FedAvg=1000.0)
    assert choose(replace(experiment, algorithm=auto(["fed_avg"])), known).candidate == ROUNDS
    with pytest.raises(
        BadInput, match=r"algorithm\.methods has 'fed_av', for which raafl has no measurements: did you"
    ):
        choose(replace(experiment, algorithm=auto(["fed_av"])), known)


def test_nobody_runs_what_is_not_chosen(experiment, tmp_path):
    with pytest.raises(BadInput, match="algorithm is auto, but no method has been chosen yet"):
        simulate(replace(experiment, output=str(tmp_path / "run")))
    assert is_open(experiment.algorithm)
    assert not is_open(chosen(experiment, choose(experiment, table(FedAvg=1.0))).algorithm)


# ---- a run ----


@pytest.fixture
def known(monkeypatch):
    """The table that every command reads."""
    found = table(FedBuff=100.0, FedAvg=100.0)
    monkeypatch.setattr(Table, "load", classmethod(lambda cls: found))
    return found


CONFIG = ["--config", "configs/quickstart.yaml", "--max_updates", "8", "--progress", "quiet", "--json"]


FED_BUFF = ["--algorithm", "fed_buff", "--algorithm.buffer_size", "1"]


def test_what_must_not_change_is_not_adjusted(experiment):
    """Noise is for merges of one size; slack has bounds of its own."""
    private = replace(experiment, privacy=Privacy(clip_norm=1.0))
    assert choose(private, table(FedBuff=100.0)).candidate.settings == {"buffer_size": 1}
    timely = Table([TIMELY], [Cell("equal", "mnist", EQUAL, {"TimelyFL": 100.0})])
    assert choose(experiment, timely).candidate.settings == {"slack": 0, "most_slack": 0.15}


def test_a_run_is_that_of_the_chosen_method_and_says_why(known, tmp_path, capsys):
    runs = {"auto": ["--algorithm", "auto"], "named": [*FED_BUFF, "--algorithm.clients_at_work", "4"]}
    digests = {}
    for name, options in runs.items():
        assert main(["simulate", *CONFIG, *options, "--output", str(tmp_path / name)]) == 0
        digests[name] = json.loads(capsys.readouterr().out)["model_digest"]
    assert digests["auto"] == digests["named"]
    configs = [yaml.safe_load((tmp_path / name / "config.yaml").read_text())["algorithm"] for name in runs]
    assert configs[0] == configs[1]
    first = json.loads((tmp_path / "auto" / "events.jsonl").read_text().splitlines()[0])
    assert first["chosen"]["method"] == "fed_buff" and len(first["chosen"]["reasons"]) == 3
    assert main(["replay", str(tmp_path / "auto"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["equal"] is True


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (b'{"event":"run",\xff}\n', "is damaged or was altered (ValueError: "),
        (b'["run"]\n', "is damaged or was altered (ValueError: "),
        (b'{"event":"run","chosen":{"method":"fed_buff"}}\n', "is damaged or was altered (KeyError: 'settings')"),
        (b'{"event":"run","chosen":{"method":"fed_best","settings":{}}}\n', "is damaged or was altered ("),
        (b'{"event":"run","chosen":{"method":"fed_buff","settings":{"size":1}}}\n', "is damaged or was altered ("),
        (b'{"event":"run","chosen":[1]}\n', "is damaged or was altered (TypeError: "),
        (None, "which has no events.jsonl: name the folder of a run"),
    ],
)
def test_a_damaged_journal_of_a_resumed_run_is_named(tmp_path, row, says):
    if row is not None:
        (tmp_path / "events.jsonl").write_bytes(row)
    with pytest.raises(BadInput) as error:
        chosen_by(tmp_path)
    assert str(error.value).startswith(f"resume is '{tmp_path}', ") and says in str(error.value)


def test_the_chosen_method_of_a_resumed_run_is_read_from_its_journal(tmp_path):
    (tmp_path / "events.jsonl").write_text(
        '{"event":"run","chosen":{"method":"fed_buff","settings":{"buffer_size":3}}}\n'
    )
    assert chosen_by(tmp_path).trigger.size == 3
    (tmp_path / "events.jsonl").write_text('{"event":"run"}\n')
    assert chosen_by(tmp_path) is None


def test_server_and_client_choose_alike(known, tmp_path):
    file = tmp_path / "auto.yaml"
    file.write_text("algorithm: {class_path: raafl.auto, init_args: {methods: [fed_buff]}}\n")
    argv = ["--config", "configs/quickstart.yaml", "--config", str(file)]
    texts = [yaml.safe_load(parse_run(name, argv).config_yaml)["algorithm"] for name in ("serve", "join")]
    assert texts[0] == texts[1] and texts[0]["class_path"] == "raafl.fed_buff"
    assert parse("serve", argv).experiment.algorithm.select.methods == ("fed_buff",)


def test_a_plan_says_what_would_be_chosen(known, capsys):
    argv = [
        "plan",
        "--config",
        "configs/quickstart.yaml",
        "--max_updates",
        "8",
        "--algorithm",
        "auto",
        "--algorithms",
        "",
    ]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chosen"]["method"] == "fed_buff" and found["algorithms"][0]["name"] == "fed_buff (as configured)"
    assert main(argv) == 0
    assert "auto: fed_buff (buffer_size 1, clients_at_work 4.0), an update every" in capsys.readouterr().out


def test_the_candidates_can_be_listed(known, capsys):
    assert main(["algorithms", "auto"]) == 0
    said = capsys.readouterr().out
    assert "candidate: FedBuff: fed_buff (buffer_size 4)" in said and "1.25 x the best time (median of 8 cells)" in said
    assert "learning rate, local steps: as configured; in the grid's search 13 of 14 methods and tasks" in said
    assert main(["algorithms", "auto", "--json"]) == 0
    assert [one["method"] for one in json.loads(capsys.readouterr().out)["candidates"]] == ["fed_buff", "fed_avg"]


def test_a_federation_chooses_too(known, tmp_path):
    devices = [{"name": "fast", "flops_per_s": 1e8}, {"name": "slow", "flops_per_s": 2e7}]
    limits = {"max_updates": 4, "num_steps": 1, "progress": "quiet", "output": str(tmp_path / "run")}
    federation = raafl.Federation("auto", devices=devices, **limits)
    assert is_open(federation.algorithm)
    result = federation.simulate(small_mlp(), digits())
    first = json.loads((result.folder / "events.jsonl").read_text().splitlines()[0])
    assert result.summary["algorithm"] == first["chosen"]["method"] == "fed_buff"
