"""A report's figures of a run that really took place, against the run's own summary and the cost model."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from raafl.commands.cli import main
from raafl.commands.report import _partitioned_data
from raafl.data import Digits, Dirichlet
from raafl.lab.report.clients import classes_of, partition
from raafl.lab.report.timeline import AWAY, NOTHING, TRAIN, TRANSFER, WAIT, uses
from raafl.runfolder.intervals import task_intervals
from raafl.runfolder.reading import read
from raafl.runfolder.schema import MERGED
from tests.habits.source import ROOT
from tests.helpers.small_runs import SPEEDS, experiment, finish, unequal
from tests.lab.report.folders import write

DEAL_OUT = partial(_partitioned_data, trusted=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Fed-RAA on four clients, of which the third leaves while it works, and comes back."""
    devices = unequal()
    fields = {name: getattr(devices[2], name) for name in ("name", "down_bytes_per_s", "up_bytes_per_s", "latency_s")}
    away = type(devices[2])(flops_per_s=SPEEDS[2], availability=((0.0, 0.1),), period_s=0.3, **fields)
    return finish(
        experiment(
            tmp_path_factory.mktemp("report") / "run",
            "fed_raa",
            devices=[*devices[:2], away, devices[3]],
            max_updates=24,
        )
    )


def test_counts_agree_with_the_summary(finished):
    run, summary = read(finished.folder), finished.summary
    assert run.notes == []
    merged = run.tasks.are(MERGED)
    assert merged.sum() == summary["updates_merged"] == 24
    assert summary["updates_lost"] > 0
    counts = {str(client): int((run.tasks.client[merged] == client).sum()) for client in run.client_ids()}
    assert counts == summary["participation"]
    assert run.tasks["staleness"][merged].mean() == pytest.approx(summary["staleness"]["mean"])


def test_time_in_tasks_is_the_utilisation_of_the_summary(finished):
    run, summary = read(finished.folder), finished.summary
    spent = uses(run, task_intervals(run))
    busy = sum(mine[TRAIN] + mine[TRANSFER] + mine[NOTHING] for mine in spent.values())
    assert busy / (4 * summary["time_s"]) == pytest.approx(summary["utilisation"])
    for client, mine in spent.items():
        assert sum(mine.values()) == pytest.approx(summary["time_s"])
        assert (mine[AWAY] > 0) == (client == 3)
        assert mine[WAIT] == pytest.approx(0, abs=1e-9)  # each client gets its next task at once


def test_training_takes_the_same_flops_on_every_device(finished):
    run = read(finished.folder)
    found = task_intervals(run)
    assert len(found.client) == len(run.tasks)
    flops = {}
    for row in np.flatnonzero(run.tasks.are(MERGED)):
        client = int(run.tasks.client[row])
        link_s = 2 * 0.01 + run.tasks["bytes_down"][row] / 1e6 + run.tasks["bytes_up"][row] / 5e5
        train_s = run.tasks["arrived_s"][row] - run.tasks["assigned_s"][row] - link_s
        flops.setdefault(run.tasks.spec[row], []).append(train_s * SPEEDS[client - 1])
    spent = uses(run, found)
    assert sum(mine[TRAIN] * SPEEDS[c - 1] for c, mine in spent.items()) == pytest.approx(sum(map(sum, flops.values())))
    assert any(len(some) > 1 for some in flops.values())
    for some in flops.values():
        assert some == pytest.approx([some[0]] * len(some), rel=1e-6)


def test_classes_are_those_that_the_config_deals_out(tmp_path):
    folder = tmp_path / "run"
    config = str(ROOT / "configs" / "quickstart.yaml")
    assert (
        main(["simulate", "--config", config, "--max_updates", "2", "--progress", "quiet", "--output", str(folder)])
        == 0
    )
    run = read(folder)
    counts = classes_of(run, DEAL_OUT)
    data = Digits(test_share=0.2, seed=0)
    data.setup("fit")
    labels = np.array([int(label) for _, label in data.train_dataloader().dataset])
    parts = Dirichlet(alpha=1.0, min_samples=1).split(labels, 4, 0, {})
    assert counts == {
        i: np.bincount(labels[part.numpy()], minlength=10).tolist() for i, part in enumerate(parts, start=1)
    }
    assert {client: sum(some) for client, some in counts.items()} == {c.id: c.num_samples for c in run.clients.values()}
    traces = partition([("run", run)], {id(run): counts}).views["run",].data
    assert [list(column) for column in zip(*(trace["x"] for trace in traces), strict=True)] == list(counts.values())

    run.clients[2].num_samples += 1
    assert (
        classes_of(run, DEAL_OUT)
        == "the config's data are not those of the run: client 2 had 308 samples, and would have 307"
    )


def test_classes_that_cannot_be_found_are_said_to_be_unknown(finished, tmp_path):
    run = read(finished.folder)
    assert classes_of(run, DEAL_OUT) == "there is no config from which to divide the data"
    named = read(write(tmp_path / "run"))  # whose config names no model and no data
    reason = classes_of(named, DEAL_OUT)
    assert reason.startswith("the data cannot be divided again: ")
    assert reason in partition([("run", named)], {id(named): reason}).note
