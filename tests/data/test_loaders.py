"""Samplers of a user's loaders: kept, or refused by name at the start."""

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from raafl.data.federated import FederatedData
from raafl.data.loaders import fetcher
from raafl.data.partition import ClassesPerClient, Iid
from raafl.errors import BadInput
from tests.data.modules import Module, Plain, equal, generator, tensors, values

TRAIN, HELD_OUT = [7, 3, 21, 40, 12, 9], [49, 0, 20]


class Split(Module):
    """Train and validation samples of one data set, parted by samplers."""

    def __init__(self, data, train=TRAIN, held_out=HELD_OUT):
        super().__init__(data, batch_size=4, sampler=SubsetRandomSampler(train))
        self.held_out = held_out

    def val_dataloader(self):
        return DataLoader(self.train, batch_size=2, sampler=SubsetRandomSampler(self.held_out))


class Parted(Module):
    """The same samples by `Subset`s."""

    def train_dataloader(self):
        return DataLoader(Subset(self.train, TRAIN), batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Subset(self.train, HELD_OUT), batch_size=2)


class Every(Sampler):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(range(self.length))


@pytest.mark.parametrize("data", [tensors(), Plain(tensors())], ids=["fast", "one by one"])
@pytest.mark.parametrize("indices", [list, torch.tensor])
def test_a_subset_sampler_is_a_subset_in_training_and_in_measuring(data, indices):
    split = FederatedData(Split(data, indices(TRAIN), indices(HELD_OUT)), Iid(), 2, 0)
    parted = FederatedData(Parted(data), Iid(), 2, 0)
    assert split.sizes == [3, 3] and sorted(split.labels()) == sorted(row % 5 for row in TRAIN)
    assert equal(split.test_batches(), parted.test_batches())
    for client in (1, 2):
        one, other = (fed.client(client).batches(generator(), num_epochs=2) for fed in (split, parted))
        assert equal(one, other)


def test_labels_for_a_partition_are_those_of_the_samples_that_are_picked():
    fed = FederatedData(Split(tensors(), [1, 3, 6, 8]), ClassesPerClient(1), 2, 0)
    held = [{int(y) for _, ys in values(fed.client(i).batches(generator(), num_epochs=1)) for y in ys} for i in (1, 2)]
    assert sorted(map(sorted, held)) == [[1], [3]]


@pytest.mark.parametrize("copied", [False, True])
def test_a_weighted_sampler_draws_within_each_client_by_its_weights(copied):
    """Class 0 of 5 has the weight of the four others together: half of the draws, though a fifth of the samples."""
    weights = [4.0 if row % 5 == 0 else 1.0 for row in range(50)]
    fed = FederatedData(Module(tensors(), batch_size=5, sampler=WeightedRandomSampler(weights, 50)), Iid(), 2, 0)
    for client in (1, 2):
        mine, own = fed.make_client(client, copied=copied), fed.indices(client).tolist()
        drawn = [int(x) // 2 for xs, _ in values(mine.batches(generator(), num_epochs=80)) for x in xs[:, 0]]
        assert len(drawn) == 80 * 25 and set(drawn) == set(own)
        total = sum(weights[row] for row in own)
        for row, count in Counter(drawn).items():
            mean = 2000 * weights[row] / total
            assert abs(count - mean) < 5 * mean**0.5
    assert [num for _, num in mine.in_order()] == [5] * 5  # what is measured is measured once


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ({"sampler": Every(50)}, "the sampler of train_dataloader() is Every, which cannot be used"),
        (
            {"batch_sampler": [[0, 1], [2]]},
            "the batch_sampler of train_dataloader() is list, whose batches cannot be used where samples are divided among "
            "clients: give batch_size in its place",
        ),
        (
            {"batch_sampler": BatchSampler(Every(50), 4, False)},
            "the sampler of train_dataloader() is Every, which cannot be used",
        ),
        (
            {"sampler": RandomSampler(range(50), num_samples=10)},
            "the RandomSampler of train_dataloader() gives 10 of 50 samples, but",
        ),
        ({"sampler": RandomSampler(range(50), replacement=True)}, "gives 50 of 50 samples with replacement, but"),
        (
            {"sampler": SequentialSampler(range(30))},
            "the SequentialSampler of train_dataloader() gives 30 of 50 samples",
        ),
        ({"sampler": WeightedRandomSampler([1.0] * 50, 9)}, "has num_samples=9 and replacement=True, but"),
        ({"sampler": WeightedRandomSampler([1.0] * 9, 50)}, "has 9 weights for 50 samples: give one for each"),
        ({"sampler": SubsetRandomSampler([0, 50])}, "has indices 0 to 50: give indices from 0 to 49"),
        (
            {"batch_size": None},
            "the batch_size of train_dataloader() is None, so that each item of its data set is a batch, and samples cannot be",
        ),
        ({"sampler": SubsetRandomSampler([])}, "has indices none: give indices from 0 to 49"),
        (
            {"sampler": WeightedRandomSampler([1.0] * 25 + [0.0] * 25, 50)},
            "has weight 0 for all samples of client 2: give weights above 0, or another partition",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(loader, message):
    halves = type("Halves", (Iid,), {"assign": lambda *_: np.split(np.arange(50), 2)})()
    with pytest.raises(BadInput) as refused:
        FederatedData(Module(tensors(), **{"batch_size": 1, **loader} if "sampler" in loader else loader), halves, 2, 0)
    assert message in str(refused.value)


def test_a_plain_batch_sampler_gives_its_size():
    module = Module(tensors(), batch_sampler=BatchSampler(SubsetRandomSampler(TRAIN), 4, True))
    fed = FederatedData(module, Iid(), 1, 0)
    assert (fed.batch_size, fed.drop_last, fed.sizes) == (4, True, [6])


def test_the_model_is_measured_on_each_sample_once():
    class Weighted(Module):
        def val_dataloader(self):
            return DataLoader(self.train, sampler=WeightedRandomSampler([1.0] * 50, 50))

    with pytest.raises(
        BadInput, match=r"the sampler of val_dataloader\(\) is a WeightedRandomSampler, but an evaluation"
    ):
        FederatedData(Weighted(tensors()), Iid(), 2, 0).test_batches()


def test_indices_of_a_subset_may_count_from_the_end():
    rows = TensorDataset(torch.arange(12.0)[:, None])
    parts = Subset(Subset(rows, range(-8, 0)), [-1, 0, 2])
    fetch, is_fast = fetcher(parts, default_collate)
    assert is_fast
    assert torch.equal(fetch(torch.arange(3))[0], default_collate([parts[i] for i in range(3)])[0])
