"""A learning rate that falls over the run: what trains, what is recorded, and that it is the same wherever it trains."""

from __future__ import annotations

import pytest
import torch

from raafl.core.algorithm import Training
from raafl.errors import BadInput
from tests.helpers.small_runs import equal_replay, experiment, finish, small_mlp

FALLING = Training(num_epochs=None, num_steps=2, lr_schedule="linear", lr_versions=4)


def test_tasks_train_at_the_rate_of_their_version_and_replay(tmp_path):
    """In rounds, version v is trained at 1 - v/4 of the rate, and from version 4 on nothing moves."""
    run = finish(made := experiment(tmp_path / "run", train=FALLING, max_updates=24, eval_every=1))
    scales = {row["version"]: row.get("lr_scale", 1.0) for row in run.events("assigned")}
    assert scales == {0: 1.0, 1: 0.75, 2: 0.5, 3: 0.25, 4: 0.0, 5: 0.0}
    losses = [float(row["loss"]) for row in run.rows("metrics.csv")]
    assert losses[:5] == sorted(set(losses[:5]), reverse=True)
    assert losses[5:] == pytest.approx(losses[4:5] * 2, abs=1e-6)  # but for the rounding of a mean
    assert equal_replay(made, run)


@pytest.mark.parametrize("more", [{"workers": 2}, {"batch_clients": 4}])
def test_a_schedule_is_the_same_wherever_tasks_are_trained(tmp_path, more):
    plain = finish(experiment(tmp_path / "plain", "fed_buff", train=FALLING))
    other = finish(experiment(tmp_path / "other", "fed_buff", train=FALLING, **more))
    assert plain.digest == other.digest


def test_a_schedule_by_time_goes_by_the_clock_of_the_run(tmp_path):
    by_time = Training(num_epochs=None, num_steps=2, lr_schedule="linear", lr_time_s=0.5)
    run = finish(experiment(tmp_path / "run", "fed_async", train=by_time))
    tasks = run.events("assigned")
    assert len({task["time_s"] for task in tasks}) > 5
    for task in tasks:
        assert task.get("lr_scale", 1.0) == pytest.approx(max(1 - task["time_s"] / 0.5, 0.0))


def test_an_optimizer_without_a_rate_is_refused_before_the_run(tmp_path):
    class Relative(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": None})

        def step(self, closure=None):
            pass

    def made():
        module = small_mlp()
        module.configure_optimizers = lambda: Relative(module.parameters())
        return module

    made = experiment(tmp_path / "run", model=made, train=FALLING)
    with pytest.raises(BadInput, match=r"train.lr_schedule is linear, but Relative has no learning rate to scale"):
        finish(made)
    assert not (tmp_path / "run").exists()
