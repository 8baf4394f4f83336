"""Forecasts: counts and limits by hand, and the time of a real run on this machine within a factor."""

from __future__ import annotations

import pytest

from raafl.devices.profiles import Profile
from raafl.lab.compare import report as module
from raafl.lab.compare.comparison import Comparison, Halving, Search

SMALL = Comparison(
    "small",
    "quickstart",
    {"A": ("--algorithm", "fed_avg"), "B": ("--max_updates", "6")},
    (0, 1),
    options=("--clients", "3", "--max_updates", "12"),
    search=Search({"--model.lr": [0.1, 0.2, 0.3]}, (10, 11), halving=Halving(3, 0.5)),
)


@pytest.fixture(scope="module")
def rows():
    machine = Profile(flops_per_s=1e9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "measure_machine", lambda: machine)
        return module.forecast(SMALL)


def test_runs_trials_and_updates(rows):
    # Three settings on two seeds; a quarter of the budget for all, half for half of them, the whole for a quarter.
    assert [(row.runs, row.trials) for row in rows] == [(2, 6 * (0.25 + 0.5 * 0.5 + 0.25))] * 2
    assert [row.updates for row in rows] == [12, 6]
    assert all(row.problem is None for row in rows)


def test_time_here_is_that_of_the_flops(rows):
    """FedAvg trains 12 whole models: 64-H-10 has 6 (64 H + 10 H) FLOPs a sample and step, evaluation a third of it."""
    from raafl.lab.compare.runs import parsed
    from raafl.lab.plan.dry import World
    from raafl.submodel import FULL

    experiment = parsed("quickstart", "A", (*SMALL.options, *SMALL.rows["A"]), 0).experiment
    world = World(experiment)
    flops = world.submodels(experiment.algorithm).cost(FULL, world.batch_size).flops_per_sample
    trained = 4 * sum(client.num_samples for client in world.clients)  # four rounds of three clients
    tested = sum(count for _, count in world.data.test_batches(world.batch_size))
    epochs = experiment.train.num_epochs or 1
    evaluations = 4 / (experiment.eval_every or 3)
    assert rows[0].here_s == pytest.approx(flops * (trained * epochs + evaluations * tested / 3) / 1e9, rel=0.05)


def test_the_table_has_a_sum(rows):
    cells = module.as_table(rows)
    assert [line[0] for line in cells] == ["row", "A", "B", "all rows"]
    assert rows[0].total_s == rows[0].here_s * 6.5
    assert module.as_json(rows)[0]["total_s"] == rows[0].total_s
