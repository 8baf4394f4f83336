"""What `training_step` logs: by task in clients.csv, by samples in metrics.csv and loggers, bounded where a client says it."""

from __future__ import annotations

import csv
import json
import math

import pytest

from model_zoo import MLP
from raafl.algorithms import fed_async, fed_avg, fed_buff
from raafl.core.types import Update
from raafl.data import Dirichlet
from raafl.local.evaluate import MAX_LOGGED
from raafl.runfolder.statistics import MAX_OF_ONE, MAX_OTHERS, LoggedMeans, column_of, logged_values
from raafl.runtime.run import simulate
from raafl.submodel import FlatTensors, Layout
from tests.helpers.crash import crash
from tests.helpers.small_runs import experiment, finish


class Logging(MLP):
    """Logs under a name of its own, and under one that validation_step has too."""

    def __init__(self):
        super().__init__(64, (24,), 10, lr=0.05, momentum=0.5)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train/size", float(len(batch[1])), on_epoch=True)
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())
        return loss


def means_by_hand(run, name):
    """For each evaluation the mean, by samples, over the tasks merged since the one before; NaN where there are none."""
    found, before = [], 0
    for row in run.rows("metrics.csv"):
        version = int(row["version"])
        merged = [r for r in run.rows() if r["outcome"] == "merged" and before < int(r["merged_version"]) <= version]
        pairs = [(int(r["num_samples"]), json.loads(r["logged"])[name]) for r in merged]
        weight = sum(num for num, _ in pairs)
        found.append(sum(num * value for num, value in pairs) / weight if pairs else math.nan)
        before = version
    return found


def column(run, name):
    return [float(row[name]) if row[name] else math.nan for row in run.rows("metrics.csv")]


def check(run):
    for name, where in (("train/size", "train/size"), ("accuracy", "train/accuracy")):
        assert column(run, where) == pytest.approx(means_by_hand(run, name), rel=1e-12, nan_ok=True)
    assert all(json.loads(row["logged"]).keys() == {"accuracy", "train/size"} for row in run.rows() if row["loss"])


@pytest.mark.parametrize(
    "algorithm", [fed_avg(), fed_async(), fed_buff(buffer_size=3)], ids=["rounds", "arrivals", "buffer"]
)
def test_it_is_in_both_tables_and_with_loggers(tmp_path, algorithm):
    """Evaluated every second version; the last batch of a client is smaller than the others."""
    fields = {"model": Logging, "partition": Dirichlet(0.5), "eval_every": 2, "logger": "csv"}
    run = finish(experiment(tmp_path / "r", algorithm, **fields))
    check(run)
    assert column(run, "accuracy") != column(run, "train/accuracy")
    (path,) = (run.folder / "loggers" / "csv").glob("*/metrics.csv")
    with path.open(newline="") as file:
        logged = [float(row["train/size"]) for row in csv.DictReader(file) if row["train/size"]]
    assert logged == pytest.approx([value for value in column(run, "train/size") if not math.isnan(value)])


@pytest.mark.parametrize("more", [{"workers": 2}, {"batch_clients": 4}], ids=["workers", "batched"])
def test_it_is_the_same_however_tasks_are_trained(tmp_path, more):
    made = {"model": Logging, "partition": Dirichlet(0.5), "eval_every": 1, "clients": 8, "max_updates": 24}
    loop, other = (finish(experiment(tmp_path / name, **made, **how)) for name, how in (("loop", {}), ("other", more)))
    assert other.digest == loop.digest and other.text("clients.csv") == loop.text("clients.csv")
    rows = [[(row["train/size"], row["train/accuracy"]) for row in run.rows("metrics.csv")] for run in (loop, other)]
    assert rows[0] == rows[1]


