"""Clients trained as one batch: whole runs leave the same bits, in every file, whichever way each task was trained."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from model_zoo import MLP
from raafl.algorithms import fed_async, fed_buff, fed_raa, hetero_fl, scaffold
from raafl.data import Dirichlet
from raafl.runtime.executors import batched
from raafl.runtime.run import simulate
from tests.conformance.executors import over_ranks
from tests.helpers.crash import crash
from tests.helpers.small_runs import equal_replay, experiment, finish


class Plain(MLP):
    def __init__(self, **more):
        super().__init__(64, (24,), 10, lr=0.05, momentum=0.5, **more)


class Dropping(Plain):
    def __init__(self):
        super().__init__(dropout=0.2)


class Normed(Plain):
    def __init__(self):
        super().__init__()
        self.layers.insert(2, nn.BatchNorm1d(24))


class Branching(Plain):
    """Leaves a batch out of which it has learnt enough."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss > 2.0 else 0 * loss


class Numpy(Plain):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x * np.random.uniform(0.9, 1.1)), y)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(batched, "_TRIALS", (2, 3))


def compared(tmp_path, algorithm, most=6, how=finish, **fields):
    """Run both ways, the second as `how` says; every file but the summary's `batched` is the same. Gives what that says."""
    fields = {"clients": 12, "max_updates": 60, "partition": Dirichlet(0.6), **fields}
    loop = finish(experiment(tmp_path / "loop", algorithm, **{**fields, "workers": 1}))
    run = how(experiment(tmp_path / "cohorts", algorithm, batch_clients=most, **fields))
    assert run.digest == loop.digest
    assert run.rows() == loop.rows() and run.journal() == loop.journal()
    batched = run.summary.pop("batched")
    for summary in (run.summary, loop.summary):
        del summary["wall_s"]
    assert run.summary == loop.summary
    return batched


@pytest.mark.quick_cases(0)
@pytest.mark.parametrize("algorithm", [fed_raa(fragments=3, prox=0.05), hetero_fl(rates=[1.0, 0.5, 0.25])])
def test_submodels_leave_the_bits_of_the_loop(tmp_path, algorithm):
    batched = compared(tmp_path, algorithm)
    assert batched["share"] > 0.1 and batched["by_the_loop"] == []


@pytest.mark.parametrize("model", [Dropping, Normed, Branching])
def test_models_that_draw_keep_statistics_and_branch_leave_the_bits_of_the_loop(tmp_path, model):
    batched = compared(tmp_path, fed_buff(buffer_size=4), model=model)
    assert batched["share"] > 0.1 or model is Branching


@pytest.mark.long(
    "tests/conformance/test_executors.py::test_any_number_of_tasks_in_any_order_give_what_one_process_gives"
)
@pytest.mark.parametrize(("how", "workers"), [(finish, 3), (over_ranks, 1)])
def test_processes_that_each_train_clients_as_one_leave_the_bits_of_the_loop(tmp_path, how, workers):
    batched = compared(tmp_path, fed_buff(buffer_size=8), how=how, workers=workers, clients=24, max_updates=120)
    assert batched["share"] > 0.2 and batched["mean_cohort"] >= 2 and batched["by_the_loop"] == []


def test_what_goes_by_the_loop_says_why(tmp_path):
    batched = compared(tmp_path, fed_async(), model=Numpy, max_updates=30)
    assert batched["share"] == 0 and "numpy" in batched["by_the_loop"][0]
    batched = compared(tmp_path / "own", scaffold(), max_updates=24)
    assert batched["by_the_loop"] == ["the algorithm has steps of its own"]


def test_auto_leaves_the_bits_of_the_loop_whatever_it_chooses(tmp_path, monkeypatch):
    monkeypatch.setattr(batched, "_TRIALS", (4, 5))
    compared(tmp_path, fed_async(), most="auto")


@pytest.mark.long(
    "tests/conformance/test_executors.py::test_every_algorithm_ends_alike_over_ranks_and_when_it_has_crashed_and_goes_on_elsewhere"
)
def test_clients_that_come_and_go_are_trained_alike(tmp_path):
    from tests.helpers.small_runs import unequal

    devices = unequal(presence="markov", on_s=0.6, off_s=0.2)
    compared(tmp_path, fed_async(), devices=devices)


@pytest.mark.long(
    "tests/conformance/test_executors.py::test_every_algorithm_ends_alike_over_ranks_and_when_it_has_crashed_and_goes_on_elsewhere"
)
def test_a_run_that_crashed_in_mid_cohort_goes_on_with_another_executor_and_replays(tmp_path, monkeypatch):
    more = {"clients": 12, "max_updates": 60, "checkpoint_every": 4}
    whole = finish(experiment(tmp_path / "whole", fed_raa(), **more))
    for name, before, after in (("cut", 5, 1), ("other", 1, "auto")):
        cut = experiment(tmp_path / name, fed_raa(), batch_clients=before, **more)
        with crash(monkeypatch, 33):
            simulate(cut)
        resumed = finish(replace(cut, output=None, resume=cut.output, batch_clients=after))
        assert resumed.digest == whole.digest and ("batched" in resumed.summary) is (after == "auto")
        assert equal_replay(cut, resumed)
    assert torch.get_num_threads() == 1
