"""A validation set beside a test set is measured during the run, the test set once, at its end."""

from __future__ import annotations

import csv

import pytest
import torch
from lightning import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import raafl

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
ROWS = TensorDataset(X, X.sum(1))
SPLITS = {"train": range(40), "validation": range(40, 50), "test": range(50, 60)}


def part(name):
    return TensorDataset(*ROWS[list(SPLITS[name])])


class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(part("train"), batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(part("validation"), batch_size=4)

    def test_dataloader(self):
        return DataLoader(part("test"), batch_size=4)


class Line(LightningModule):
    fails = False

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, _):
        return nn.functional.mse_loss(self.net(batch[0])[:, 0], batch[1])

    def validation_step(self, batch, _):
        if self.fails and torch.equal(batch[0][0], X[50]):
            raise ValueError("no test today")
        return {"mse": nn.functional.mse_loss(self.net(batch[0])[:, 0], batch[1])}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(tmp_path, module=None, **more):
    federation = raafl.Federation(
        "fed_avg", clients=2, max_updates=6, output=tmp_path / "run", progress="quiet", **more
    )
    return federation.simulate(module or Line(), Data())


def error(result, name):
    x, y = ROWS[list(SPLITS[name])]
    return float((result.module.net(x)[:, 0] - y).pow(2).mean().detach())


@pytest.mark.parametrize("more", [{}, {"workers": 2}])
def test_evaluations_use_the_validation_set_and_the_end_the_test_set(tmp_path, more):
    result = run(tmp_path, keep_best="mse:min", **more)
    assert result.final == pytest.approx(
        {"mse": error(result, "validation"), "test/mse": error(result, "test")}, rel=1e-5
    )
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert not any(name.startswith("test/") for name in rows[0])
    assert float(rows[-1]["mse"]) == pytest.approx(result.final["mse"])


def test_a_run_of_earlier_rules_measures_the_test_set_alone(tmp_path):
    result = run(tmp_path, rules=1)
    assert result.final == pytest.approx({"mse": error(result, "test")}, rel=1e-5)


def test_a_test_set_that_cannot_be_measured_loses_nothing(tmp_path):
    module = Line()
    module.fails = True
    result = run(tmp_path, module)
    assert set(result.final) == {"mse"} and result.summary["finished"] == "max_updates"
    assert any(
        "the test set cannot be measured: ValueError: no test today" in one for one in result.summary["warnings"]
    )
