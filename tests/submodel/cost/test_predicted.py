"""Predicted costs against the layouts, and against sums done by hand."""

from __future__ import annotations

import sys
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from torch import nn

from model_zoo import CNN, MLP, ViT
from raafl.core.select import time_on
from raafl.devices.profiles import Profile
from raafl.submodel import FULL, Spec, Submodels, depth_window
from raafl.submodel.cost import predicted as cost_module
from raafl.submodel.depth import give_exits
from raafl.submodel.nested_batch import meta_batch
from tests.submodel import networks
from tests.submodel.models import built, named_specs

LABELS = torch.zeros(2, dtype=torch.long)


@given(named_specs)
def test_parameters_and_bytes_are_exactly_the_measured_ones(named):
    name, spec = named
    _, submodels, _ = built(name)
    cost, shrunk = submodels.cost(spec, 4), submodels.shrink(spec)
    assert cost.params == sum(p.numel() for p in shrunk.module.parameters())
    assert cost.down_bytes == sum(b.numel() * b.itemsize for b in shrunk.present.buffers.values())
    assert cost.up_bytes == sum(b.numel() * b.itemsize for b in shrunk.trained.buffers.values())


def mlp_flops(widths, samples):
    """Two for each weight and sample, three times: forward, weights' gradient, inputs' gradient; not the data's."""
    weights = [a * b for a, b in pairwise(widths)]
    return samples * (6 * sum(weights) - 2 * weights[0])


@pytest.mark.parametrize("batch_size", [1, 5])
def test_flops_of_an_mlp_by_hand(batch_size):
    submodels = Submodels(MLP(8, (7, 5), 3), (torch.zeros(2, 8), LABELS))
    assert submodels.cost(FULL, batch_size).flops_per_sample == mlp_flops([8, 7, 5, 3], 1)
    spec = Spec.select({"layers.1": [0, 6], "layers.3": range(4)})
    assert submodels.cost(spec, batch_size).flops_per_sample == mlp_flops([8, 2, 4, 3], 1)


def test_flops_of_convolutions_by_hand():
    submodels = Submodels(CNN(2, 8, (3, 5), (6, 4), 10), (torch.zeros(2, 2, 8, 8), LABELS))
    # multiplications per sample; the second convolution sees 4 x 4 pixels, the first linear 2 x 2
    conv1 = 3 * 2 * 25 * 8 * 8
    conv2 = 5 * 3 * 25 * 4 * 4
    linear = 5 * 4 * 6 + 6 * 4 + 4 * 10
    assert submodels.cost(FULL, 2).flops_per_sample == 4 * conv1 + 6 * (conv2 + linear)


class Sum(nn.Module):
    """A layer of 8 inputs and 3 outputs, and the sum of its outputs as the loss."""

    def __init__(self, optimizer=None):
        super().__init__()
        self.layer, self.optimizer = nn.Linear(8, 3), optimizer

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


MATRIX, VALUES = 4 * 8 * 3, 4 * (8 * 3 + 3)
OPTIMIZERS = {
    # bytes of the state, and of what the optimiser's step needs for a moment
    "SGD": (torch.optim.SGD, 0, 0),
    "momentum": (partial(torch.optim.SGD, momentum=0.9), VALUES, 0),
    # two moments and a count of steps for each tensor; the root of the second moment, and the root divided
    "AdamW": (torch.optim.AdamW, 2 * VALUES + 2 * 4, 2 * MATRIX),
}


@pytest.mark.parametrize("batch_size", [1, 100])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_peak_memory_by_hand(name, batch_size):
    optimizer, state, moment = OPTIMIZERS[name]
    outputs, loss = batch_size * 3 * 4, 4
    # forward: outputs and their sum; backward: the loss, its gradient, those of matrix and bias
    passes = max(outputs + loss, 2 * loss + VALUES)
    step = max(passes + state, VALUES + state + moment)
    held = 2 * VALUES + batch_size * 8 * 4  # the values as received and in the module, and the batch
    assert Submodels(Sum(optimizer), torch.zeros(2, 8)).cost(FULL, batch_size).peak_bytes == held + step


