"""The mean of gradients over the processes of one client, in dtypes that are summed in another."""

from __future__ import annotations

import torch
from torch import nn

from raafl.local.client_group import Buckets


def test_complex_and_half_precision_gradients_are_summed_as_float32():
    """The other process has the same gradient: the sum is twice it, and the mean is it."""
    wave = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    half = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    summed = []

    def twice(flat):
        summed.append(flat.dtype)
        return lambda: flat.mul_(2)

    buckets = Buckets([wave, half], twice)
    wave.grad, half.grad = torch.full_like(wave, 1 + 2j), torch.full_like(half, 0.3)
    before = half.grad.clone()
    buckets.end()
    buckets.average(2, [1.0, 1.0])
    assert wave.grad.tolist() == [[1 + 2j, 1 + 2j]] * 2 and torch.equal(half.grad, before)
    assert summed == [torch.float32, torch.float32]
