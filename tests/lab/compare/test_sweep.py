"""A sweep is a comparison of one row with a search; W&B's file has the same fields, and its agents start the same runs."""

from __future__ import annotations

import json
import math
import multiprocessing as mp
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import yaml

import raafl
from raafl.commands.cli import main
from raafl.config.argv import with_paths
from raafl.config.parse import parse
from raafl.errors import BadInput
from raafl.lab.compare import search as searches
from raafl.lab.compare.compared import read_sweep
from raafl.lab.compare.comparison import Comparison, Range, Search, of_fields
from raafl.lab.compare.search import run_studies
from tests.habits.source import ROOT
from tests.helpers.refusals import refuses

FIELDS = {"model.lr": {"low": 0.001, "high": 1.0, "log": True}, "train.num_epochs": [1, 2]}
SPEC = {"config": "quickstart", "options": "--max_updates 8 --clients 2", "fields": FIELDS, "trials": 2}


def test_a_sweep_is_a_comparison_of_one_row():
    found = read_sweep({**SPEC, "name": "rates", "pruner": "median", "storage": "sqlite:///s.db"}).comparison()
    grid = {"--model.lr": FIELDS["model.lr"], "--train.num_epochs": [1, 2]}
    search = Search(grid, (1000,), trials=2, sampler="tpe", pruner="median", storage="sqlite:///s.db")
    options = ("--max_updates", "8", "--clients", "2")
    assert found == Comparison("rates", "quickstart", {"rates": ()}, (0,), options, search)


def test_a_target_makes_trials_end_at_it_and_a_loss_is_made_small():
    found = read_sweep({**SPEC, "target": 0.9}).comparison()
    assert found.search.options == ("--target", "accuracy=0.9") and found.targets == (0.9,)
    assert read_sweep({**SPEC, "metric": "loss"}).comparison().maximize is False
    assert read_sweep({**SPEC, "metric": "gap", "maximize": False, "target": 2}).wandb()["metric"] == {
        "name": "time_to/gap<=2",
        "goal": "minimize",
    }


test_sweeps_are_checked = refuses(
    lambda **changes: read_sweep({**SPEC, **changes}).comparison(),
    ({"fields": {}}, "fields is empty"),
    ({"fields": {"model.lr": 0.1}}, "search of row 'sweep' has --model.lr: 0.1: give each option a list"),
    ({"fields": {"model.lr": {"low": 2, "high": 1}}}, "fields.model.lr.low is 2, high 1"),
    ({"sampler": "bayes"}, "sampler is 'bayes'"),
    ({"trials": None}, "trials is missing"),
    ({"sampler": "grid", "pruner": "median"}, "pruner is 'median', but there is no sampler"),
    ({"target": 0.9, "pruner": "median"}, "target is 0.9, and trials that end early have not reached it"),
    ({"trial_seeds": [0]}, "trial_seeds has 0, which is also a seed of the comparison"),
    ({"rows": {"A": ""}}, "rows is unknown"),
    ({"config": None}, "config is missing"),
    error=BadInput,
)


