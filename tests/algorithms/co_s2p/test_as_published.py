"""What Co-S2P's published code does otherwise, each by hand: draws, windows, penalty and gradient of masks, distillation."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
import torch

from raafl.algorithms import co_s2p
from raafl.algorithms.co_s2p import (
    LeadingDraws,
    MaskedAndDistilled,
    PublishedDistillation,
    PublishedMaskTraining,
    sample_segments,
)
from raafl.algorithms.co_s2p.merge import PublishedMerge
from raafl.errors import BadInput
from raafl.parts.local.distilled import Exit
from raafl.parts.local.mask_training import SCORES, MaskTraining, masks_of
from raafl.parts.merge.personal import RecordingSelect, WithScores
from raafl.parts.select.segments import cuts_of
from raafl.parts.trigger import AllReported
from raafl.submodel import FlatTensors, Submodels
from tests.algorithms.co_s2p.test_masks import mask_task
from tests.algorithms.test_co_s2p import blocks, fleet, fleet_of, tasks
from tests.helpers.coordinators import EXAMPLE, Line
from tests.helpers.small_runs import experiment, finish

__all__ = ["fleet"]


def test_the_switch_reaches_every_part():
    algorithm = co_s2p(rates=[0.5, 0.125], segments=4, mask_rounds=2, mask_epochs=20, as_published=True)
    assert algorithm.select == RecordingSelect(
        LeadingDraws([0.5, 0.125], 1.0, "trained", "trained", 4, 2, 20, None, True)
    )
    assert algorithm.local == MaskedAndDistilled(segments=4, published=True)
    assert (algorithm.trigger, algorithm.merge) == (AllReported(), WithScores(PublishedMerge()))


@pytest.mark.parametrize("given", [{"wait_s": 1.0}, {"merge": "mean"}, {"distil_weight": 0.3}, {"width_depth": 2.0}])
def test_what_the_switch_decides_is_not_given_too(given):
    ((name, value),) = given.items()
    with pytest.raises(BadInput, match=f"{name} is {value}, but as_published is true: leave out {name}, which"):
        co_s2p(**given, as_published=True)


class Listed(random.Random):
    """A stream of given numbers."""

    def __init__(self, *numbers):
        super().__init__()
        self.numbers = list(numbers)

    def random(self):
        return self.numbers.pop(0)


@pytest.mark.parametrize(
    ("scores", "numbers", "kept"),
    [
        ([0.0, math.log(3), -1.0], [0.49, 0.76, 0.26], [0, 2]),  # probabilities 0.5, 0.75, 0.269
        ([0.0, 0.0], [0.5, 0.9, 0.9, 0.4], [1]),  # nothing the first time: drawn again
        ([-1e9, -9.0, -1e9], [0.999] * 300, [1]),  # never anything: the largest score
    ],
)
def test_a_segment_is_kept_with_its_probability(scores, numbers, kept):
    assert sample_segments(scores, Listed(*numbers)) == kept


def test_width_and_depth_take_the_whole_rate_and_nothing_is_frozen(fleet):
    """Of four blocks rate 0.5 trains the two lowest and 0.3 one, each time; the paper's windows would be 3 and 3, rolling."""
    for rate, wanted in [(0.5, [0, 1]), (0.3, [0]), (0.1, [0])]:
        found = [work.spec for work in tasks(LeadingDraws(rate, mask_rounds=0), fleet_of(fleet), 3)]
        assert [blocks(spec) for spec in found] == [wanted] * 3
        assert all("model.vit.embeddings" in spec.trained for spec in found)
    kept = dict(tasks(LeadingDraws(0.25, segments=4, mask_rounds=0), fleet_of(fleet), 1)[0].spec.kept)
    assert {name: len(units) for name, units in kept.items()} == {
        "model.vit.layers.0.heads": 1,
        "model.vit.layers.0.ffn": 8,
    }, "a quarter of four heads and of 32 units, where no scores are known"


def test_trained_scores_are_drawn_not_ranked(fleet):
    """Scores of +-1e9 leave nothing to chance: two of four are kept although a budget of 0.25 has one."""
    select, one = LeadingDraws(0.25, segments=4, mask_rounds=1), fleet_of(fleet)
    axes = ("model.vit.layers.0.heads", "model.vit.layers.0.ffn")
    scores = {name: torch.tensor([-1e9, 1e9, -1e9, 1e9]) for name in axes}
    one.state.clients.values[SCORES] = {1: FlatTensors.from_named(scores)}
    masks, task = tasks(select, one, 2)
    assert masks.spec.trained == () and masks.extra["rate"] == 0.25
    assert list(task.spec.indices(axes[0])) == [1, 3] and list(task.spec.indices(axes[1])) == [
        *range(8, 16),
        *range(24, 32),
    ]


def test_penalty_and_gradient_of_the_scores_by_hand():
    """The loss' slope at each gate is that of the plain hook, from its p (1 - p); here it counts p times, beside +-1.3 / 5."""
    torch.manual_seed(0)
    model, scores = Line(5), [0.3, -0.2, 1.5, 0.0, -1.0]
    submodels, batch = Submodels(model, EXAMPLE), (torch.randn(7, 2), torch.randn(7))
    grads, losses = {}, {}
    for kind, strength in [(MaskTraining, 0.0), (PublishedMaskTraining, 1.3)]:
        hook = kind(
            mask_task(model, submodels, {"hidden": scores}, 0.3), cuts_of(submodels, 16), lr=0.1, strength=strength
        )
        probe = torch.Generator()
        probe.set_state(hook.generator.get_state())
        share = masks_of(torch.tensor(scores), probe).mean().item()
        loss = hook.loss(batch, 0)
        hook.backward(loss)
        grads[kind], losses[kind] = hook.scores["hidden"].grad.tolist(), loss.item()
    assert abs(share - 0.3) > 0.05, "the masks drawn are off their budget, so that the penalty has a slope"
    assert losses[PublishedMaskTraining] == pytest.approx(losses[MaskTraining] + 1.3 * abs(share - 0.3), rel=1e-5)
    side = math.copysign(1.3 / 5, share - 0.3)
    for score, plain, published in zip(scores, grads[MaskTraining], grads[PublishedMaskTraining], strict=True):
        p = 1 / (1 + math.exp(-score))
        assert published == pytest.approx(p * (plain + side * p * (1 - p)), rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("version", [9, 10])
def test_distillation_begins_in_round_ten_by_hand(version):
    """T = 2: the teacher's softmax is (1/4, 3/4), the student's (1/2, 1/2); 0.5 T^2 / 2 classes = 1 times their KL."""
    divergence = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    teacher = Exit(torch.tensor([[0.0, 2 * math.log(3)]]), torch.tensor(1.0))
    student = Exit(torch.tensor([[0.0, 0.0]]), torch.tensor(2.0))
    hook = SimpleNamespace(task=SimpleNamespace(assignment=SimpleNamespace(version=version)), temperature=2.0)

    loss = PublishedDistillation.joined(hook, teacher, [student], (torch.zeros(1, 2), torch.zeros(1).long()))

    assert loss.item() == pytest.approx(3.0 if version < 10 else 3.0 + divergence)


def test_a_run_as_published_trains_in_rounds(tmp_path):
    algorithm = co_s2p(rates=[1.0, 0.5], mask_rounds=1, mask_steps=1, as_published=True)
    one = finish(experiment(tmp_path / "run", algorithm, max_updates=16))
    assert one.summary["staleness"]["max"] == 0 and one.summary["updates_merged"] >= 16
