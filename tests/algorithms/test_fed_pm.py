"""FedPM: masks over frozen weights, straight-through gradients, Beta counts by hand, bits on the wire."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from raafl.algorithms.fed_pm import masks as masks
from raafl.algorithms.fed_pm.masks import BayesianMasks, Masked, ProbabilisticMaskTraining, scale
from raafl.core.types import Update, derive_seed
from raafl.errors import BadInput
from raafl.submodel import Spec, Submodels, skeleton
from tests.algorithms.fed_pm_line import ones, prepared_line, prepared_state, training
from tests.helpers.coordinators import Line

# ---- straight through the draw ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_is_that_of_a_slow_reference(dtype):
    torch.manual_seed(0)
    score, drawn = torch.randn(6, 5, dtype=dtype), torch.rand(6, 5)
    negative, x, sigma = torch.rand(6, 5) < 0.5, torch.randn(3, 5, dtype=dtype), 0.3
    one, two = score.clone().requires_grad_(), score.clone().requires_grad_()
    fast = Masked.apply(one, drawn, negative, sigma)
    (x @ fast.T).square().sum().backward()
    p = torch.sigmoid(two)
    mask = (drawn < p).to(dtype)
    slow = torch.where(negative, -sigma, sigma).to(dtype) * (p + (mask - p).detach())
    (x @ slow.T).square().sum().backward()
    torch.testing.assert_close(fast, slow)
    torch.testing.assert_close(one.grad, two.grad)
    assert set(fast.abs().unique().tolist()) == {0.0, torch.tensor(sigma, dtype=dtype).item()}


# ---- how a model is prepared ----


def test_weights_become_signed_constants_and_the_rest_is_frozen():
    torch.manual_seed(0)
    plain = Line()
    module = prepared_line(initial=0.25)
    assert module.fc1.weight.abs().unique().tolist() == [0.25]  # sqrt(2 / 2) / 4
    torch.testing.assert_close(module.fc2.weight.abs(), torch.full((1, 4), 0.25 * math.sqrt(2 / 4)))
    assert torch.equal(module.fc1.weight.sign(), plain.fc1.weight.sign())
    assert torch.equal(module.fc2.bias, plain.fc2.bias)
    assert [name for name, p in module.named_parameters() if p.requires_grad] == ["fc1.weight", "fc2.weight"]
    (note,) = ProbabilisticMaskTraining().notes(Submodels(module))
    assert note.startswith("masks over 12 weights in 2 tensors") and "the other 1 parameters" in note


def test_a_weight_of_zero_gets_a_sign_by_the_seed():
    def made(seed):
        module = nn.Linear(50, 40)
        nn.init.zeros_(module.weight)
        torch.manual_seed(seed)
        return ProbabilisticMaskTraining().prepare(module).weight

    assert made(1).abs().unique().numel() == 1 and 0.3 < (made(1) > 0).float().mean() < 0.7
    assert torch.equal(made(1), made(1)) and not torch.equal(made(1), made(2))


def test_a_skeleton_is_frozen_alike():
    with skeleton():
        module = ProbabilisticMaskTraining().prepare(Line())
    assert module.fc1.weight.is_meta and not module.fc2.bias.requires_grad


def test_sigma_is_that_of_kaiming():
    for shape in ((30, 50), (6, 7, 3, 3), (9, 4)):
        torch.manual_seed(0)
        drawn = torch.stack([nn.init.kaiming_normal_(torch.empty(shape)) for _ in range(300)])
        assert scale(shape) == pytest.approx(drawn.std().item(), rel=0.03)


def test_what_has_nothing_to_mask_is_refused_by_name():
    module = nn.Sequential(nn.LayerNorm(3))
    with pytest.raises(
        BadInput, match="Sequential has no weights to mask: fed_pm trains masks for linear, convolution"
    ):
        ProbabilisticMaskTraining().prepare(module)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(BadInput, match="no weights to mask"):
        ProbabilisticMaskTraining().prepare(frozen)


def test_a_step_and_the_mask_that_is_sent_by_hand():
    module, lr, factor = prepared_line(), 0.1, 20.0
    batch = torch.tensor([[1.0, -2.0], [0.5, 3.0]]), torch.tensor([1.0, -1.0])
    signs = {f"{n}.weight": module.get_submodule(n).weight.detach().sign() for n in ("fc1", "fc2")}
    bias = module.fc2.bias.clone()
    hook = training(module, lr, lr_factor=factor)
    assert torch.equal(module.fc1.weight, torch.zeros(4, 2))  # scores: p = 1/2

    generator = torch.Generator().manual_seed(derive_seed(7, "masks"))
    first, second = torch.rand(4, 2, generator=generator), torch.rand(1, 4, generator=generator)
    w1, w2 = (first < 0.5) * signs["fc1.weight"], (second < 0.5) * signs["fc2.weight"] * math.sqrt(0.5)
    w1, w2 = w1.requires_grad_(), w2.requires_grad_()
    wanted = ((torch.relu(batch[0] @ w1.T) @ w2.T + bias).squeeze(1) - batch[1]).square().mean()
    wanted.backward()
    loss = hook.loss(batch, 0)
    torch.testing.assert_close(loss, wanted)
    hook.backward(loss)
    hook.update()
    scores = [
        -lr * factor * w.grad * signs[name] * sigma / 4
        for name, w, sigma in (("fc1.weight", w1, 1.0), ("fc2.weight", w2, math.sqrt(0.5)))
    ]
    torch.testing.assert_close(module.fc1.weight.data, scores[0])
    torch.testing.assert_close(module.fc2.weight.data, scores[1])
    assert hook.task.optimizer.param_groups[0]["lr"] == lr

    assert hook.finish() == {}
    sent = [(torch.rand(s.shape, generator=generator) < torch.sigmoid(s)).float() for s in scores]
    assert torch.equal(module.fc1._parameters["weight"], sent[0])
    assert torch.equal(module.fc2._parameters["weight"], sent[1])
    hook.close()
    measured = torch.relu(batch[0] @ (sent[0] * signs["fc1.weight"]).T)
    measured = measured @ (sent[1] * signs["fc2.weight"] * math.sqrt(0.5)).T + bias
    torch.testing.assert_close(module(batch[0]), measured)  # whoever measures what was trained


def test_a_task_that_is_given_up_leaves_the_module_as_it_was():
    module = prepared_line()
    names = {name: set(layer.__dict__) for name, layer in module.named_modules()}
    hook = training(module)
    hook.loss((torch.zeros(1, 2), torch.zeros(1)), 0)
    assert "weight" in module.fc1.__dict__
    hook.close()
    assert {name: set(layer.__dict__) for name, layer in module.named_modules()} == names


def test_the_next_task_starts_from_what_it_receives():
    module = prepared_line()
    before = {name: p.clone() for name, p in module.named_parameters()}
    batch = torch.ones(3, 2), torch.zeros(3)
    results = []
    for _ in range(2):
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(before[name])
        hook = training(module)
        hook.backward(loss := hook.loss(batch, 0))
        hook.update()
        hook.finish()
        hook.close()
        results.append((loss.detach(), module.fc1._parameters["weight"].clone()))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


class Several(nn.Module):
    """A layer of each kind that finds its weights in a way of its own: attention, an LSTM, a tied embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.conv = nn.Conv1d(6, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.conv(self.lstm(x)[0].transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(x))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self(batch).flatten(0, 1), batch.flatten())


