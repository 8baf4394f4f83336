"""Metrics of evaluations that draw random numbers: one series for a seed, whatever trains beside them and in which process."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from lightning import LightningDataModule, LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.conformance import executors
from tests.helpers.plain_loop import seed_of
from tests.helpers.real_ranks import ranks
from tests.helpers.small_runs import experiment, finish

SIZE = 10


class Drawing(Dataset):
    """Samples with noise from Python's and NumPy's generators."""

    def __len__(self):
        return 4 * SIZE

    def __getitem__(self, index):
        return torch.ones(4) * random.random() + np.random.rand(), index % 2


def collated(samples):
    x = torch.stack([x for x, _ in samples])
    return x * torch.bernoulli(torch.full(x.shape, 0.5)), torch.tensor([y for _, y in samples])


class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(60, 4), torch.arange(60) % 2), batch_size=SIZE, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Drawing(), batch_size=SIZE, collate_fn=collated)


class Still(LightningModule):
    """Learns nothing, so that all versions are one model."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("sum", batch[0].sum() + torch.rand(()), reduce_fx="sum")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def by_hand(seed, version):
    """The sum that an evaluation has: generators seeded, then batch after batch."""
    drawn = seed_of(seed, "evaluation", version)
    torch.manual_seed(drawn)
    np.random.seed(drawn % 2**32)
    random.seed(drawn)
    total = 0.0
    for first in range(0, 4 * SIZE, SIZE):
        x, _ = collated([Drawing()[i] for i in range(first, first + SIZE)])
        total += (x.sum() + torch.rand(())).double().item()
    return total


def series(run):
    return {int(row["version"]): float(row["sum"]) for row in run.rows("metrics.csv")}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    def make(name, **more):
        settings = {"model": Still, "data": Data, "clients": 3, "max_updates": 15, "eval_every": 1, **more}
        return experiment(tmp_path_factory.mktemp("runs") / name, "fed_avg", **settings)

    return make


@pytest.fixture(scope="module")
def expected():
    return {version: by_hand(0, version) for version in range(6)}


@pytest.mark.parametrize("more", [{}, {"workers": 2}, {"batch_clients": 3}], ids=["one", "workers", "batches"])
def test_one_process_workers_and_batches_draw_what_the_version_says(made, expected, more):
    assert series(finish(made("run", **more))) == pytest.approx(expected, rel=1e-12)


def test_ranks_of_a_simulation_draw_the_same(made, expected):
    assert series(executors.over_ranks(made("ranks"))) == pytest.approx(expected, rel=1e-12)


def test_a_real_run_draws_the_same_for_the_versions_that_it_measures(made, expected):
    with ranks(made("real", clients=2, max_updates=10)) as fleet:
        found = series(fleet.serve())
    assert {0, 5} <= found.keys()
    assert found == pytest.approx({version: expected[version] for version in found}, rel=1e-12)


def test_another_seed_gives_other_draws_and_older_runs_draw_from_what_came_before(made, expected):
    first = series(finish(made("other", seed=1, max_updates=3)))
    assert first == pytest.approx({version: by_hand(1, version) for version in first}, rel=1e-12)
    older = series(finish(made("older", rules=1)))
    assert not set(older.values()) & set(expected.values())


class Owning(Drawing):
    """Samples with noise from generators of the data set's own, which nobody else seeds."""

    def __init__(self):
        self.torch, self.numpy = torch.Generator().manual_seed(1), np.random.default_rng(1)

    def __getitem__(self, index):
        return torch.rand(4, generator=self.torch) + float(self.numpy.random()), index % 2


class Owned(Data):
    def train_dataloader(self):
        return DataLoader(Owning(), batch_size=SIZE, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Owning(), batch_size=SIZE)


class Learns(Still):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_generators_that_a_data_set_owns_are_seeded_for_each_task_and_evaluation(made):
    settings = {"data": Owned, "model": Learns, "max_updates": 9}
    runs = {
        name: finish(made(f"owned-{name}", **settings, **more))
        for name, more in {"one": {}, "again": {}, "workers": {"workers": 2}, "batches": {"batch_clients": 3}}.items()
    }
    first, *others = runs.values()
    assert all(series(run) == series(first) for run in others) and len(series(first)) == 4
    assert len({run.summary["model_digest"] for run in runs.values()}) == 1
    assert len(set(series(first).values())) == 4  # each evaluation has draws of its own


class Observing(Still):
    """A step that moves a buffer in eval mode, too, as observers of quantization do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def validation_step(self, batch, batch_idx):
        self.mean.lerp_(batch[0].mean(), 0.1)
        self.log("sum", self.mean)


class Plain(Data):
    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(640.0).view(160, 4), torch.arange(160) % 2), batch_size=SIZE)


def test_an_evaluation_that_moves_buffers_is_not_shared(made):
    alone, shared = (
        series(finish(made(f"moved-{number}", model=Observing, data=Plain, workers=number))) for number in (1, 2)
    )
    assert alone == shared and len(set(alone.values())) == 1  # and each evaluation begins with the model's own