@pytest.mark.parametrize(
    "answer", [lambda one: [one], lambda one: [{"optimizer": one}], lambda one: ({"optimizer": one},)]
)
def test_an_optimizer_in_a_list_of_one_is_followed_like_the_optimizer(answer):
    batch = torch.zeros(2, 8)
    alone = Submodels(Sum(torch.optim.AdamW), batch).cost(FULL, 8)
    listed = Submodels(Sum(lambda parameters: answer(torch.optim.AdamW(parameters))), batch).cost(FULL, 8)
    assert not listed.guessed and listed == alone


def test_the_optimisers_state_is_guessed_only_where_its_step_cannot_run():
    def impossible(parameters):
        raise RuntimeError("there is no trainer")

    passes, held = 2 * 4 + VALUES, 2 * VALUES + 8 * 4
    for optimizer in (None, impossible):
        submodels = Submodels(Sum(optimizer), torch.zeros(2, 8))
        cost = submodels.cost(FULL, 1)
        assert cost.peak_bytes == held + passes + 2 * VALUES  # as Adam's
        assert cost.guessed.startswith("the optimiser's step cannot be followed without values (")
        assert cost.guessed.endswith("): 2 values are assumed for each trained one")
    assert "(RuntimeError: there is no trainer)" in cost.guessed
    known = Submodels(Sum(torch.optim.SGD), torch.zeros(2, 8))
    assert known.cost(FULL, 1).peak_bytes == held + passes and known.cost(FULL, 1).guessed == ""
    # nothing but the optimiser's step can run: gradients are there, activations unknown
    blind = Submodels(Sum(torch.optim.SGD))
    assert blind.cost(FULL, 1).peak_bytes == 3 * VALUES


def test_moved_bytes_by_hand():
    cost = Submodels(Sum(torch.optim.SGD), torch.zeros(2, 8)).cost(FULL, 10)
    inputs, outputs, bias = 10 * 8 * 4, 10 * 3 * 4, 3 * 4
    # of a product with a bias 1.2 times what is read and written counts, of one without 0.7 times, of a sum as well
    forward = 1.2 * (inputs + MATRIX + bias + outputs) + 0.7 * (outputs + 4)
    # the loss's gradient is made of the loss, and read as one value for all outputs: times the inputs, and summed
    backward = (4 + 4) + 0.7 * (4 + inputs + MATRIX) + 0.7 * (4 + bias)
    update = 0.45 * 3 * VALUES  # values and gradients are read, values written
    assert 10 * cost.moved_bytes_per_sample == pytest.approx(forward + backward + update, abs=8)  # whole bytes of each


class Slopes(nn.Module):
    """Two layers and a loss, whose operations can be counted."""

    def __init__(self, optimizer=torch.optim.SGD):
        super().__init__()
        self.one, self.two, self.optimizer = nn.Linear(3, 4, bias=False), nn.Linear(4, 2), optimizer

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.mse_loss(self.two(self.one(x).relu()), y)

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=0.1)


def test_operations_of_a_step_by_hand():
    """Each that is no view is a launch; the optimiser's are those of one parameter, however many there are."""
    batch = torch.zeros(8, 3), torch.zeros(8, 2)
    # forward: product, relu, product with bias, loss. Backward: its first gradient, the loss's, two products and a sum of the
    # second layer, relu's, a product of the first, whose input wants none. SGD: one addition.
    assert Submodels(Slopes(), batch).cost(FULL, 8).kernels_per_sample == (4 + 7 + 1) / 8
    # Adam: the moments' two and a half of three operations, their correction, and the step
    adam = Submodels(Slopes(torch.optim.Adam), batch).cost(FULL, 8).kernels_per_sample * 8 - 11
    assert 5 <= adam <= 9
    cost = Submodels(Slopes(), batch).cost(FULL, 8)
    slow = Profile(flops_per_s=1e24, launch_s=0.5)
    assert time_on(slow, cost, 16).compute_s == pytest.approx(2 * 12 * 0.5)


