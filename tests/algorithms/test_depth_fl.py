"""DepthFL and ScaleFL: their losses over exits against each exit's own logits, and what they must equal."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("transformers")

from torch.nn import functional as F

from raafl.algorithms import depth_fl, scale_fl
from raafl.algorithms.depth_fl import DynamicMutual, Mutual, MutualTraining, RegularisedMutual, teaching_weight
from raafl.algorithms.fed_dyn import GRADIENT
from raafl.algorithms.scale_fl import WeighedByDepth, WeighedExits
from raafl.errors import BadInput
from raafl.parts.merge.mean import Mean
from raafl.parts.select.rate_select import RateSelect
from raafl.parts.select.windows import LeadingBlocks
from raafl.parts.trigger import AllReported, EachArrival
from raafl.submodel import FULL, Submodels, depth_window
from tests.parts.local.test_distilled import batch, cut, task_for, three_blocks


def divergence(teacher, student, temperature=1.0):
    p, q = F.softmax(teacher / temperature, -1), F.softmax(student / temperature, -1)
    return (p * (p / q).log()).sum(-1).mean() * temperature**2


@pytest.fixture
def exits(monkeypatch):
    """A model of three blocks, and each exit's logits, taken by really cutting the model there."""
    model, (x, y) = three_blocks(monkeypatch).eval(), batch()
    submodels = Submodels(model)
    specs = [depth_window(submodels, 0, depth, exit=f"model.exit{depth}") for depth in (1, 2)]
    return model, submodels, [cut(model, submodels, spec).eval()(x).detach() for spec in (*specs, FULL)], (x, y)


def test_arguments_reach_their_parts():
    algorithm = depth_fl([0.5, 1.0], 9, 0.2)
    assert algorithm.select == LeadingBlocks([0.5, 1.0])
    assert algorithm.local == RegularisedMutual(9, prox=0.2)
    assert algorithm.merge.alpha == 0.2 and algorithm.trigger == AllReported()
    plain = depth_fl(dyn_alpha=0.0, alpha=0.5)
    assert plain.local == MutualTraining(300) and plain.trigger == EachArrival()
    assert plain.select == LeadingBlocks([0.25, 0.5, 0.75, 1.0])
    assert depth_fl(submodel=RateSelect()).select == RateSelect()
    scaled = scale_fl([0.5, 1.0], [0.6, 1.0], 2.0, 4.0, 5, rescale=False, cohort=4)
    assert scaled.select == LeadingBlocks([0.5, 1.0], [0.6, 1.0])
    assert scaled.local == WeighedExits(2.0, 4.0, 5)
    assert scaled.merge == Mean(by_samples=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: depth_fl(ramp=0), "ramp is 0: give a number above 0"),
        (lambda: depth_fl(alpha=0.5), "dyn_alpha is 0.1, but FedDyn's regulariser needs rounds"),
        (lambda: depth_fl(depths=0.5, submodel=RateSelect()), "depths is 0.5, but submodel says"),
        (lambda: scale_fl(widths=0.5, submodel=RateSelect()), "widths is 0.5, but submodel says"),
        (lambda: scale_fl(gamma=-1.0), "gamma is -1"),
        (lambda: scale_fl(temperature=0.0), "temperature is 0"),
    ],
)
def test_wrong_settings_are_refused(make, message):
    with pytest.raises(BadInput, match=message):
        make()


def test_exits_teach_each_other_with_a_weight_that_grows():
    assert teaching_weight(0, 300) == math.exp(-5)
    assert teaching_weight(150, 300) == math.exp(-1.25)
    assert teaching_weight(300, 300) == teaching_weight(999, 300) == 1.0


def test_mutual_losses_by_a_slow_reference(exits):
    model, submodels, logits, (x, y) = exits
    hook = Mutual(task_for(model, submodels), 0.7)
    found = hook.loss((x, y), 0)
    hook.close()
    wanted = sum(F.cross_entropy(z, y) for z in logits)
    wanted = wanted + 0.7 / 2 * sum(divergence(a, b) for a in logits for b in logits if a is not b)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize("gamma", [0.0, 1.5])
def test_weighed_exits_by_a_slow_reference(exits, gamma):
    model, submodels, logits, (x, y) = exits
    hook = WeighedByDepth(task_for(model, submodels), gamma, 2.0)
    found = hook.loss((x, y), 0)
    hook.close()
    own = [F.cross_entropy(z, y) for z in logits]
    taught = [gamma * divergence(logits[-1], z, 2.0) for z in logits[:-1]]
    wanted = (own[0] + taught[0] + 2 * (own[1] + taught[1]) + 3 * own[2]) / 6
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_what_an_exit_teaches_gives_it_no_gradient(exits):
    """With the labels' losses taken away, the deepest exit's head moves only by what the others teach it."""
    model, submodels, _, data = exits
    hook = WeighedByDepth(task_for(model, submodels), 1.0, 2.0)
    loss = hook.loss(data, 0) - 3 * model.training_step(data, 0) / 6
    hook.close()
    head = model.model.classifier.weight
    (gradient,) = torch.autograd.grad(loss, head)
    assert gradient.abs().max() < 1e-6


def test_the_hook_follows_the_version_and_the_regulariser(exits):
    model, submodels, _, _ = exits
    task = task_for(model, submodels)
    assert type(MutualTraining(4).hook(task)) is Mutual
    task.down = {GRADIENT: task.received}
    assert type(RegularisedMutual(4, prox=0.1).hook(task)) is DynamicMutual
    assert WeighedExits(2.0, 3.0, kd_from=1).hook(task).gamma == 0.0  # version 0
    assert WeighedExits(2.0, 3.0, kd_from=0).hook(task).gamma == 2.0
