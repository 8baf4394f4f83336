from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from model_zoo import CNN, MLP, ViT
from raafl.algorithms import q_vit
from raafl.algorithms.q_vit import Quantised, QuantisedConv2d, QuantisedLinear, mean_bits, quantise, quantised
from raafl.errors import BadInput
from raafl.parts.merge.mean import Mean
from raafl.parts.select.rate_select import RateSelect
from raafl.parts.select.submodels import Full
from raafl.submodel import Spec, Submodels, skeleton
from tests.helpers.refusals import refuses
from tests.helpers.small_runs import experiment, finish


def deep_mlp() -> MLP:
    """Two layers inside, so that bits are learned."""
    return MLP(64, (24, 16, 12), 10, lr=0.05, momentum=0.5)


def deep_cnn() -> CNN:
    return CNN(1, 8, (4, 6), (12, 8), 10, lr=0.05, batch_norm=True)


def test_every_argument_reaches_its_part():
    algorithm = q_vit(3, False, 6, 0.5, False)
    assert algorithm.select == Full() and q_vit(submodel=RateSelect()).select == RateSelect()
    assert algorithm.local == Quantised(3, False, 6, 0.5)
    assert algorithm.merge == Mean(by_samples=False)
    assert algorithm.describe()["local"].endswith("weights and inputs quantised, 3 bits, learned step sizes")


test_bad_arguments_are_named = refuses(
    q_vit,
    ({"bits": 1}, "bits is 1: give 2 to 8, or 32 for no quantisation"),
    ({"edge_bits": 16}, "edge_bits is 16"),
    ({"weight": 0.0}, "weight is 0.0: give a number above 0"),
)


X = [-2.0, -0.6, -0.2, 0.1, 0.4, 0.9, 1.3]
"""Over 1/2: -4, -1.2, -0.4, 0.2, 0.8, 1.8, 2.6. Levels of two bits are -2, -1, 0, 1."""


def levels(*bounds: float) -> list[torch.Tensor]:
    return [torch.tensor(bound, requires_grad=True) for bound in bounds]


def test_values_by_hand():
    x = torch.tensor(X)
    assert quantise(x, torch.tensor(0.5), *levels(-2.0, 1.0)).tolist() == [-1.0, -0.5, 0.0, 0.0, 0.5, 0.5, 0.5]
    assert quantise(x, torch.tensor(-0.5), *levels(0.0, 3.0)).tolist() == [0.0, 0.0, 0.0, 0.0, 0.5, 1.0, 1.5]
    assert quantise(x, torch.tensor(0.0), *levels(-2.0, 1.0)).tolist() == x.tolist()  # no step size yet


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gradients_agree_with_a_slow_reference(sign):
    """LSQ, value by value; g is what comes back from behind."""
    x, g = torch.tensor(X, requires_grad=True), torch.tensor([1.0, -2.0, 3.0, 0.5, -1.0, 2.0, 4.0])
    step, (low, high) = torch.tensor(0.5 * sign, requires_grad=True), levels(-2.0, 1.0)
    quantise(x, step, low, high, factor=0.25).backward(g)
    of_x, of_step, of_low, of_high = [], 0.0, 0.0, 0.0
    for value, back in zip(X, g.tolist(), strict=True):
        over = value / 0.5
        of_x.append(back if -2 < over < 1 else 0.0)
        of_step += back * (round(over) - over if -2 < over < 1 else max(-2.0, min(over, 1.0)))
        of_low += back * 0.5 if over < -2 else 0.0
        of_high += back * 0.5 if over > 1 else 0.0
    assert x.grad.tolist() == of_x
    assert step.grad.item() == pytest.approx(sign * of_step * 0.25)
    assert (low.grad.item(), high.grad.item()) == pytest.approx((of_low * 0.25, of_high * 0.25))


def test_where_all_is_clipped_gradients_are_those_of_finite_differences():
    """Rounding changes nothing there, and the function has a derivative."""
    x, g = torch.tensor([-3.0, 2.0, 5.0], dtype=torch.float64), torch.tensor([1.0, 2.0, -0.5], dtype=torch.float64)

    def f(step, high):
        return (quantise(x, step, torch.tensor(-2.0, dtype=torch.float64), high) * g).sum()

    step, high = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (0.5, 3.0))
    f(step, high).backward()
    h = 1e-6
    with torch.no_grad():
        assert step.grad.item() == pytest.approx((f(step + h, high) - f(step - h, high)).item() / (2 * h))
    assert high.grad.item() == pytest.approx(0.5 * (2.0 - 0.5))  # a level more is a step more