def test_a_value_that_no_run_can_have_is_refused_before_any_run(tmp_path):
    pytest.importorskip("optuna")
    spec = {**SPEC, "fields": {"train.num_epochs": [1, 2, -3]}}
    with pytest.raises(BadInput, match="num_epochs is -3"):
        raafl.sweep(spec, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_file_of_a_wandb_sweep_has_the_same_fields_and_its_command_is_parsed(tmp_path, capsys):
    """W&B's own code fills the command, as its agent does."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    more = {"algorithm.fragments": {"low": 2, "high": 4}, "train.num_steps": {"low": 1, "high": 64, "log": True}}
    path = tmp_path / "rates.yaml"
    path.write_text(yaml.safe_dump({**SPEC, "fields": FIELDS | more, "target": 0.9}))
    assert main(["sweep", str(path), "--wandb"]) == 0
    found = yaml.safe_load(capsys.readouterr().out)
    assert found["parameters"] == {
        "model.lr": {"distribution": "log_uniform_values", "min": 0.001, "max": 1.0},
        "train.num_epochs": {"values": [1, 2]},
        "algorithm.fragments": {"distribution": "int_uniform", "min": 2, "max": 4},
        "train.num_steps": {"distribution": "q_log_uniform_values", "q": 1, "min": 1, "max": 64},
    }
    assert (found["method"], found["run_cap"]) == ("bayes", 2)
    assert found["metric"] == {"name": "time_to/accuracy=0.9", "goal": "minimize"}
    chosen = {"model.lr": {"value": 0.02}, "algorithm.fragments": {"value": 3}}
    filled = {"${args}": utils.create_sweep_command_args({"args": chosen})["args"], "${env}": [], "${interpreter}": []}
    words = [word for item in utils.create_sweep_command(found["command"]) for word in filled.get(item, [item])]
    assert words[:3] == ["-m", "raafl", "simulate"]
    experiment = parse("simulate", with_paths(words[3:])).experiment
    assert (experiment.seed, experiment.max_updates, experiment.partition.validation_share) == (1000, 8, 0.1)
    assert len(experiment.algorithm.select.ratios) == 3


AGENT = """
import os, queue, sys, yaml
import wandb
from wandb import wandb_agent
from wandb.apis.public import sweeps

config, sent = sys.argv[1], []
chosen = [{"model.lr": {"value": 0.02}, "train.num_epochs": {"value": 2}}, {"model.lr": {"value": 0.1}}]

def heartbeat(api, agent, metrics, running):
    if running:
        return []
    if len(sent) == len(chosen):
        return [{"type": "exit"}]
    sent.append({"type": "run", "run_id": f"chosen{len(sent)}", "program": "raafl", "args": chosen[len(sent)]})
    return sent[-1:]

sweeps._sweep_with_runs = lambda api, sweep_id, filters: {"config": open(config).read()}
sweeps._register_agent = lambda api, host, sweep_id: {"id": "agent"}
sweeps._agent_heartbeat = heartbeat
wandb.Api = lambda: None
agent = wandb_agent.Agent(None, queue.Queue(), "sweep")
agent.POLL_INTERVAL = 0.2
agent.run()
assert agent._failed == 0 and not [response for _, response in agent._log if response.get("exception")]
"""


@pytest.mark.long("test_the_file_of_a_wandb_sweep_has_the_same_fields_and_its_command_is_parsed")
@pytest.mark.slow("wandb's agent starts two runs")
@pytest.mark.timeout(300)
def test_an_agent_of_wandb_starts_the_runs(tmp_path, capsys):
    """The agent is W&B's; the answers of its server are made here, and runs log offline."""
    pytest.importorskip("wandb")
    path = tmp_path / "rates.yaml"
    path.write_text(yaml.safe_dump({**SPEC, "options": "--max_updates 4 --clients 2"}))
    assert main(["sweep", str(path), "--wandb"]) == 0
    (tmp_path / "wandb.yaml").write_text(capsys.readouterr().out)
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    env |= {"WANDB_MODE": "offline", "WANDB_SWEEP_ID": "sweep", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{os.path.dirname(sys.executable)}:{env['PATH']}"
    argv = [sys.executable, "-c", AGENT, "wandb.yaml"]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    summaries = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("runs/*/summary.json"))]
    assert [summary["updates_merged"] for summary in summaries] == [4, 4]
    ids = {file.name.rpartition("-")[2] for file in tmp_path.glob("runs/*/loggers/wandb/offline-run-*")}
    assert ids == {"chosen0", "chosen1"}


def test_numbers_with_an_exponent_are_numbers():
    """YAML 1.1 reads 1e-4 and 1.5e3 as text."""
    text = "{config: quickstart, trials: 2, target: 9e-1, fields: {model.lr: {low: 1e-4, high: 1.5e3, log: true}, x: [1e-3]}}"
    found = read_sweep(yaml.safe_load(text))
    assert found.target == 0.9 and found.comparison().search.grid["--x"] == ["1e-3"]
    assert Range.of("--model.lr", found.fields["model.lr"]) == Range(1e-4, 1500.0, log=True)
    compared = of_fields(
        yaml.safe_load("{config: quickstart, rows: {1e-3: ''}, seeds: [0], targets: [9e-1, .95e0]}"), "n", "n"
    )
    assert (compared.targets, list(compared.rows)) == ((0.9, 0.95), ["1e-3"])


