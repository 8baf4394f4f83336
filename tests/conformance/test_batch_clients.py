"""Clients trained as one batch: whole runs leave the same bits, in every file, whichever way each task was trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from model_zoo import MLP
from raafl.algorithms import fed_async, fed_buff, fed_raa, hetero_fl, scaffold
from raafl.data import Dirichlet
from raafl.errors import BadInput
from raafl.local.stacked import stacks
from raafl.runtime.executors import batched
from raafl.runtime.replay import replay
from raafl.runtime.run import simulate
from tests.conformance.executors import over_ranks
from tests.helpers.crash import crash, simulated
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


@pytest.fixture
def composed(monkeypatch):
    """Products of all clients in one call have bits that depend on how many clients they are, as a library's may."""
    real = stacks.product

    def product(known, name, together, alone, *operands):
        answer = real(known, name, together, alone, *operands)
        return answer * (1 + 4e-7 * len(operands[0])) if known is None else answer

    monkeypatch.setattr(stacks, "product", product)


FAST = {"clients": 12, "max_updates": 60, "partition": Dirichlet(0.6), "batch_clients": "fast"}


@pytest.mark.quick_cases("fed_buff")
@pytest.mark.parametrize("name", ["fed_buff", "fed_raa", "dropout"])
def test_a_fast_run_has_a_digest_of_its_own_and_replays_to_the_bit(tmp_path, composed, name):
    algorithm = fed_raa(fragments=3, prox=0.05) if name == "fed_raa" else fed_buff(buffer_size=4)
    fields = {**FAST, "model": Dropping if name == "dropout" else Plain}
    loop = finish(experiment(tmp_path / "loop", algorithm, **{**fields, "batch_clients": 1}))
    made = experiment(tmp_path / "fast", algorithm, **fields)
    run = finish(made)
    told = run.summary["batched"]
    assert told["mode"] == "fast" and told["share"] > 0.4 and told["by_the_loop"] == []
    assert run.digest != loop.digest and abs(run.summary["final"]["loss"] - loop.summary["final"]["loss"]) < 1e-3
    trained = [number for row in run.events("batch") for number in row["assignments"]]
    assert len(trained) == len(set(trained)) and len(trained) >= told["share"] * 60
    assert run.events("run")[0]["batches"] == "fast"
    assert equal_replay(made, run)
    assert finish(experiment(tmp_path / "again", algorithm, **fields)).digest == run.digest


def test_a_fast_run_that_crashed_goes_on_as_if_it_had_not_and_replays(tmp_path, composed, monkeypatch):
    """Results of a batch that nobody had asked for yet are in the checkpoint: alone, or with others, they would be other bits."""
    whole = finish(experiment(tmp_path / "whole", fed_async(), model=Plain, checkpoint_every=4, **FAST))
    cut = experiment(tmp_path / "cut", fed_async(), model=Plain, checkpoint_every=4, **FAST)
    with crash(monkeypatch, 33):
        simulate(cut)
    with pytest.raises(
        BadInput, match=r"batch_clients is auto, but resume: .* was run with fast, which gives other bits"
    ):
        simulate(replace(cut, output=None, resume=cut.output, batch_clients="auto"))
    resumed = finish(replace(cut, output=None, resume=cut.output))
    assert resumed.digest == whole.digest and resumed.summary["batched"]["mode"] == "fast"
    assert equal_replay(cut, resumed)


def test_a_replay_in_another_mode_is_refused_by_name(tmp_path, composed):
    options = (
        f"--config={Path(__file__).parents[2] / 'configs' / 'quickstart.yaml'}",
        "--clients=8",
        "--max_updates=8",
        "--train.num_epochs=null",
        "--train.num_steps=1",
    )
    simulated(*options, "--batch_clients=fast", f"--output={tmp_path / 'run'}")
    found = replay(tmp_path / "run")
    assert found["equal"] is True and found["differences"] == []
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("batch_clients: fast", "batch_clients: 1"))
    with pytest.raises(BadInput, match=r"batch_clients is 1, but '.*run' was run with fast, .*: give fast"):
        replay(tmp_path / "run")


def test_what_differs_by_more_than_rounding_is_left_to_the_loop(tmp_path):
    class Unlike(Plain):
        """Sees that it is in a batch of clients."""

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (1.0 if stacks.stack_of(batch[0]) is None else 3.0)

    run = finish(experiment(tmp_path / "run", fed_buff(buffer_size=4), model=Unlike, **FAST))
    loop = finish(experiment(tmp_path / "loop", fed_buff(buffer_size=4), model=Unlike, **{**FAST, "batch_clients": 1}))
    assert run.digest == loop.digest and run.events("batch") == []
    assert run.summary["batched"]["by_the_loop"] == [
        "clients trained together differ from those alone by more than rounding"
    ]
