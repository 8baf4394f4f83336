"""A run does not depend on which process trains a task, whatever state the module keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lightning import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import raafl
from model_zoo import MLP
from raafl.data import Iid
from raafl.errors import BadInput
from raafl.runtime.setup import client_parts, load_data, make_model
from tests.helpers.small_runs import experiment


class Annealed(LightningModule):
    """Counts its steps in an attribute, and in a buffer of whole numbers; collects losses; averages inputs in a float buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.net, self.n_iter, self.losses = nn.Linear(6, 4), nn.Linear(4, 3), 0, []
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(6))

    def training_step(self, batch, index):
        self.n_iter += 1
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * batch[0].mean(0)
        loss = F.cross_entropy(self.net(torch.relu(self.first(batch[0] - self.mean))), batch[1])
        self.losses.append(float(loss.detach()))
        return min(1.0, (self.n_iter + int(self.steps)) / 20) * loss

    def validation_step(self, batch, index):
        self.losses.append(0.0)
        return {"loss": F.cross_entropy(self.net(self.first(batch[0])), batch[1])}

    def configure_optimizers(self):
        self.made = torch.optim.SGD(self.parameters(), lr=0.1)
        return self.made


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Annealed()


@pytest.fixture
def data():
    torch.manual_seed(1)
    return TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))


def federation(tmp_path, algorithm="fed_avg", **settings):
    return raafl.Federation(
        algorithm, clients=4, max_updates=8, partition=Iid(), output=str(tmp_path / "run"), progress="plain", **settings
    )


def test_workers_and_a_replay_come_to_the_same_model(tmp_path, model, data, capsys):
    digests = []
    for workers in (1, 2):
        fed = federation(tmp_path / str(workers), workers=workers)
        result = fed.simulate(model, (data, data), batch_size=8)
        assert fed.replay(result.folder, model, (data, data), batch_size=8)["equal"]
        digests.append(result.summary["model_digest"])
        assert int(result.module.steps) == 0 and result.module.n_iter == 0 and result.module.mean.any()
    assert digests[0] == digests[1]
    said = capsys.readouterr()
    assert "attributes that start again in each task: losses, n_iter, steps; use" in said.out + said.err
    assert "stays whole" not in said.out  # a proof that compares two steps begins both alike


class Counting(Annealed):
    """Without numbers of tensors, which cannot be followed through two halves."""

    def training_step(self, batch, index):
        self.n_iter += 1
        return F.cross_entropy(self.net(torch.relu(self.first(batch[0]))), batch[1]) * self.n_iter


def test_state_is_refused_where_both_halves_of_a_model_run_the_step(tmp_path, data):
    with pytest.raises(
        BadInput, match="'n_iter' changes in training_step, but split_fed runs training_step on two copies"
    ):
        federation(tmp_path, "split_fed").simulate(Counting(), (data, data), batch_size=8)


class Shared(Annealed):
    seen: list = []  # noqa: RUF012

    def training_step(self, batch, index):
        self.seen.append(index)
        return super().training_step(batch, index)


def test_state_that_all_copies_share_is_refused_before_training(tmp_path, data):
    with pytest.raises(BadInput, match=r"'Shared.seen' of the class changes in a step"):
        federation(tmp_path).simulate(Shared(), (data, data), batch_size=8)
    assert not (tmp_path / "run").exists()


class Drawn(MLP):
    """Draws what it keeps beside its parameters: an attribute of torch's, one of numpy's, and a buffer that does not travel."""

    def __init__(self):
        super().__init__(64, (8,), 10)
        self.noise, self.order = torch.randn(3), np.random.permutation(5)
        self.register_buffer("mask", torch.rand(3), persistent=False)


def test_a_client_that_makes_the_model_itself_draws_what_the_server_has(tmp_path):
    made = experiment(tmp_path / "run", model=Drawn)
    server, (submodels, _) = make_model(made), client_parts(made, load_data(made), made.fabric)
    client = submodels.module
    assert torch.equal(client.noise, server.noise) and torch.equal(client.mask, server.mask)
    assert list(client.order) == list(server.order)
    assert all(parameter.is_meta for parameter in client.parameters())
