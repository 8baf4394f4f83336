"""Values that a model is given for a trial step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from raafl.submodel.isolated_run import draw, draw_


@pytest.mark.parametrize(
    ("name", "noise", "expected"),
    [
        ("norm.weight", [1.0, -2.0], [1.1, 0.8]),  # about 1, so that a norm scales by it, and no sign flips
        ("fc.bias", [1.0, -2.0], [0.1, -0.2]),
        ("fc.weight", [[1.0, -2.0, 3.0, 4.0]] * 2, [[0.5, -1.0, 1.5, 2.0]] * 2),  # divided by the root of four inputs
        ("conv.weight", [[[[3.0] * 3] * 3]], [[[[1.0] * 3] * 3]]),
        ("one.weight", [[3.0], [1.0]], [[3.0], [1.0]]),
        ("nothing.weight", [[], []], [[], []]),
    ],
)
def test_values_are_of_the_size_that_new_layers_have(name, noise, expected):
    value = torch.full_like(torch.tensor(noise), math.nan)
    draw_(name, value, torch.tensor(noise))
    assert torch.allclose(value, torch.tensor(expected))


def test_each_value_is_another_by_the_seed_and_integers_are_zero():
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    module.count = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    draw(module, 0)
    first = torch.cat([p.detach().flatten() for p in module.parameters() if p.is_floating_point()])
    assert len(set(first.tolist())) == len(first) and module.count.tolist() == [0, 0]
    draw(module, 0)
    assert torch.equal(first, torch.cat([p.detach().flatten() for p in module.parameters() if p.is_floating_point()]))
    draw(module, 1)
    assert not torch.equal(module[0].bias.detach(), first[12:16])
