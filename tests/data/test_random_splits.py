"""Data modules that split at random, without a seed of their own: each process, run and replay has the same split."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader, Subset, random_split

from raafl.algorithms import fed_avg
from raafl.data import Iid, Partition
from raafl.data.federated import FederatedData
from raafl.rng import generators, same_generators
from raafl.rules import CURRENT, Rules
from raafl.runtime.client.setup import whole
from raafl.runtime.setup import load_data
from tests.data.modules import tensors
from tests.helpers.small_runs import experiment

DRAWS = {
    "torch": lambda: torch.randperm(50).tolist(),
    "numpy": lambda: np.random.permutation(50).tolist(),
    "python": lambda: random.sample(range(50), 50),
    "random_split": lambda: list(random_split(range(50), [50])[0].indices),
}


class Splitting(LightningDataModule):
    """Holds out 10 of 50 samples, anew whenever it is set up, as modules do that ignore the stage."""

    def __init__(self, draw="torch"):
        super().__init__()
        self.draw, self.constructed = DRAWS[draw], DRAWS[draw]()

    def setup(self, stage):
        order = self.draw()
        self.train, self.test = (Subset(tensors(50), rows) for rows in (order[:40], order[40:]))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, shuffle=True)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=8)


def other_state(seed):
    """Leave the global generators as another process has them."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    return generators()


def trained_and_tested(data):
    train = {x for client in (1, 2) for batch, _ in data.client(client).in_order() for x in batch[0][:, 0].tolist()}
    return train, {x for batch, _ in data.test_batches() for x in batch[0][:, 0].tolist()}


@pytest.mark.parametrize("draw", DRAWS)
def test_no_client_trains_on_what_the_server_of_another_process_tests(draw):
    found = []
    for seed in (1, 2):
        module, before = Splitting(draw), other_state(seed)
        found.append(trained_and_tested(FederatedData(module, Iid(), 2, seed=seed)))
        assert same_generators(before, generators())
    (train, test), again = found
    assert (train, test) == again and not train & test and len(train) == 40 and len(test) == 10


@pytest.mark.parametrize("own_data", [True, False])
def test_what_a_constructor_draws_is_the_same_in_each_process_too(tmp_path, own_data):
    made = []

    def data():
        made.append(Splitting("numpy"))
        return made[-1]

    for seed in (1, 2):
        before = other_state(seed)
        (whole if own_data else load_data)(experiment(tmp_path / "r", fed_avg(), data=data, clients=2, seed=seed))
        assert same_generators(before, generators())
    assert made[0].constructed == made[1].constructed


@dataclass(frozen=True)
class Unseeded(Partition):
    """A partition of a user's that draws from NumPy's global generator, not from `rng`."""

    def assign(self, labels, num_clients, rng, columns):
        return np.array_split(np.random.permutation(len(labels)), num_clients)


def test_a_partition_that_ignores_its_generator_is_the_same_in_each_process_and_another_for_another_seed():
    found = []
    for state, seed in ((1, 0), (2, 0), (2, 1)):
        module, before = Splitting(), other_state(state)
        found.append(FederatedData(module, Unseeded(), 2, seed=seed).indices(1).tolist())
        assert same_generators(before, generators())
    assert found[0] == found[1] != found[2]


def test_older_runs_split_as_they_did():
    for revision, is_same in ((9, False), (CURRENT, True)):
        found = []
        for seed in (1, 2):
            other_state(seed)
            found.append(trained_and_tested(FederatedData(Splitting(), Iid(), 2, rules=Rules(revision)))[0])
        assert (found[0] == found[1]) is is_same
