"""Masks by segments and their training (Co-S2P): gates against cut models, gradients against slow references."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from raafl.parts.local.mask_training import SCORES, MaskTraining, best, first_score, kept_share_loss, masks_of
from raafl.parts.select.segments import Gates, Segments, cuts_of, readers
from raafl.submodel import FlatTensors, Spec, Submodels
from tests.helpers.coordinators import EXAMPLE, Line
from tests.local.bench import assignment, filled, task_in
from tests.submodel import networks


class Conv(nn.Module):
    """Two convolutions with batch norm, and a flatten: an index of the second is four pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 6, 3),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 5, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(20, 4),
        )

    def forward(self, x):
        return self.net(x)


MODELS = {
    **{name: networks.CASES[name] for name in ("vit", "bert", "llama", "torchvision_vit", "encoder")},
    "conv": networks.Case(Conv, lambda: {"x": torch.randn(3, 1, 7, 7)}, {}),
}


def doubled(inputs):
    return {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}


@pytest.mark.parametrize("name", MODELS)
def test_gates_do_what_cutting_does(name):
    """With a mask as gates, the loss and the gradients of what is kept are those of the small dense model."""
    torch.manual_seed(1)
    case = MODELS[name]
    model = case.make().double().eval()
    networks.randomise(model)
    submodels = Submodels(model)
    cuts = cuts_of(submodels, 3)
    assert cuts and all(cut.can_train for cut in cuts.values())
    inputs = doubled(case.inputs())
    masks, kept = {}, {}
    for place, (axis, cut) in enumerate(cuts.items()):
        chosen = [i for i in range(len(cut)) if (i + place) % 3 != 1] or [0]
        kept[axis] = cut.units(chosen)
        masks[axis] = torch.tensor([float(i in chosen) for i in range(len(cut))], dtype=torch.float64)
    spec = Spec.select({axis: units for axis, units in kept.items() if len(units) < submodels.axes[axis].size})
    shrunk = filled(submodels, spec, submodels.state(model))
    shrunk.module.eval()
    loss = networks.output(shrunk.module, inputs).square().mean()
    loss.backward()
    with Gates(model, submodels, cuts).set(masks):
        gated = networks.output(model, inputs).square().mean()
    gated.backward()
    assert gated.item() == pytest.approx(loss.item(), rel=1e-9)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    full = FlatTensors.from_named(dict(submodels.state(model).items()) | gradients, submodels.layout())
    small = submodels.plan(spec).gather(full)
    for parameter, value in shrunk.module.named_parameters():
        torch.testing.assert_close(small[parameter], value.grad, rtol=1e-6, atol=1e-9)
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


def test_a_recurrent_state_or_a_width_under_a_norm_has_no_gates():
    _, gru, _ = networks.built("gru")
    assert not readers(gru, gru.axes["rnn"]) and readers(gru, gru.axes["conv"]) == ()
    _, wide, _ = networks.built("vit", residual_width=True)
    (width,) = [axis for name, axis in wide.axes.items() if not name.endswith(("heads", "ffn"))]
    assert not readers(wide, width)


def test_segments_are_heads_or_nearly_equal_ranges():
    _, submodels, _ = networks.built("vit")
    cuts = cuts_of(submodels, 3)
    assert cuts["vit.layers.0.heads"] == Segments((0, 1, 2, 3), is_heads=True, block=0)
    assert cuts["vit.layers.1.ffn"] == Segments((0, 2, 4, 7), block=1)
    assert cuts["vit.layers.1.ffn"].units([2, 0]) == [0, 1, 4, 5, 6]
    assert len(cuts_of(submodels, 99)["vit.layers.0.ffn"]) == 7


# ---- training scores ----


def mask_task(model, submodels, scores, rate, seed=5):
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    task = assignment(Spec(trained=()), seed=seed)
    object.__setattr__(task, "extra", {"masks": list(scores), "rate": rate})
    given = FlatTensors.from_named({axis: torch.tensor(values) for axis, values in scores.items()})
    tensors = {"down": {SCORES: given}, "up": {SCORES: FlatTensors.zeros(given.layout)}}
    return task_in(model, submodels, task, update=lambda: pytest.fail("weights stay"), **tensors)


