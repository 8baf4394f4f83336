"""The pull of a proximal term in half precision."""

from __future__ import annotations

import torch
from torch import nn

from raafl.local.trainable import ProximalTerm


def test_a_pull_at_its_anchor_leaves_a_half_precision_gradient_as_it_is():
    """0.01 + 100 is 100 in bfloat16: the gradient would be gone."""
    weight = nn.Parameter(torch.tensor([100.0, 100.0], dtype=torch.bfloat16))
    weight.grad = torch.full_like(weight, 0.01)
    before = weight.grad.clone()
    pull = ProximalTerm([weight], [torch.tensor([100.0, 99.0], dtype=torch.bfloat16)])
    pull.add_to_gradients(1.0)
    assert weight.grad[0] == before[0] and weight.grad[1] == torch.tensor(1.01).bfloat16()
