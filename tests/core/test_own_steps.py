"""What a task is predicted to cost against what a real task of each method costs, by torch's counter and allocator."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from model_zoo import LLaMA
from raafl.algorithms import ALGORITHMS
from raafl.algorithms.depth_fl import MutualTraining
from raafl.core.algorithm import Hook, Local
from raafl.parts.local.distilled import with_every_exit
from raafl.rules import Rules
from raafl.submodel import FULL, Submodels
from tests.helpers.coordinators import EXAMPLE, Line
from tests.helpers.counted_task import BATCH, CASES, MODELS, Setting, case

CLOSE = 0.05
EACH_HOOK = [
    "fed_avg-resnet-1.0",
    "depth_fl-llama-1.0",
    "scaffold-cnn-1.0",
    "moon-cnn-0.25",
    "fjord-cnn-1.0",
    "fed_mezo-cnn-0.25",
    "fed_pm-cnn-1.0",
    "platon-cnn-0.25",
    "fed_dyn-cnn-1.0",
    "fiarse-cnn-1.0",
    "q_vit-cnn-1.0",
    "ada_vit-cnn-1.0",
    "streaming_diloco-cnn-1.0",
    "split_fed-cnn-1.0",
    "co_s2p-cnn-0.25",
]


def check(setting, task):
    """Compare the predicted cost of a task with the real task's."""
    found = setting.counted(task)
    assert found.said.guessed == ""
    assert found.ratios == pytest.approx((1.0, 1.0), abs=CLOSE)


@pytest.mark.quick_cases(*EACH_HOOK)
@pytest.mark.parametrize(("name", "model", "share"), CASES)
def test_a_task_of_each_method_costs_what_is_predicted(name, model, share):
    check(*case(name, model, share))


@pytest.mark.long("test_a_task_of_each_method_costs_what_is_predicted")
@pytest.mark.parametrize("share", [1.0, 0.25])
@pytest.mark.parametrize("model", MODELS)
def test_a_distilling_task_of_co_s2p_costs_what_is_predicted(model, share):
    """Its first task trains masks; this is one of those that follow."""
    setting = Setting(ALGORITHMS["co_s2p"](), model, Rules())
    task = replace(setting.first_task(), spec=FULL, extra={})
    check(setting, task if share == 1 else setting.cut(task, share))


@pytest.mark.parametrize(("name", "options"), [("scaffold", {"option": 1}), ("diloco", {"inner_state": "kept"})])
def test_other_forms_of_a_method_cost_what_is_predicted(name, options):
    setting = Setting(ALGORITHMS[name](**options), "llama" if name == "diloco" else "cnn", Rules())
    check(setting, setting.first_task())


def test_exits_cost_nothing_by_the_first_rules():
    setting = Setting(ALGORITHMS["depth_fl"](depths=1.0), "llama", Rules(1))
    task = setting.first_task()
    said = setting.coordinator.fleet.cost(task.spec, task.extra)
    plain = setting.submodels.cost(task.spec, BATCH)
    assert said.flops_per_sample == plain.flops_per_sample
    assert Setting(ALGORITHMS["depth_fl"](depths=1.0), "llama", Rules(2)).coordinator.fleet.cost(
        task.spec, task.extra
    ).flops_per_sample == pytest.approx(1.56 * plain.flops_per_sample, rel=0.01)


@pytest.mark.parametrize(("vocabulary", "times"), [(65, 1.054), (32000, 2.863)])
def test_without_a_batch_an_output_layer_counts_for_each_exit(vocabulary, times):
    """``times`` by torch's counter: a step of the model with its exits over a step without."""
    model = LLaMA("nano", vocab_size=vocabulary)
    plain = Submodels(model).cost(FULL, 2)
    exits = MutualTraining().cost(Submodels(with_every_exit(model)), FULL, 2, {})
    assert exits.flops_per_sample / plain.flops_per_sample == pytest.approx(times, rel=CLOSE)


