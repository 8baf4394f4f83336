"""Predicted costs against the layouts, and against sums done by hand."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from model_zoo import CNN, MLP
from raafl.submodel import FULL, Spec, Submodels, depth_window
from raafl.submodel import cost as cost_module
from raafl.submodel.cost import meta_batch
from tests.submodel import networks
from tests.submodel.models import built, named_specs

LABELS = torch.zeros(2, dtype=torch.long)


@settings(deadline=None, max_examples=40)
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
    spec = Spec.keep({"layers.1": [0, 6], "layers.3": range(4)})
    assert submodels.cost(spec, batch_size).flops_per_sample == mlp_flops([8, 2, 4, 3], 1)


def test_flops_of_convolutions_by_hand():
    submodels = Submodels(CNN(2, 8, (3, 5), (6, 4), 10), (torch.zeros(2, 2, 8, 8), LABELS))
    conv1 = (
        3 * 2 * 25 * 8 * 8
    )  # multiplications per sample; the second convolution sees 4 x 4 pixels, the first linear 2 x 2
    conv2 = 5 * 3 * 25 * 4 * 4
    linear = 5 * 4 * 6 + 6 * 4 + 4 * 10
    assert submodels.cost(FULL, 2).flops_per_sample == 4 * conv1 + 6 * (conv2 + linear)


def test_peak_memory_of_an_mlp_by_hand():
    batch_size, weights = 16, 4 * (8 * 7 + 7 + 7 * 3 + 3)
    submodels = Submodels(MLP(8, (7,), 3), (torch.zeros(2, 8), LABELS))
    inputs, labels = batch_size * 8 * 4, batch_size * 8
    saved = (
        batch_size * 7 * 4 + batch_size * 3 * 4 + 4
    )  # the relu's output, the log-softmax, and the loss's total weight
    for slots in (0, 1, 2):
        cost = submodels.cost(FULL, batch_size, num_optimizer_slots=slots)
        assert cost.peak_bytes == weights * (2 + slots) + inputs + labels + saved


def test_frozen_layers_cost_no_gradients():
    submodels = Submodels(MLP(8, (7, 5), 3), (torch.zeros(2, 8), LABELS))
    head = submodels.cost(Spec.keep(trained=["layers.5"]), 4)
    assert head.flops_per_sample == 2 * (8 * 7 + 7 * 5) + 4 * 5 * 3
    assert head.up_bytes == 4 * (5 * 3 + 3) and head.down_bytes == submodels.cost(FULL, 4).down_bytes
    assert head.peak_bytes < submodels.cost(FULL, 4).peak_bytes


def test_only_the_number_of_indices_matters_and_it_is_measured_once(monkeypatch):
    submodels = Submodels(MLP(8, (7,), 3), (torch.zeros(2, 8), LABELS))
    first = submodels.cost(Spec.keep({"layers.1": [0, 3, 6]}), 4)
    monkeypatch.setattr(cost_module, "predict", lambda *args: pytest.fail("measured again"))
    assert submodels.cost(Spec.keep({"layers.1": range(2, 5)}), 4) is first


class Reads(MLP):
    """A step that reads a value, which a meta tensor does not have."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.last = loss.item()
        return loss


def test_a_step_that_reads_values_is_three_forward_passes():
    submodels = Submodels(Reads(8, (7,), 3), (torch.zeros(2, 8), LABELS))
    assert submodels.cost(FULL, 4).flops_per_sample == 6 * (8 * 7 + 7 * 3)


def test_without_a_batch_or_a_step():
    model = nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3))
    assert Submodels(model).cost(FULL, 4).flops_per_sample == 6 * (8 * 7 + 7 + 7 * 3 + 3)  # six per parameter
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


class Task(nn.Module):
    """A model of transformers and a loss over its logits."""

    def __init__(self, name):
        super().__init__()
        self.model = networks.CASES[name].make()

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        return networks.output(self.model, batch).square().mean()


@pytest.mark.parametrize(("heads", "units"), [(3, 7), (1, 7), (2, 3)])
def test_flops_of_attention_by_hand(heads, units):
    submodels = Submodels(Task("vit"), networks.pixels())
    kept = {
        f"model.vit.layers.{i}.{axis}": range(n) for i in range(2) for axis, n in (("heads", heads), ("ffn", units))
    }
    positions, width, inside = 5, 12, heads * 4  # four patches and the class token
    projections = 4 * positions * width * inside + 2 * positions * width * units
    scores = 2 * positions * positions * inside  # q k^T, and the weights times v; the backward pass makes q k^T again
    patches, classes = 4 * 3 * 4 * 4 * width, 4 * width
    by_hand = 2 * (2 * (3 * projections + 3.5 * scores) + 2 * patches + 3 * classes)
    assert submodels.cost(Spec.keep(kept), 2).flops_per_sample == by_hand


def test_blocks_below_a_window_cost_one_forward_pass():
    submodels = Submodels(Task("vit"), networks.pixels())
    positions, width = 5, 12
    projections, scores = positions * width * (4 * width + 2 * 7), 2 * positions * positions * width
    below, above = projections + scores + 4 * 48 * width, 3 * projections + 3.5 * scores + 3 * 4 * width
    cost, full = submodels.cost(depth_window(submodels, 1, 2), 2), submodels.cost(FULL, 2)
    assert cost.flops_per_sample == 2 * (below + above)
    assert cost.up_bytes < full.up_bytes / 1.5 and cost.peak_bytes < full.peak_bytes / 1.5
    assert cost.down_bytes == full.down_bytes
    assert submodels.cost(depth_window(submodels, 0, 1), 2).down_bytes < full.down_bytes


def saved_bytes(module, batch):
    """Bytes that a real forward pass saves for the backward pass, and those of the batch."""
    own = {tensor.untyped_storage().data_ptr() for tensor in [*module.parameters(), *module.buffers()]}
    saved = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage  # held on to, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        module.train().training_step(batch, 0)
    for tensor in batch.values():
        note(tensor)
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize(
    "name", ["vit", "vit_eager", "distilbert", "llama", "mistral", "albert", "encoder", "both_ways"]
)
@pytest.mark.parametrize("half", [False, True])
def test_predicted_activations_are_those_that_a_real_step_saves(name, half):
    torch.manual_seed(0)
    batch = {key: torch.cat([value] * 8) for key, value in networks.CASES[name].inputs().items()}
    task = Task(name)
    for part in task.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    submodels = Submodels(task, batch)
    spec = Spec.keep({n: range(axis.size // 2 + 1) for n, axis in submodels.axes.items()}) if half else FULL
    shrunk = submodels.shrink(spec)
    submodels.plan(spec, "present").gather(submodels.state(task), out=shrunk.present)
    parameters = sum(p.numel() * p.itemsize for p in shrunk.module.parameters())
    predicted = submodels.cost(spec, 16).peak_bytes - shrunk.present.num_bytes - 2 * parameters
    assert predicted == pytest.approx(saved_bytes(shrunk.module, batch), rel=0.15)