def test_of_a_table_only_the_rows_looked_up_move():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(1000, 4)
            self.table.weight.requires_grad_(False)

        def training_step(self, batch, batch_idx):
            return self.table(batch)

    cost = Submodels(Words(), torch.zeros(2, 5, dtype=torch.long)).cost(FULL, 1)
    assert cost.moved_bytes_per_sample == 5 * 8 + 2 * 5 * 4 * 4


def test_frozen_layers_cost_no_gradients():
    submodels = Submodels(MLP(8, (7, 5), 3), (torch.zeros(2, 8), LABELS))
    head = submodels.cost(Spec.select(trained=["layers.5"]), 4)
    assert head.flops_per_sample == 2 * (8 * 7 + 7 * 5) + 4 * 5 * 3
    assert head.up_bytes == 4 * (5 * 3 + 3) and head.down_bytes == submodels.cost(FULL, 4).down_bytes
    assert head.peak_bytes < submodels.cost(FULL, 4).peak_bytes


def test_only_the_number_of_indices_matters_and_it_is_measured_once(monkeypatch):
    submodels = Submodels(MLP(8, (7,), 3), (torch.zeros(2, 8), LABELS))
    first = submodels.cost(Spec.select({"layers.1": [0, 3, 6]}), 4)
    monkeypatch.setattr(cost_module, "predict", lambda *args: pytest.fail("measured again"))
    assert submodels.cost(Spec.select({"layers.1": range(2, 5)}), 4) is first


def test_without_a_batch_or_a_step():
    model = nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3))
    blind = Submodels(model).cost(FULL, 4)
    assert blind.flops_per_sample == 6 * (8 * 7 + 7 + 7 * 3 + 3)  # six per parameter
    assert blind.guessed.startswith("there is no example batch: 6 FLOPs count for each parameter that trains, and no ")
    assert "; the optimiser's step cannot be followed" in blind.guessed
    assert Submodels(model, torch.zeros(2, 8)).cost(FULL, 4).flops_per_sample == 6 * (8 * 7 + 7 * 3)


def test_a_nested_batch_keeps_its_form():
    batch = {"x": torch.zeros(2, 3), "more": [torch.zeros(2), torch.zeros(5), 7]}
    meta = meta_batch(batch, 9)
    assert meta["x"].shape == (9, 3) and meta["x"].is_meta
    assert meta["more"][0].shape == (9,) and meta["more"][1].shape == (5,) and meta["more"][2] == 7


def test_predicting_logs_nothing_and_leaves_the_random_state_alone(recwarn):
    submodels = Submodels(MLP(8, (7,), 3, dropout=0.5), (torch.zeros(2, 8), LABELS))
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    submodels.cost(FULL, 4)
    assert torch.equal(torch.rand(1), expected)
    assert not [w for w in recwarn if "self.log" in str(w.message)]
    assert "torch.utils.flop_counter" in sys.modules


@pytest.mark.parametrize(("heads", "units"), [(3, 7), (1, 7), (2, 3)])
def test_flops_of_attention_by_hand(heads, units):
    submodels = Submodels(networks.Task("vit"), networks.pixels())
    kept = {
        f"model.vit.layers.{i}.{axis}": range(n) for i in range(2) for axis, n in (("heads", heads), ("ffn", units))
    }
    positions, width, inside = 5, 12, heads * 4  # four patches and the class token
    projections = 4 * positions * width * inside + 2 * positions * width * units
    scores = 2 * positions * positions * inside  # q k^T, and the weights times v; the backward pass makes q k^T again
    patches, classes = 4 * 3 * 4 * 4 * width, 4 * width
    by_hand = 2 * (2 * (3 * projections + 3.5 * scores) + 2 * patches + 3 * classes)
    assert submodels.cost(Spec.select(kept), 2).flops_per_sample == by_hand


