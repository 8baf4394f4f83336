"""Data sets and data modules for the tests of federated data."""

import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset, TensorDataset


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def tensors(n=50):
    return TensorDataset(torch.arange(2.0 * n).reshape(n, 2), torch.arange(n) % 5)


class Plain(Dataset):
    """The same samples as a TensorDataset, but nothing that could be picked up fast."""

    def __init__(self, base):
        self.base, self.num_reads = base, 0

    def __len__(self):
        return len(self.base)

    def __getitem__(self, index):
        self.num_reads += 1
        return self.base[index]


class Module(LightningDataModule):
    def __init__(self, train, test=None, **loader):
        super().__init__()
        self.train, self.test, self.loader, self.calls = train, test, loader or {"batch_size": 8, "shuffle": True}, []

    def prepare_data(self):
        self.calls.append("prepare")

    def setup(self, stage):
        self.calls.append(stage)

    def train_dataloader(self):
        return DataLoader(self.train, **self.loader)


def values(sized):
    """The batches, without their numbers of samples."""
    return [batch for batch, _ in sized]


def equal(first, second):
    """Whether both give the same batches with the same numbers of samples."""
    first, second = list(first), list(second)
    assert len(first) == len(second)
    for (a, num), (b, other) in zip(first, second, strict=True):
        assert num == other and type(a) is type(b) and len(a) == len(b)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    return True


def set_up(module):
    """Prepare a data module and read its training set, as a run does; return it."""
    module.prepare_data()
    module.setup("fit")
    return module