def test_the_straight_through_gradient_is_that_of_a_slow_reference():
    """d loss / d score = d loss / d gate at the mask drawn, by differences, times p (1 - p); the budget's term by hand."""
    torch.manual_seed(0)
    model, scores = Line(5).double(), [0.3, -0.2, 1.5, 0.0, -1.0]
    submodels = Submodels(model, EXAMPLE)
    x, y = torch.randn(7, 2).double(), torch.randn(7).double()
    task = mask_task(model, submodels, {"hidden": scores}, 0.4)
    hook = MaskTraining(task, cuts_of(submodels, 16), lr=0.1, strength=1.3)
    probe = torch.Generator()
    probe.set_state(hook.generator.get_state())
    hook.backward(hook.loss((x, y), 0))
    mask = masks_of(torch.tensor(scores), probe).double()
    assert set(mask.tolist()) == {0.0, 1.0}

    def loss(gates):
        hidden = torch.relu(x @ model.fc1.weight.T) * gates
        return (hidden @ model.fc2.weight.T + model.fc2.bias).squeeze(1).sub(y).square().mean().item()

    h = 1e-4
    for i, score in enumerate(scores):
        up, down = mask.clone(), mask.clone()
        up[i], down[i] = up[i] + h, down[i] - h
        p = 1 / (1 + math.exp(-score))
        slope = (loss(up) - loss(down)) / (2 * h) + 1.3 * 2 * (mask.mean().item() - 0.4) / 5
        assert hook.scores["hidden"].grad[i].item() == pytest.approx(slope * p * (1 - p), rel=1e-4, abs=1e-7)


def test_scores_learn_which_unit_matters_and_weights_do_not_move():
    torch.manual_seed(0)
    model = Line(4)
    with torch.no_grad():
        model.fc1.weight.copy_(torch.tensor([[1.0, 0.0], [9.0, 9.0], [0.0, 1.0], [-9.0, 9.0]]))
        model.fc2.weight.fill_(1.0)
        model.fc2.bias.zero_()
    submodels, before = Submodels(model, EXAMPLE), copy.deepcopy(model.state_dict())
    x = torch.rand(64, 2)
    hook = MaskTraining(
        mask_task(model, submodels, {"hidden": [0.0] * 4}, 0.5), cuts_of(submodels, 16), lr=0.1, strength=1.0
    )
    for step in range(60):
        hook.backward(hook.loss((x, x.sum(1)), step))
        hook.update()
    assert hook.finish() == {}
    assert best(hook.task.up[SCORES]["hidden"].tolist(), 2) == [0, 2]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_scores_that_have_never_trained_begin_at_the_budget_and_others_are_left_alone():
    task = mask_task(Line(4), Submodels(Line(4), EXAMPLE), {"hidden": [0.5, math.nan, 0.0, math.nan]}, 0.25)
    hook = MaskTraining(task, cuts_of(task.submodels, 16), lr=0.1, strength=1.0)
    first = math.log(0.25 / 0.75)
    assert hook.scores["hidden"].tolist() == pytest.approx([0.5, first, 0.0, first])


def test_the_kept_share_is_held_to_the_budget_by_hand():
    masks = {"a": torch.tensor([1.0, 0, 0, 0]), "b": torch.tensor([1.0, 1.0])}
    assert kept_share_loss(masks, 0.5).item() == pytest.approx(0.25**2 + 0.5**2)


def test_a_first_score_is_the_inverse_sigmoid_of_the_budget():
    assert torch.sigmoid(torch.tensor(first_score(0.25))).item() == pytest.approx(0.25)
    assert math.isfinite(first_score(1.0))


def test_of_equal_scores_the_first_are_kept():
    assert best([0.5, 2.0, 0.5, 0.5], 3) == [0, 1, 2]
