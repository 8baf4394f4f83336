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
from raafl.rules import Rules
from raafl.submodel import FULL, Submodels
from raafl.submodel.cost import kernels
from raafl.submodel.cost.fused import FusedKernels
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


def passes(net, device, revision):
    """A ledger of both passes through a layer, a net that runs over positions, and a sum."""
    layer, net, x = nn.Linear(5, 6).to(device), net.to(device), torch.randn(3, 7, 5, device=device)
    rules = Rules(revision)
    with Ledger(rules=rules) as ledger, FusedKernels(rules, ledger):
        net(layer(x))[0].sum().backward()
    return ledger


# forward: the layer's product, the first state's zeros, the sum; backward: the seed, the net's gradient with the batch
# first, the layer's gradients of weight and bias
OUTSIDE = 7


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_launches_within_a_loop_of_torch_take_less_time(kind, device):
    older, newer = (passes(kind(6, 8, batch_first=True), device, revision) for revision in (2, 3))
    assert newer.kernels == older.kernels and older.launches == older.kernels.total()
    assert newer.launches == pytest.approx(OUTSIDE + 0.22 * (older.launches - OUTSIDE))
    assert 0.5 * older.moved_bytes < newer.moved_bytes < 0.6 * older.moved_bytes


def test_an_lstm_of_one_kernel_is_a_launch_in_each_pass():
    older, newer = (passes(nn.LSTM(6, 8, batch_first=True), "meta", revision) for revision in (2, 3))
    # beside what is outside, the zeros of the first cells and a copy of a gradient: a fused kernel forward and one backward
    assert newer.launches == pytest.approx(OUTSIDE + 2 + 2 + 0.22 * (older.launches - OUTSIDE - 4))
    assert newer.moved_bytes > 0.99 * older.moved_bytes


class Words(nn.Module):
    """A mean over words' rows of a table, which may also be the matrix of the output."""

    def __init__(self, ties):
        super().__init__()
        self.table, self.ties = nn.Embedding(100, 16), ties

    def training_step(self, batch, index):
        rows = self.table(batch[0]).mean(1)
        return (rows @ self.table.weight.T if self.ties else rows).sum()


@pytest.mark.parametrize("ties", [False, True], ids=["alone", "tied"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_a_root_takes_its_time_by_the_rows_that_a_step_leaves_zero(kind, ties):
    moved = {}
    for revision in (2, 3):
        with torch.device("meta"):
            module, batch = Words(ties), [torch.zeros(4, 5, dtype=torch.long)]
        with Ledger(module.parameters(), Rules(revision)) as ledger:
            module.training_step(batch, 0).backward()
            before, optimizer = ledger.moved_bytes, kind(module.parameters())
            for _ in range(2):
                optimizer.step()
        moved[revision] = ledger.moved_bytes - before
    # of 100 rows 20 words leave exp(-20 / 100) as they are; a product with the table gives each a gradient
    times = 0.5 if ties else 0.5 + math.exp(-0.2) * 2.25
    assert moved[3] - moved[2] == pytest.approx(2 * (2 * 4 * 1600) * (times - 2.2), abs=2)


@pytest.mark.parametrize(("revision", "times"), [(2, 1), (3, 2)])
def test_the_gradient_of_a_batch_norm_is_there_twice_for_a_moment(revision, times):
    with torch.device("meta"):
        x, gradient, channels = torch.empty(2, 4, 6, 6), torch.empty(2, 4, 6, 6), torch.empty(4)
    known = (gradient, x, channels, None, None, channels, channels, True, 1e-5)
    with Ledger([x, gradient, channels], Rules(revision)) as ledger:
        torch.ops.aten.native_batch_norm_backward(*known, [True, False, False])
    assert ledger.peak_bytes == times * 4 * 288


def test_rules_decide_how_a_gpus_time_is_predicted_and_captured_steps_have_one_launch():
    submodels = Submodels(CNN(channels=(4, 8), hidden=(8, 8), image_size=8), (torch.zeros(2, 1, 8, 8), LABELS))
    cost, state = submodels.cost(FULL, 4), GlobalState(submodels, submodels.state(submodels.module))
    profile = Profile(flops_per_s=1e12, host_op_s=1e-5)
    client, work = ClientInfo(1, 8, profile), Work(FULL)
    fleet = SelectContext(state, {1: client}, random.Random(0), Training(num_epochs=1), 4)
    own = cost.launches.times(8)
    assert own.steps == 2
    assert fleet.task_time(client, work).compute_s == pytest.approx(profile.host_s(*own[:-1]))
    captured = replace(fleet, captured=True).task_time(client, work).compute_s
    assert captured == pytest.approx(max(2 * 40e-5, profile.device_s(own.kernels)))
    assert captured < profile.host_s(*own[:-1])
    older = replace(fleet, rules=Rules(3)).task_time(client, work).compute_s
    assert older == replace(fleet, rules=Rules(3), captured=True).task_time(client, work).compute_s
    assert older == pytest.approx(8 * cost.flops_per_sample / 1e12)