def one_layer(bits: int, learn: bool) -> QuantisedLinear:
    """The layer in the middle of three."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 2))
    layer = Quantised(bits, learn).prepare(model)[1]
    assert type(layer) is QuantisedLinear and isinstance(layer, nn.Linear)
    return layer


def test_a_layer_by_hand():
    layer = one_layer(2, learn=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.4, -0.6, 0.1]]).expand(4, 3))
        layer.bias.fill_(1.0)
        layer.weight_step.fill_(0.5)
        layer.input_step.fill_(1.0)
    # weights 0.5, -0.5, 0; inputs -0.6, 1.7, 9 -> -1, 1, 1 where there are negative ones, and 2, 3 of 0 to 3 where not
    output = layer(torch.tensor([[-0.6, 1.7, 9.0]]))
    assert output.tolist() == [[1.0 - 0.5 - 0.5] * 4]
    assert layer(torch.tensor([[0.6, 1.7, 9.0]])).tolist() == [[1.0 + 0.5 - 1.0] * 4]
    assert sum(1 for _ in layer.parameters()) == 4


def test_learned_bits_choose_levels_and_step_sizes():
    """A width has a step size of its own, and gets a gradient from what is clipped."""
    layer = one_layer(3, learn=True)
    assert layer.weight_step.shape == (7,) and layer.weight_bits.item() == 3.0
    mean = layer.weight.detach().abs().mean().item()
    expected = [2 * mean / math.sqrt(2 ** (bits - 1) - 1) for bits in range(2, 9)]
    assert layer.weight_step.tolist() == pytest.approx(expected)
    assert layer.input_step.tolist() == [0.0] * 7
    with torch.no_grad():
        layer.weight.fill_(0.9)
        layer.bias.zero_()
        layer.weight_step.copy_(torch.tensor([1.0, 0.2, 0.1, 1.0, 1.0, 1.0, 1.0]))
    x = torch.ones(1, 3)
    assert layer(x).tolist() == [[pytest.approx(3 * 0.6)] * 4]  # three bits: 3 levels of 0.2
    layer(x).sum().backward()
    most = 2 ** (3 - 1) - 1  # Q_p of the width that it has
    # 12 weights, each worth 0.2 a level; 2^(b-1) - 1 has the derivative ln 2 * 2^(b-1)
    assert layer.weight_bits.grad.item() == pytest.approx(12 * 0.2 * math.log(2) * 4 / math.sqrt(12 * most))
    assert layer.weight_step.grad[1].item() == pytest.approx(12 * 3 / math.sqrt(12 * most))
    assert layer.weight_step.grad[[0, 2, 3, 4, 5, 6]].abs().sum().item() == 0
    with torch.no_grad():
        layer.weight_bits.fill_(3.6)
    assert layer(x).tolist() == [[pytest.approx(3 * 0.7)] * 4]  # four bits: 7 levels of 0.1


def test_a_weight_that_begins_at_zero_gets_its_step_size_later():
    layer, x = one_layer(3, learn=False), torch.ones(2, 3)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight_step.zero_()
    layer.sees_first = True
    layer(x)
    assert layer.weight_step.item() == 0 and layer.input_step.item() > 0
    with torch.no_grad():
        layer.weight.fill_(0.5)
    layer(x)
    assert layer.weight_step.item() == 0, "set once in a task"
    layer.sees_first = True
    layer(x)
    assert layer.weight_step.item() == pytest.approx(2 * 0.5 / math.sqrt(3))


def test_the_mean_of_bits_is_weighed_by_weights():
    model = Quantised(4).prepare(deep_mlp())
    inner = [layer for layer in quantised(model) if layer.fixed_bits is None]
    assert [layer.weight.numel() for layer in inner] == [24 * 16, 16 * 12]
    with torch.no_grad():
        inner[0].weight_bits.fill_(6.0)
    assert mean_bits(list(quantised(model))).item() == pytest.approx(4 + 2 / 2 * 2 / 3)
    assert [layer.fixed_bits for layer in quantised(model)] == [8, None, None, 8]
    assert mean_bits(list(quantised(Quantised(4, learn_bits=False).prepare(deep_mlp())))) is None


@pytest.mark.parametrize("make", [deep_mlp, lambda: ViT("micro", 8, 4, 1), deep_cnn], ids=["mlp", "vit", "cnn"])
def test_axes_and_layout_are_those_of_the_model(make):
    """What may be cut is the same; a skeleton on a client has the tensors of the server's model."""
    torch.manual_seed(0)
    plain, model = Submodels(make()), Submodels(Quantised().prepare(make()))
    assert model.axes == plain.axes and model.axes
    assert set(plain.parameters) < set(model.parameters)
    with skeleton():
        bare = Quantised().prepare(make())
    assert Submodels(bare).layout() == model.layout()
    assert all(parameter.device.type == "meta" for parameter in bare.parameters())


