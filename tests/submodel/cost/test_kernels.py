"""What kernels do beside what operands and results say, by hand, and the time that it takes."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from model_zoo import CNN
from raafl.core.algorithm import SelectContext, Training
from raafl.core.state import GlobalState
from raafl.core.types import ClientInfo, Work
from raafl.devices.profiles import Profile
from raafl.parts.select.units import Budget
from raafl.submodel import FULL, Submodels
from raafl.submodel.cost import kernels
from raafl.submodel.cost.ledger import Ledger

LABELS = torch.zeros(2, dtype=torch.long)


def test_products_with_experts_matrices_are_counted():
    rows, matrices, ends = torch.ones(6, 16), torch.ones(2, 16, 8), torch.tensor([2, 6], dtype=torch.int32)
    with Ledger() as ledger:
        torch._grouped_mm(rows.bfloat16(), matrices.bfloat16(), offs=ends)
    assert ledger.flops == 2 * 6 * 16 * 8


def work_of(call):
    with Ledger() as ledger:
        call()
    return ledger.moved_bytes, ledger.padding_flops


@pytest.mark.parametrize("block", [8, 16])
def test_what_kernels_do_beside_counts(block, monkeypatch):
    monkeypatch.setattr(kernels, "_BLOCK", block)
    with torch.device("meta"):
        x, conv = torch.empty(2, 4, 6, 6), nn.Conv2d(4, 8, 3, padding=1, bias=False)
        images, values = torch.empty(2, 8, 6, 6), torch.empty(3, 1000)
    inputs, outputs, weights, flops = 4 * 2 * 4 * 36, 4 * 2 * 8 * 36, 4 * 8 * 4 * 9, 2 * 4 * 9 * 2 * 8 * 36
    # in the forward pass four channels are few enough to be read as they are, and the output comes in blocks
    more = block // 8
    copies, plain = more * (weights + outputs), inputs + weights + outputs
    assert work_of(lambda: conv(x).detach()) == (int(0.75 * (plain + copies)), (more - 1) * flops)
    # for the gradient of the weights the input is padded to eight channels with either, half of them for nothing
    gradient = outputs
    copies, plain = 2 * inputs + 2 * weights + gradient, gradient + inputs + weights + weights
    masks = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1, (False, True, False))
    backward = work_of(lambda: torch.ops.aten.convolution_backward(images, x, conv.weight, None, *masks))
    assert backward == (int(0.75 * (plain + copies)), flops)
    # drawn one by one
    assert work_of(lambda: values.bernoulli_(0.5)) == (8.5 * 2 * 4 * 3000, 0)


def test_padding_takes_time_where_the_speed_of_memory_is_known(monkeypatch):
    module = CNN(channels=(4, 8), hidden=(8, 8), image_size=8)
    monkeypatch.setattr(kernels, "_BLOCK", 16)
    wide = Submodels(module, (torch.zeros(2, 1, 8, 8), LABELS)).cost(FULL, 4)
    monkeypatch.setattr(kernels, "_BLOCK", 8)
    submodels = Submodels(module, (torch.zeros(2, 1, 8, 8), LABELS))
    cost = submodels.cost(FULL, 4)
    assert 0 < cost.padding_flops_per_sample < wide.padding_flops_per_sample
    assert cost.flops_per_sample == wide.flops_per_sample
    info, state = ClientInfo(1, 10), GlobalState(submodels, submodels.state(module))
    for bytes_per_s, padding in ((None, 0.0), (math.inf, cost.padding_flops_per_sample)):
        client = replace(info, profile=Profile(flops_per_s=1e6, bytes_per_s=bytes_per_s))
        fleet = SelectContext(state, {1: client}, random.Random(0), Training(num_epochs=1), 4)
        seconds = 10 * (cost.flops_per_sample + padding) / 1e6
        assert fleet.task_time(client, Work(FULL)).compute_s == pytest.approx(seconds)
        budget = Budget(seconds=1.0, profile=client.profile, samples=10)
        assert budget.needs(cost)["seconds"] == pytest.approx(seconds)