class Runs:
    """Stands for the runner: writes down each run; in the middle of a trial the process is killed by -9."""

    def __init__(self, file, killed_after=math.inf):
        self.file, self.killed_after = file, killed_after

    def run_all(self, runs, metric):
        if len(self.file.read_text().splitlines()) >= self.killed_after:
            os.kill(os.getpid(), signal.SIGKILL)
        with self.file.open("a") as file:
            file.writelines(f"{' '.join(run.options)}\n" for run in runs)
        return [SimpleNamespace(run=run, summary={}, folder="", by_itself=True, error=None) for run in runs]


def distance(trial, outcomes, comparison, search):
    rate = float(trial.settings[1])
    return {run.seed: -abs(math.log10(rate) + 1) for run in trial.runs}


def study_in(folder, storage, killed_after=math.inf):
    folder.mkdir(exist_ok=True)
    (folder / "runs.txt").touch()
    comparison = read_sweep({**SPEC, "trials": 6, "pruner": "halving", "storage": storage, "name": "s"}).comparison()
    runs = Runs(folder / "runs.txt", killed_after)
    trials, best = run_studies(comparison, comparison.search, runs, folder, 1)
    made = [(trial.settings, trial.scores, trial.fraction) for trial in trials["s"]]
    return made, best["s"].settings, (folder / "runs.txt").read_text().splitlines()


@pytest.mark.parametrize("kind", ["journal", "sqlite"])
def test_a_study_that_was_killed_by_9_goes_on_to_the_same_trials(tmp_path, monkeypatch, kind):
    pytest.importorskip("optuna")
    pytest.importorskip("sqlalchemy")
    monkeypatch.setattr(searches, "scores_of", distance)
    storage = {name: f"sqlite:///{tmp_path}/{name}.db" if kind == "sqlite" else None for name in ("whole", "killed")}
    whole = study_in(tmp_path / "whole", storage["whole"])
    child = mp.get_context("fork").Process(target=study_in, args=(tmp_path / "killed", storage["killed"], 5))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    before = (tmp_path / "killed" / "runs.txt").read_text().splitlines()
    assert before == whole[2][:5]
    made, best, runs = study_in(tmp_path / "killed", storage["killed"])
    assert (made, best) == whole[:2] and len(made) == 6
    # the trial in the middle of which it was killed begins again; its finished stages are reused run folders
    assert runs[:5] == before and set(runs) == set(whole[2])
    assert study_in(tmp_path / "killed", storage["killed"])[0] == made  # nothing is left to do