def test_layers_of_every_kind_compute_with_their_masked_weights():
    torch.manual_seed(0)
    module = ProbabilisticMaskTraining().prepare(Several())
    names = {name for name, p in module.named_parameters() if p.requires_grad}
    assert names == {
        "embedding.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "lstm.weight_ih_l0",
        "lstm.weight_hh_l0",
        "conv.weight",
    }
    signs = {name: module.get_parameter(name).sign() for name in names}
    batch = torch.randint(11, (4, 5))
    seen = {}
    hook = training(module, loss=lambda batch, index: seen.update(out=module(batch)) or seen["out"].square().sum())
    loss = hook.loss(batch, 0)
    shadows = {
        name: dict(module.get_submodule(name.rpartition(".")[0]).__dict__)[name.rpartition(".")[2]] for name in names
    }
    for name, weight in shadows.items():
        assert set(torch.unique(weight.detach() / signs[name] / scale(weight.shape)).round(decimals=5).tolist()) == {
            0.0,
            1.0,
        }
    hook.backward(loss)
    gradients = {name: p.grad for name, p in module.named_parameters()}
    assert all((gradients[name] is not None) == (name in names) for name in gradients)
    assert all(gradients[name].count_nonzero() for name in names)
    hook.update()
    # the same module with these weights as its parameters
    plain = Several()
    plain.load_state_dict(module.state_dict())
    with torch.no_grad():
        for name, weight in shadows.items():
            plain.get_parameter(name).copy_(weight)
    torch.testing.assert_close(plain(batch), seen["out"])
    hook.finish()
    hook.close()


def test_scores_that_are_not_finite_are_told(tmp_path):
    module = prepared_line()
    hook = training(module)
    with torch.no_grad():
        module.fc1.weight[0, 0] = math.nan
    assert hook.finish() == {masks.DIVERGED: True}
    state = prepared_state()
    update = Update(1, 1, 0, ones(state), 1, extra={masks.DIVERGED: True})
    assert BayesianMasks().reject_reason(state, update, Spec(), 0) == "non-finite"