def test_blocks_below_a_window_cost_one_forward_pass():
    submodels = Submodels(networks.Task("vit"), networks.pixels())
    positions, width = 5, 12
    projections, scores = positions * width * (4 * width + 2 * 7), 2 * positions * positions * width
    below, above = projections + scores + 4 * 48 * width, 3 * projections + 3.5 * scores + 3 * 4 * width
    cost, full = submodels.cost(depth_window(submodels, 1, 2), 2), submodels.cost(FULL, 2)
    assert cost.flops_per_sample == 2 * (below + above)
    frozen_bytes = cost.down_bytes - cost.up_bytes
    assert cost.up_bytes < full.up_bytes / 1.5
    # no optimiser state, and fewer gradients and activations
    assert full.peak_bytes - cost.peak_bytes > 2 * frozen_bytes
    assert cost.down_bytes == full.down_bytes
    assert submodels.cost(depth_window(submodels, 0, 1), 2).down_bytes < full.down_bytes


def test_an_exit_that_the_step_does_not_use_has_no_gradient():
    def cost(exits):
        module = ViT("micro")
        give_exits(module, exits)
        return Submodels(module, (torch.zeros(2, 3, 32, 32), LABELS)).cost(FULL, 4)

    with_it, without = cost([1]), cost([])
    head = 4 * (2 * 32 + 32 * 10 + 10)
    assert with_it.flops_per_sample == without.flops_per_sample
    assert with_it.down_bytes - without.down_bytes == head
    assert with_it.peak_bytes - without.peak_bytes == 2 * head  # as received, and in the module


def test_launches_on_a_gpu_by_hand():
    """Products, other operations, the optimizer's tensor by tensor; a dropout is one kernel forward and one backward."""
    batch = torch.zeros(8, 3), torch.zeros(8, 2)
    found = Submodels(Slopes(), batch).cost(FULL, 8).launches.times(8)
    # products: two forward, two of the second layer and one of the first backward; SGD: an addition for each of 3 tensors
    assert found[:4] == pytest.approx((1, 4 + 7 - 5, 5, 3))
    # x (8, 3) by (3, 4), and the gradient of these weights; SGD's additions read two values of 4 bytes and write one
    product, update = (2, 2 * 8 * 3 * 4, 4 * (8 * 3 + 3 * 4 + 8 * 4)), (1, 0, 12 * (12 + 8 + 2))
    assert product in [pytest.approx(one) for one in found.kernels] and pytest.approx(update) == found.kernels[-1]
    assert found.captured() == (found.steps, 0, 0, 0, found.kernels)

    class Drops(Slopes):
        def training_step(self, batch, index):
            return super().training_step((nn.functional.dropout(batch[0]), batch[1]), index)

    dropping = Submodels(Drops(), batch).cost(FULL, 8)
    assert dropping.launches.operations * 8 == pytest.approx(found.operations + 1)
    assert dropping.kernels_per_sample * 8 == 12 + 3  # on a CPU: drawn, scaled, multiplied


def test_only_what_a_step_frees_again_is_in_a_graphs_memory():
    batch = torch.zeros(8, 3), torch.zeros(8, 2)
    plain, adam = (Submodels(Slopes(kind), batch).cost(FULL, 8) for kind in (torch.optim.SGD, torch.optim.Adam))
    # at the end of the backward pass: gradients, the loss, and no less than the activations before
    assert plain.pool_bytes >= 4 * (12 + 8 + 2) + 4
    state_bytes = 2 * 4 * (12 + 8 + 2)
    assert state_bytes <= adam.peak_bytes - plain.peak_bytes and adam.pool_bytes < plain.pool_bytes + state_bytes


@pytest.mark.parametrize("name", ["scaffold", "moon"])
def test_a_methods_own_step_has_its_optimizers_state_outside_a_graphs_memory(name):
    from raafl.algorithms import ALGORITHMS

    batch, local = (torch.zeros(8, 3), torch.zeros(8, 2)), ALGORITHMS[name]().local
    plain, adam = (
        local.cost(Submodels(Slopes(kind), batch), FULL, 8, {}) for kind in (torch.optim.SGD, torch.optim.Adam)
    )
    # Adam has two values for each trained one, and a count of steps for each tensor
    assert adam.peak_bytes - plain.peak_bytes == 2 * 4 * (12 + 8 + 2) + 3 * 4
    assert adam.pool_bytes == plain.pool_bytes < plain.peak_bytes
