"""HeteroFL's MNIST network (Diao et al. 2021, Table 1): its five levels have the published numbers of parameters."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from lightning import LightningModule
from torch import nn

from raafl.parts.select import leading
from raafl.submodel import Submodels


class PublishedCNN(LightningModule):
    """Four 3 x 3 convolutions of 64, 128, 256 and 512 channels with batch norm, pooling, and one linear layer."""

    def __init__(self):
        super().__init__()
        layers, channels = [], 1
        for width in (64, 128, 256, 512):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
            channels = width
        self.features = nn.Sequential(*layers[:-1], nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(512, 10)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.features(x)), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


@pytest.fixture(scope="module")
def submodels():
    return Submodels(PublishedCNN(), [torch.zeros(2, 1, 28, 28), torch.zeros(2, dtype=torch.int64)])


@pytest.mark.parametrize(("width", "parameters"), [(1.0, 1_556_874), (0.0625, 6_594)])
def test_levels_a_and_e_have_the_published_parameters(submodels, width, parameters):
    spec = leading(submodels.axes, width)
    assert submodels.cost(spec).params == parameters


def test_each_level_is_the_count_by_hand(submodels):
    """Of widths w: 10 w_1 for the first convolution and its bias, 9 w_i w_(i+1) + w_(i+1) for the others, 2 w_i, 10 w_4 + 10."""
    for width in (1.0, 0.5, 0.25, 0.125, 0.0625):
        w = [round(full * width) for full in (64, 128, 256, 512)]
        convolutions = 10 * w[0] + sum(9 * a * b + b for a, b in pairwise(w))
        assert submodels.cost(leading(submodels.axes, width)).params == convolutions + 2 * sum(w) + 10 * w[3] + 10