def test_a_study_of_other_settings_is_not_gone_on_with(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.setattr(searches, "scores_of", distance)
    study_in(tmp_path, None)
    other = read_sweep(
        {**SPEC, "trials": 6, "options": "--max_updates 9", "name": "s", "pruner": "halving"}
    ).comparison()
    with pytest.raises(BadInput, match="the study 's' searched other settings"):
        run_studies(other, other.search, Runs(tmp_path / "runs.txt"), tmp_path, 1)


def test_the_running_trials_of_another_folder_are_not_taken_for_killed_ones(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.setattr(searches, "scores_of", distance)
    storage = str(tmp_path / "studies.journal")
    child = mp.get_context("fork").Process(target=study_in, args=(tmp_path / "one", storage, 3))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    with pytest.raises(BadInput, match=f"the study 's: s' in search.storage has trials that run in '{tmp_path}/one'"):
        study_in(tmp_path / "other", storage)
    made = study_in(tmp_path / "one", storage)[0]
    assert len(made) == 6
    # no trial runs any more: its results are there for all
    assert study_in(tmp_path / "other", storage)[0] == made


def searched(folder, storage, barrier, told, refused):
    """Search once both are ready, and tell how it ended; trials of who has the study last until the other is refused.

    Both may have begun a trial, where the first did not get to say at once that the study is its own.
    """
    study, run_all = pytest.importorskip("optuna").study.Study, Runs.run_all
    put = study.set_user_attr
    study.set_user_attr = lambda *args: (time.sleep(0.1), put(*args))  # others come between
    Runs.run_all = lambda *args: (refused.wait(20), run_all(*args))[1]
    barrier.wait(60)
    try:
        told.put(len(study_in(folder, storage)[0]))
    except BadInput as error:
        refused.set()
        told.put(str(error))


@pytest.mark.parametrize("kind", ["journal", "sqlite"])
def test_of_two_searches_that_begin_at_once_one_has_the_study(tmp_path, monkeypatch, kind):
    pytest.importorskip("optuna")
    pytest.importorskip("sqlalchemy")
    monkeypatch.setattr(searches, "scores_of", distance)
    context, storage = mp.get_context("fork"), f"{'sqlite:///' if kind == 'sqlite' else ''}{tmp_path}/studies"
    shared = (context.Barrier(2), told := context.Queue(), context.Event())
    both = [context.Process(target=searched, args=(tmp_path / name, storage, *shared)) for name in ("one", "other")]
    for process in both:
        process.start()
    ends = sorted([told.get(timeout=120) for _ in both], key=str)
    for process in both:
        process.join(60)
    assert ends[0] == 6
    assert re.match(
        f"the study 's: s' in search.storage has trials that run in '{tmp_path}/(one|other)': wait", ends[1]
    )


def test_a_search_whose_study_another_has_taken_between_its_trials_ends_with_that(tmp_path, monkeypatch):
    optuna = pytest.importorskip("optuna")
    storage, run_all = str(tmp_path / "studies"), Runs.run_all

    def taken(self, runs, metric):
        backend = optuna.storages.journal.JournalFileBackend(storage)
        study = optuna.load_study(study_name="s: s", storage=optuna.storages.JournalStorage(backend))
        study.set_user_attr("folder", "/other")
        return run_all(self, runs, metric)

    monkeypatch.setattr(searches, "scores_of", distance)
    monkeypatch.setattr(Runs, "run_all", taken)
    with pytest.raises(BadInput, match=r"the study 's: s' .* has trials that run in '/other': wait until they end"):
        study_in(tmp_path / "one", storage)
    backend = optuna.storages.journal.JournalFileBackend(storage)
    study = optuna.load_study(study_name="s: s", storage=optuna.storages.JournalStorage(backend))
    assert [trial.state.name for trial in study.get_trials()] == ["COMPLETE", "FAIL"]


def test_a_storage_that_cannot_be_opened_is_refused(tmp_path):
    pytest.importorskip("sqlalchemy")
    found = read_sweep({**SPEC, "storage": "nosuch://here"}).comparison()
    with pytest.raises(BadInput, match=r"search\.storage is 'nosuch://here', which Optuna cannot open"):
        run_studies(found, found.search, Runs(tmp_path / "none"), tmp_path, 1)


def test_trials_that_miss_a_target_are_worst_and_of_the_others_the_soonest_wins(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    (tmp_path / "runs.txt").touch()

    def seconds(trial, outcomes, comparison, search):
        rate = float(trial.settings[1])
        return {1000: math.inf if rate < 0.1 else 1 / rate}

    monkeypatch.setattr(searches, "scores_of", seconds)
    found = read_sweep({**SPEC, "trials": 8, "target": 0.9}).comparison()
    trials, best = run_studies(found, found.search, Runs(tmp_path / "runs.txt"), tmp_path, 1)
    rates = [float(trial.settings[1]) for trial in trials["sweep"]]
    assert min(rates) < 0.1 < max(rates) and len(rates) == 8
    assert float(best["sweep"].settings[1]) == max(rates)


def test_the_command_finds_settings_and_says_how_to_run_them(tmp_path, capsys):
    pytest.importorskip("optuna")
    path = tmp_path / "rates.yaml"
    path.write_text(yaml.safe_dump(SPEC))
    argv = ["sweep", str(path), "--output", str(tmp_path / "out"), "--no_page"]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    row = json.loads((tmp_path / "out" / "result.json").read_text())["rows"][0]
    scores = [trial["scores"]["1000"] for trial in row["searched"]["trials"]]
    best = row["searched"]["trials"][scores.index(max(scores))]["settings"]
    assert len(scores) == 2 and row["searched"]["settings"] == best
    assert f"best of 2 trials: {' '.join(best)}" in printed
    assert re.search(rf"its run: raafl simulate --config quickstart .*{re.escape(' '.join(best))} --seed 0", printed)
    assert "validation" not in row["runs"][0]["command"]
