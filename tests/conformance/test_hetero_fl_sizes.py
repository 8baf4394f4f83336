"""HeteroFL's MNIST network (Diao et al. 2021, Table 1): its five levels have the published numbers of parameters."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from model_zoo import VGG
from raafl.parts.select.units import leading
from raafl.submodel import Submodels


@pytest.fixture(scope="module")
def submodels():
    return Submodels(
        VGG([64, "pool", 128, "pool", 256, "pool", 512], 1),
        [torch.zeros(2, 1, 28, 28), torch.zeros(2, dtype=torch.int64)],
    )


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