def test_a_run_that_was_resumed_goes_on_with_its_means(tmp_path, monkeypatch):
    """Its last checkpoint lies between two evaluations, with two of the tasks whose mean comes after it."""
    made = {"model": Logging, "eval_every": 4, "checkpoint_every": 3, "max_updates": 12}
    with crash(monkeypatch, 8):
        simulate(experiment(tmp_path / "r", fed_async(), **made))
    run = finish(experiment(tmp_path / "r", fed_async(), **made, resume=str(tmp_path / "r")))
    check(run)
    whole = finish(experiment(tmp_path / "whole", fed_async(), **made))
    assert column(run, "train/size") == pytest.approx(column(whole, "train/size"), rel=0, nan_ok=True)


# ---- by itself ----


def update(**metrics):
    return Update(1, 1, 0, FlatTensors.empty(Layout(())), 10, metrics=metrics)


def test_means_are_by_samples_from_one_evaluation_to_the_next():
    means = LoggedMeans()
    means.add(1, {"acc": 1.0}, 30)
    means.add(2, {"acc": 0.0, "other": 5.0}, 10)
    means.close(1)
    means.add(1, {"acc": 0.5}, 40)
    means.close(2)
    means.add(1, {"acc": 0.25}, 1)
    means.close(3)
    again = LoggedMeans()
    again.restore(json.loads(json.dumps(means.save())))
    for one in (means, again):
        # version 1 was overtaken: its tasks count for version 2
        assert one.take(2) == {"train/acc": (30 * 1 + 10 * 0 + 40 * 0.5) / 80, "train/other": 5.0}
        assert one.take(3) == {"train/acc": 0.25}
        assert one.take(4) == {}


def test_only_what_a_step_has_logged_is_a_value_of_it():
    own = {"loss": 1.0, "test/acc": 1.0, "test/num_samples": 5.0, "memory/peak_bytes": 9.0}
    assert logged_values(update(**own, b=2.0, a=1.0)) == {"a": 1.0, "b": 2.0}


def test_a_hostile_clients_values_are_bounded_and_cannot_keep_others_out():
    hostile = {f"{number}{'x' * 500}\x1b": 1.0 for number in range(1000)}
    values = logged_values(update(**hostile))
    assert len(values) == MAX_LOGGED and all(len(name) <= 100 and name.isprintable() for name in values)
    assert logged_values(update(a=math.nan, b=math.inf, c=-4e38, d=0.5)) == {"d": 0.5}
    means = LoggedMeans()
    means.expect(["honest"])
    for task in range(20):
        means.add(1, {f"{task} {number}": 1.0 for number in range(50)}, 1)
    means.add(2, {"honest": 0.75, "mine": 1.0}, 10)
    means.close(1)
    found = means.take(1)
    assert found.pop("train/honest") == 0.75 and found.pop("train/mine") == 1.0
    assert len(found) == MAX_OF_ONE == 16, "of one client, in whatever number of tasks"
    again = LoggedMeans()
    again.restore(json.loads(json.dumps(means.save())))
    again.add(1, {"another": 1.0, "mine": 3.0}, 1)
    for client in range(3, 100):
        again.add(client, {f"{client} {number}": 1.0 for number in range(50)}, 1)
    again.close(2)
    found = again.take(2)
    assert found.pop("train/mine") == 3.0 and "train/another" not in found
    assert len(found) == MAX_OTHERS - MAX_OF_ONE - 1, "of all clients that the trial step knows nothing of"


@pytest.mark.parametrize(
    ("name", "where"), [("train/acc", "train/acc"), ("train_loss", "train_loss"), ("acc", "train/acc")]
)
def test_the_column_of_a_mean(name, where):
    assert column_of(name) == where


def test_of_two_names_with_one_column_its_own_wins():
    for names in (("acc", "train/acc"), ("train/acc", "acc")):
        means = LoggedMeans()
        means.add(1, {name: float(name == "train/acc") for name in names}, 1)
        means.close(1)
        assert means.take(1) == {"train/acc": 1.0}
