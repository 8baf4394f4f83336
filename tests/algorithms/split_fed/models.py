"""Models that can be cut in two, and some that cannot."""

from __future__ import annotations

from collections.abc import Callable

import torch
from lightning import LightningModule
from torch import nn
from torch.nn import functional as F

from model_zoo import CNN, MLP
from raafl.submodel import Submodels


class Small(LightningModule):
    """What the models below share; a batch is (inputs, labels)."""

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch, index):
        return {"loss": self.training_step(batch, index)}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)


class Skip(Small):
    """The embedding goes around the block as well as into it, and ends in the sum."""

    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, x):
        h = self.embed(x.flatten(1))
        return self.head(h + F.relu(self.block(h)))


class Tied(Small):
    """One layer is used at the bottom and at the top."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.first(F.relu(self.first(x.flatten(1)))))


class Masked(Small):
    """A layer without parameters makes a mask of the inputs, which the head needs; the scale is the root's own parameter."""

    class Mask(nn.Module):
        def forward(self, x):
            return (x.flatten(1)[:, :8] > 0.5).float()

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((64,), 0.5))
        self.mask, self.low, self.head = self.Mask(), nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x):
        mask = self.mask(x)
        h = F.relu(self.low(x.flatten(1) * self.scale), inplace=True)
        return self.head(h * mask)


class Argmax(Small):
    """What the first layer likes best decides above without a gradient."""

    def __init__(self):
        super().__init__()
        self.low, self.high, self.head = nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, x):
        h = self.low(x.flatten(1))
        choice = F.one_hot(h.argmax(1), 8).float()
        return self.head(self.high(h) * choice)


class Conv(CNN):
    """Digits as small images, with batch norm."""

    def __init__(self):
        super().__init__(1, 8, (4, 8), (16, 12), 10, lr=0.05, momentum=0.5, batch_norm=True)

    def forward(self, x):
        return super().forward(x.view(-1, 1, 8, 8))


def mlp(dropout: float = 0.0) -> MLP:
    return MLP(64, (24, 16), 10, lr=0.05, momentum=0.5, dropout=dropout)


def submodels_of(make: Callable[[], nn.Module], num_samples: int = 2) -> Submodels:
    return Submodels(make(), [torch.zeros(num_samples, 64), torch.zeros(num_samples, dtype=torch.int64)])
