"""Whole runs of models with batch norm: statistics that are merged, or static and collected on the server."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import raafl
from model_zoo import ResNet
from model_zoo.classifier import Classifier
from raafl.algorithms import ALGORITHMS, fed_async, fed_avg, fed_buff
from raafl.config.experiment import SubmodelOptions
from raafl.config.parse import parse
from raafl.core.algorithm import Training
from raafl.data import Digits
from raafl.data.partition import Dirichlet
from raafl.errors import BadInput
from raafl.parts import RateSelect
from raafl.runfolder import checkpoint_reader
from raafl.runtime.run import simulate
from tests.habits.source import ROOT
from tests.helpers.crash import crash
from tests.helpers.small_runs import equal_replay, experiment, finish

pytestmark = pytest.mark.timeout(180)
CONFIG = str(ROOT / "configs" / "quickstart.yaml")
RATED = RateSelect(rates=[1.0, 0.5625, 0.25])


class ConvNorm(Classifier):
    """Two convolutions with batch norm on 8 x 8 digits."""

    def __init__(self, lr: float = 0.1):
        super().__init__(lr, 0.9)
        self.conv1, self.norm1 = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 16, 3, padding=1, stride=2), nn.BatchNorm2d(16)
        self.head = nn.Linear(16 * 16, 10)

    def forward(self, x):
        x = torch.relu(self.norm1(self.conv1(x)))
        return self.head(torch.relu(self.norm2(self.conv2(x))).flatten(1))


class Residual(Classifier):
    """A layer norm across the residual stream."""

    def __init__(self):
        super().__init__(0.1, 0.9)
        self.embed, self.norm, self.head = nn.Linear(64, 16), nn.LayerNorm(16), nn.Linear(16, 10)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        x = self.embed(x.flatten(1))
        return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))


def run(tmp_path, name, algorithm, batch_norm=None, **fields):
    settings = {
        "model": ConvNorm,
        "data": lambda: Digits(batch_size=16),
        "train": Training(num_epochs=None, num_steps=12),
        "max_updates": 24,
        "eval_every": 100,
        "submodels": SubmodelOptions(batch_norm=batch_norm),
    }
    return finish(experiment(tmp_path / name, algorithm, **{**settings, **fields}))


def saved(finished):
    return checkpoint_reader.load(finished.folder).state_dict


def measured(state_dict, make=ConvNorm):
    """The accuracy of a saved model in plain PyTorch."""
    module = make()
    module.load_state_dict(state_dict)
    module.eval()
    data = Digits(batch_size=16)
    data.prepare_data()
    data.setup("test")
    with torch.no_grad():
        hits = [(module(x).argmax(1) == y).float() for x, y in data.test_dataloader()]
    return torch.cat(hits).mean().item()


@pytest.mark.quick_cases("fed_avg-merged", "fed_buff-static")
@pytest.mark.parametrize("batch_norm", ["merged", "static"])
@pytest.mark.parametrize("name", ["fed_avg", "fed_async", "fed_buff", "fed_opt"])
def test_submodels_with_batch_norm_learn(tmp_path, name, batch_norm):
    """The model of unequal submodels is well above chance when it is measured with its running statistics."""
    more = {"fed_buff": {"buffer_size": 2}, "fed_opt": {"server_lr": 0.03}}.get(name, {})
    algorithm = ALGORITHMS[name](submodel=RATED, **more)
    finished = run(tmp_path, "run", algorithm, batch_norm)
    accuracy = finished.summary["final"]["accuracy"]
    assert accuracy > 0.7, accuracy
    state = saved(finished)
    assert measured(state) == pytest.approx(accuracy, abs=1e-6)
    for norm in ("norm1", "norm2"):
        assert state[f"{norm}.num_batches_tracked"].item() == 0  # a count of somebody's batches is nobody else's
        assert state[f"{norm}.running_var"].min() > 0 and not state[f"{norm}.running_mean"].eq(0).all()


@pytest.mark.long("test_submodels_with_batch_norm_learn")
@pytest.mark.parametrize("batch_norm", ["merged", "static"])
def test_fragments_with_batch_norm_learn(tmp_path, batch_norm):
    algorithm = raafl.fed_raa(fragments=2, alpha=0.6)
    finished = run(tmp_path, "run", algorithm, batch_norm, max_updates=40)
    assert finished.summary["final"]["accuracy"] > 0.5, finished.summary["final"]


@pytest.mark.long("test_submodels_with_batch_norm_learn")
@pytest.mark.parametrize("batch_norm", ["merged", "static"])
def test_a_small_resnet_learns(tmp_path, batch_norm):
    def resnet():
        return ResNet(depth=8, in_channels=1, channels=4, lr=0.2)

    finished = run(tmp_path, "run", fed_avg(submodel=RATED), batch_norm, model=resnet)
    accuracy = finished.summary["final"]["accuracy"]
    assert accuracy > 0.6 and measured(saved(finished), resnet) == pytest.approx(accuracy, abs=1e-6)


def test_a_round_of_whole_models_is_exact(tmp_path, monkeypatch):
    """One round of clients whose data differ: the variance merged is that of the clients' moments, taken by hand."""
    from raafl.local.train import LocalTrainer

    sent = []
    train = LocalTrainer.run

    def watched(self, assignment, received, data, context):
        update = train(self, assignment, received, data, context)
        moments = update.tensors["norm1.running_var"].clone()
        sent.append((update.num_samples, update.tensors["norm1.running_mean"].clone(), moments))
        return update

    monkeypatch.setattr(LocalTrainer, "run", watched)
    finished = run(tmp_path, "run", fed_avg(), max_updates=4, partition=Dirichlet(0.1))
    whole = sum(samples for samples, *_ in sent)
    mean = sum(samples / whole * mean for samples, mean, _ in sent)
    variance = sum(samples / whole * moment for samples, _, moment in sent) - mean**2
    state = saved(finished)
    torch.testing.assert_close(state["norm1.running_mean"], mean, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(state["norm1.running_var"], variance, rtol=1e-4, atol=1e-6)
    naive = sum(samples / whole * (moment - mean**2) for samples, mean, moment in sent)
    assert (state["norm1.running_var"] > naive).all()  # the means differ, which a mean of variances forgets


def test_static_statistics_are_those_of_the_training_data(tmp_path):
    """With all of it in one batch, the first layer's statistics can be had at once."""
    num = 1438
    options = SubmodelOptions(batch_norm="static", static_batches=1)
    training = Training(num_epochs=1, batch_size=num)
    finished = run(tmp_path, "run", fed_avg(), submodels=options, train=training, max_updates=4)
    state = saved(finished)
    data = Digits(batch_size=num)
    data.prepare_data()
    data.setup("fit")
    (x, _), *rest = data.train_dataloader()
    assert not rest
    module = ConvNorm()
    module.load_state_dict(state)
    with torch.no_grad():
        first = module.conv1(x)
    torch.testing.assert_close(state["norm1.running_mean"], first.mean((0, 2, 3)), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(state["norm1.running_var"], first.var((0, 2, 3)), rtol=1e-3, atol=1e-5)


@pytest.mark.quick_cases("fed_buff-merged")
@pytest.mark.parametrize("batch_norm", ["merged", "static"])
@pytest.mark.parametrize("algorithm", [fed_buff(buffer_size=2), fed_async()], ids=["fed_buff", "fed_async"])
def test_a_run_that_crashed_ends_as_if_it_had_not_and_replays(tmp_path, monkeypatch, algorithm, batch_norm):
    more = {
        "model": ConvNorm,
        "submodels": SubmodelOptions(batch_norm=batch_norm, static_batches=3),
        "max_updates": 10,
        "checkpoint_every": 1,
        "eval_every": 3,
    }
    whole = finish(experiment(tmp_path / "whole", algorithm, **more))
    made = experiment(tmp_path / "cut", algorithm, **more)
    with crash(monkeypatch, 7):
        simulate(made)
    assert not checkpoint_reader.load(tmp_path / "cut").state_dict["norm1.running_mean"].eq(0).all()  # usable as it is
    resumed = finish(replace(made, output=None, resume=made.output))
    assert {**resumed.summary, "wall_s": None} == {**whole.summary, "wall_s": None}
    assert all(torch.equal(tensor, saved(resumed)[name]) for name, tensor in saved(whole).items())
    assert equal_replay(made, resumed) and equal_replay(made, whole)


@pytest.mark.long(
    "tests/conformance/test_executors.py::test_every_algorithm_ends_alike_over_ranks_and_when_it_has_crashed_and_goes_on_elsewhere"
)
def test_workers_change_nothing(tmp_path):
    runs = [run(tmp_path, str(n), fed_avg(submodel=RATED), max_updates=8, workers=n) for n in (1, 2)]
    assert runs[0].digest == runs[1].digest and runs[0].summary["final"] == runs[1].summary["final"]


def test_residual_width_is_a_setting_of_the_run(tmp_path):
    sizes = {}
    for wide in (False, True):
        options = SubmodelOptions(residual_width=wide)
        algorithm = fed_avg(submodel=RateSelect(rates=0.25))
        finished = run(tmp_path, str(wide), algorithm, model=Residual, submodels=options, max_updates=4)
        sizes[wide] = finished.summary["bytes_up"] // 4 // 4
    # floats of a task with 16 of 32 hidden units, and with 8 of 16 in the residual stream, too
    assert sizes == {False: 65 * 16 + 2 * 16 + 17 * 16 + 17 * 16 + 170, True: 65 * 8 + 2 * 8 + 9 * 16 + 17 * 8 + 90}


def test_what_a_config_may_say(tmp_path):
    (lines,) = re.findall(r"^```yaml\n(submodels:.*?)^```$", (ROOT / "docs" / "submodels.md").read_text(), re.M | re.S)
    (tmp_path / "lines.yaml").write_text(lines)
    made = parse("simulate", ["--config", CONFIG, "--config", str(tmp_path / "lines.yaml")]).experiment
    made.check()
    assert made.submodels == SubmodelOptions(residual_width=True, batch_norm="static", static_batches=20)
    assert parse("simulate", ["--config", CONFIG]).experiment.submodels == SubmodelOptions()
    (tmp_path / "five.yaml").write_text("submodels: 5\n")
    with pytest.raises(BadInput, match=r"submodels is 5: give its fields, as in --submodels\.FIELD VALUE"):
        parse("simulate", ["--config", CONFIG, "--config", str(tmp_path / "five.yaml")])


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("batch_norm=dynamic", "submodels.batch_norm is 'dynamic': give"),
        ("residual_width=wide", "submodels.residual_width is 'wide': give"),
        ("static_batches=0", "submodels.static_batches is 0"),
        ("batchnorm=static", "submodels.batchnorm: did you mean"),
    ],
)
def test_bad_values_are_one_line(option, says):
    with pytest.raises(BadInput, match=says) as found:
        parse("simulate", ["--config", CONFIG, f"--submodels.{option}"])
    assert "\n" not in str(found.value)


def test_a_step_that_cannot_run_without_gradients_is_named(tmp_path):
    class Fussy(ConvNorm):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            torch.autograd.grad(loss, self.head.weight, retain_graph=True)
            return loss

    with pytest.raises(
        BadInput, match="training_step without gradients, to collect static batch norm, fails on a batch"
    ):
        run(tmp_path, "run", fed_avg(), "static", model=Fussy)
    run(tmp_path, "merged", fed_avg(), "merged", model=Fussy, max_updates=4)