class Twice(Hook):
    """Runs the module's step twice."""

    def loss(self, batch, index):
        return super().loss(batch, index) + super().loss(batch, index)


class Asks(Hook):
    """Asks for the value of a loss, which only a task on drawn values has."""

    def loss(self, batch, index):
        loss = super().loss(batch, index)
        return loss if float(loss) > -1 else loss + super().loss(batch, index)


class Fails(Hook):
    """Wants what no prediction has."""

    def loss(self, batch, index):
        raise RuntimeError("no file with a teacher")


@dataclass(frozen=True)
class Steps(Local):
    kind: type = Hook

    def hook(self, task):
        return self.kind(task)

    def estimate(self, submodels, spec, batch_size, extra):
        return replace(submodels.cost(spec, batch_size), guessed="by a formula")


@pytest.mark.parametrize("model", MODELS)
def test_plain_steps_that_are_followed_cost_what_the_user_s_own_do(model):
    setting = Setting(ALGORITHMS["fed_nova"](), model, Rules())
    local, submodels = setting.algorithm.local, setting.submodels
    assert not local.steps_are_plain
    task = setting.first_task()
    for one in (task, setting.cut(task, 0.25)):
        assert local.cost(submodels, one.spec, BATCH, {}) == submodels.cost(one.spec, BATCH)


def test_a_hook_of_one_s_own_is_followed_or_else_its_formula_counts():
    submodels = Submodels(Line(16), EXAMPLE)
    plain = submodels.cost(FULL, 2)
    assert Steps(Twice).cost(submodels, FULL, 2, {}).flops_per_sample == 2 * plain.flops_per_sample
    assert Steps(Asks).cost(submodels, FULL, 2, {}).flops_per_sample == plain.flops_per_sample
    assert Steps(Fails).cost(submodels, FULL, 2, {}).guessed == "by a formula"


@dataclass(frozen=True)
class Weighted(Steps):
    """Has as many losses as weights above 0, which of a long array its text does not show."""

    weights: object = None

    def hook(self, task):
        weights = self.weights.tolist()

        class Repeats(Hook):
            def loss(self, batch, index):
                return sum(super(Repeats, self).loss(batch, index) for one in weights if one > 0)

        return Repeats(task)


class Numbered(Steps):
    """Has a number of losses that is no field of it, so that its text does not show it."""

    def __init__(self, number):
        super().__init__()
        object.__setattr__(self, "number", number)

    def hook(self, task):
        return (Hook, Twice)[self.number - 1](task)


def weighted(number):
    weights = np.zeros(2000)
    weights[1000 : 1000 + number] = 1.0
    return Weighted(weights=weights)


@pytest.mark.parametrize("make", [weighted, Numbered])
def test_methods_whose_texts_are_equal_are_predicted_each_by_its_own_steps(make):
    once, twice, submodels = make(1), make(2), Submodels(Line(16), EXAMPLE)
    assert repr(once) == repr(twice)
    flops = [local.cost(submodels, FULL, 2, {}).flops_per_sample for local in (once, twice)]
    assert flops[1] == 2 * flops[0] == 2 * submodels.cost(FULL, 2).flops_per_sample


def test_settings_of_a_task_whose_texts_are_equal_are_predicted_apart():
    class Asked(Steps):
        def hook(self, task):
            return (Hook, Twice)[int(task.assignment.extra["weights"][1000])](task)

    submodels, none, one = Submodels(Line(16), EXAMPLE), np.zeros(2000), np.zeros(2000)
    one[1000] = 1.0
    flops = [Asked().cost(submodels, FULL, 2, {"weights": each}).flops_per_sample for each in (none, one)]
    assert flops[1] == 2 * flops[0]


def test_the_random_numbers_of_a_run_do_not_see_a_prediction():
    submodels = Submodels(Line(16), EXAMPLE)
    before = torch.get_rng_state()
    Steps(Twice).cost(submodels, FULL, 2, {})
    assert torch.equal(before, torch.get_rng_state())
