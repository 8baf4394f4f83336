"""Adan against its equations, written out with one number at a time."""

from __future__ import annotations

import math

import pytest
import torch

from model_zoo.adamw import adamw
from model_zoo.adan import Adan


def test_three_steps_by_the_equations():
    lr, b1, b2, b3, eps, decay = 0.1, 0.9, 0.8, 0.7, 1e-3, 0.5
    theta, m, v, n, previous = 1.0, 0.0, 0.0, 0.0, None
    parameter = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = Adan([parameter], lr, (b1, b2, b3), eps, decay)
    for k, g in enumerate((2.0, -1.0, 0.5), start=1):
        d = 0.0 if previous is None else g - previous
        m, v, n = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * d, b3 * n + (1 - b3) * (g + b2 * d) ** 2
        move = m / (1 - b1**k) + b2 * v / (1 - b2**k)
        theta = (theta - lr * move / (math.sqrt(n / (1 - b3**k)) + eps)) / (1 + lr * decay)
        previous = g
        parameter.grad = torch.tensor([g], dtype=torch.float64)
        optimizer.step()
        assert parameter.item() == pytest.approx(theta, rel=1e-12)


def test_it_finds_a_minimum_and_leaves_alone_what_has_no_gradient():
    torch.manual_seed(0)
    one, other = (torch.nn.Parameter(torch.randn(5)) for _ in range(2))
    before, optimizer = other.clone(), Adan([one, other], lr=0.05)
    for _ in range(400):
        optimizer.zero_grad()
        (one - 3).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(one.detach(), torch.full((5,), 3.0), atol=0.2, rtol=0)
    assert torch.equal(before, other)


def test_models_take_it_by_name():
    layer = torch.nn.Linear(2, 3)
    assert isinstance(adamw(layer, 0.1, 0.5, 0, "adan"), Adan)
    warm = adamw(layer, 0.1, 0.5, 4, "adan")
    assert warm["optimizer"].param_groups[0]["lr"] == pytest.approx(0.025)
    with pytest.raises(ValueError, match=r"optimizer is 'adam': give one of adamw, adan"):
        adamw(layer, 0.1, 0.5, 0, "adam")
    with pytest.raises(ValueError, match="Adan: lr -1"):
        Adan([torch.zeros(1)], lr=-1)


@pytest.mark.parametrize("name", ["ViT", "BERT", "LLaMA"])
def test_transformers_of_the_zoo_train_with_it(name):
    pytest.importorskip("transformers")
    import model_zoo

    assert isinstance(getattr(model_zoo, name)("micro", optimizer="adan").configure_optimizers(), Adan)
