"""Parts that a model's author put into eval mode train in eval mode, in each task, evaluation and trial, cut or not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from raafl.api.modules import in_eval_mode, with_modes_of_training
from raafl.core.types import Warn
from raafl.data import Digits
from raafl.errors import BadInput
from raafl.local.evaluate import Evaluator
from raafl.local.prepare import call_own_train
from raafl.runtime.first_look import eval_mode_note
from raafl.submodel import FULL, Spec, Submodels
from tests.helpers.small_federations import federation
from tests.local.bench import Bench, Net, Norm, assignment, plain_loop, same


class Frozen(Norm):
    """A batch norm that keeps its statistics, and a teacher without dropout; the layer that learns has dropout."""

    dropout = 0.5

    def __init__(self):
        super().__init__()
        self.norm.eval().requires_grad_(False)
        self.teacher = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)).eval().requires_grad_(False)
        with torch.no_grad():
            self.norm.running_mean.copy_(torch.linspace(-1, 1, 6))

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self(x), y) + F.mse_loss(self(x), self.teacher(x))

    def validation_step(self, batch, index):
        self.log("modes", float(sum(part.training for part in self.modules())))

    def configure_optimizers(self):
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1, momentum=0.9)


def modes(module):
    return {path: part.training for path, part in module.named_modules()}


def test_tasks_equal_a_loop_that_leaves_modes_alone():
    bench = Bench.of(Frozen)
    assert [path for path, training in modes(bench.module).items() if not training] == [
        "norm",
        "teacher",
        "teacher.0",
        "teacher.1",
    ]
    for seed in (11, 12):
        task = assignment(seed=seed, epochs=2)
        update, tensors = bench.run(task)
        assert update.refusal is None and "norm.running_mean" not in tensors
        assert same(tensors, plain_loop(bench, task))
        bench.trainer.built(FULL).module.eval()  # as an evaluation in a task leaves it, or a hook
    trained = bench.trainer.built(FULL).module
    assert torch.equal(trained.norm.running_mean, torch.linspace(-1, 1, 6))


def test_a_smaller_module_has_the_modes_of_the_whole_one():
    bench = Bench.of(Frozen)
    for spec in (FULL, Spec.select({"fc1": range(3)})):
        assert modes(bench.submodels.shrink(spec).module) == modes(bench.module)
    bench.run(assignment(Spec.select({"fc1": range(3)}), steps=2))
    small = bench.trainer.built(Spec.select({"fc1": range(3)})).module
    assert small.fc1.weight.shape == (3, 6) and modes(small) == modes(bench.module)


def test_an_evaluation_is_in_eval_mode_and_leaves_no_trace():
    bench = Bench.of(Frozen)
    evaluator = Evaluator(bench.submodels, lambda: [((torch.zeros(2, 6), torch.zeros(2)), 2)], seed=0)
    evaluator.fill(bench.values)
    assert modes(evaluator.module) == modes(bench.module)
    for _ in range(2):
        assert evaluator(bench.values, 0) == {"modes": 0.0}
        evaluator.fill(bench.values)
        assert modes(evaluator.module) == modes(bench.module)


def test_runs_keep_modes_one_by_one_and_in_batches_and_older_ones_train_all(tmp_path):
    def run(name, **settings):
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Flatten(), nn.BatchNorm1d(64).eval(), nn.Linear(64, 8), nn.Dropout(), nn.Linear(8, 10)
        )
        return federation(tmp_path / name, num_steps=2, **settings).simulate(module, Digits(), loss=F.cross_entropy)

    alone, together, older = run("alone"), run("together", batch_clients=4), run("older", rules=1)
    assert alone.summary["model_digest"] == together.summary["model_digest"] != older.summary["model_digest"]
    assert not alone.module[1].running_mean.any() and older.module[1].running_mean.any()
    log = (tmp_path / "alone" / "summary.json").read_text()
    assert "eval mode" not in log  # a note, no warning


def test_statistics_that_change_against_the_modes_are_refused_by_name():
    class Thaws(Frozen):
        def on_train_start(self):
            self.norm.train()

    with pytest.raises(
        BadInput, match=r"^batch norm 'norm' trains in train mode, but was in eval mode when the model was"
    ):
        Bench.of(Thaws).run(assignment(steps=1))


def test_a_train_method_of_its_own_sets_modes():
    class Own(Frozen):
        def train(self, mode=True):
            super().train(mode)
            self.fc1.eval()
            return self

    module = Own()
    call_own_train(module)
    assert [path for path, training in modes(module).items() if not training] == [
        "fc1",
        "norm",
        "teacher",
        "teacher.0",
        "teacher.1",
    ]


def test_the_start_says_how_many_layers_are_in_eval_mode():
    assert eval_mode_note(Norm()) == []
    assert eval_mode_note(Frozen()) == [
        "4 of 8 layers of Frozen are in eval mode, as it was built, and train so (norm, teacher): call .train() on them "
        "for train mode"
    ]
    (whole,) = eval_mode_note(Frozen().eval())
    assert isinstance(whole, Warn) and whole.startswith("Frozen is in eval mode, with 8 of its 8 layers, and trains so")


def test_a_trained_module_is_trained_again_in_the_modes_of_its_author():
    module, before = Frozen(), modes(Frozen())
    assert not any(modes(in_eval_mode(module)).values())
    assert modes(with_modes_of_training(module)) == before
    assert not any(modes(with_modes_of_training(Frozen().eval())).values())  # its user's own choice
    in_eval_mode(module).fc1.train()
    assert [path for path, training in modes(with_modes_of_training(module)).items() if training] == ["fc1"]


def test_axes_are_found_in_the_modes_in_which_the_model_trains():
    class Auxiliary(nn.Module):
        """Returns more in train mode, as Inception does."""

        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 8)

        def forward(self, x):
            return (self.inner(x), self.inner(x)) if self.training else self.inner(x)

    class Uses(Net):
        def __init__(self):
            super().__init__()
            self.fc1 = Auxiliary().eval()

    batch = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    assert "fc1.inner" in Submodels(Uses(), batch).axes