def test_attention_of_torch_keeps_its_projections_and_encoder_layers_are_measured_as_they_train():
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = Quantised(2, learn_bits=False, edge_bits=2).prepare(nn.Sequential(block))
    assert [type(layer) for layer in (block.linear1, block.linear2)] == [QuantisedLinear] * 2
    assert not isinstance(block.self_attn.out_proj, QuantisedLinear)
    x = torch.randn(3, 5, 8)
    with torch.no_grad():
        assert torch.allclose(model.eval()(x), model.train()(x), atol=1e-6)


def test_costs_are_those_of_quantising_and_a_note_says_so():
    batch = (torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.long))
    plain, model = Submodels(deep_mlp(), batch), Submodels(Quantised().prepare(deep_mlp()), batch)
    before, after = (Quantised().cost(one, Spec(), 8, {}) for one in (plain, model))
    assert after.peak_bytes > before.peak_bytes and after.moved_bytes_per_sample > before.moved_bytes_per_sample
    # two layers with two steps, two with 2 * (7 + 1): they travel, and nothing is packed
    assert after.params - before.params == 2 * 2 + 2 * 2 * 8
    (note,) = Quantised().notes(model)
    assert note.startswith("q_vit quantises weight and input of 4 layers in floating point")
    assert Quantised().notes(plain) == ["q_vit quantises nothing here: it is plain averaging"]
    edges = Submodels(Quantised(3).prepare(MLP(64, (24,), 10)))
    assert Quantised(3).notes(edges)[1] == (
        "q_vit uses edge_bits (8) for the first and the last layer, and the model has no others: bits (3) has no effect"
    )
    assert len(Quantised(3, edge_bits=3).notes(edges)) == 1


def test_it_learns_also_in_submodels(tmp_path):
    def run(name, **more):
        algorithm = q_vit(bits=3, submodel=more.pop("submodel", None))
        return finish(experiment(tmp_path / name, algorithm, model=deep_mlp, max_updates=8, **more))

    losses = [float(row["loss"]) for row in run("one").rows("metrics.csv")]
    assert losses[-1] < losses[0]
    assert run("cut", submodel=RateSelect(rates=[1.0, 0.5])).summary["updates_merged"] == 8


def test_step_sizes_of_inputs_come_from_the_first_batch():
    """Until then inputs are not quantised; while measuring, nothing is set. A layer may train in eval mode."""
    model = Quantised(4, learn_bits=False, edge_bits=4).prepare(nn.Sequential(nn.Linear(2, 3)))
    (layer,) = quantised(model)
    x = torch.tensor([[1.0, -2.0], [3.0, -4.0]])
    layer.eval()(x)
    assert layer.input_step.item() == 0
    layer.sees_first = True  # as the hook of a task does
    layer(x)
    assert layer.input_step.item() == pytest.approx(2 * 2.5 / math.sqrt(7))
    assert not layer.sees_first
    layer.sees_first = True
    layer(10 * x)  # known by now
    assert layer.input_step.item() == pytest.approx(2 * 2.5 / math.sqrt(7))


class Half(MLP):
    """An optimiser that knows of its own weights alone."""

    def configure_optimizers(self):
        return torch.optim.SGD([p for n, p in self.named_parameters() if n.endswith(("weight", "bias"))], lr=0.1)


def test_an_optimiser_that_leaves_the_step_sizes_out_is_named(tmp_path):
    with pytest.raises(
        BadInput, match=r"q_vit adds 'input_step' to the model, but Half\.configure_optimizers leaves it out"
    ):
        finish(experiment(tmp_path / "r", q_vit(), model=lambda: Half(64, (8,), 10)))


def test_convolutions_are_quantised():
    model = Quantised().prepare(deep_cnn())
    assert any(isinstance(layer, QuantisedConv2d) for layer in quantised(model))


def test_the_gradient_of_an_inputs_step_is_scaled_by_its_features_and_its_own_levels():
    """Eight levels of 0 and above: 0.6 is 1.2 steps (-0.2), 1.2 is 2.4 (-0.4), 9 is clipped at 7. Each reaches four outputs."""
    layer = one_layer(3, learn=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.weight_step.fill_(1.0)
        layer.input_step.fill_(0.5)
    layer(torch.tensor([[0.6, 9.0, 1.2], [0.6, 0.6, 0.6]])).sum().backward()
    assert layer.input_step.grad.item() == pytest.approx(4 * (7 - 0.4 - 4 * 0.2) / math.sqrt(3 * 7))
