"""Metric objects of torchmetrics in a user's own module, and a client's measurement of its own submodel by hand."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from lightning.pytorch.core.module import Metric, MetricCollection
from torch import nn
from torch.nn import functional as F

from model_zoo.metrics import MacroF1
from raafl.core.algorithm import Training
from raafl.data.federated import ClientData
from raafl.errors import BadInput
from raafl.local.context import Stopped, TaskContext
from raafl.local.evaluate import Evaluator
from raafl.rules import Rules
from raafl.submodel import FULL, Spec, Submodels
from tests.helpers.plain_loop import seed_of
from tests.local.bench import Bench, Net, assignment, samples

SIZES = (5, 5, 5, 5, 2)


class Misses(Metric):
    """How many samples were not hit: a count, which no mean over batches gives."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("num", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, logits, y):
        self.num += (logits.argmax(1) != y).sum()

    def compute(self):
        return self.num


class WithObjects(Net):
    """Updates metric objects in the ways that Lightning users do."""

    def __init__(self):
        super().__init__()
        self.misses, self.at_the_end, self.trained = Misses(), MacroF1(), Misses()
        self.several = MetricCollection({"misses": Misses(), "f1": MacroF1()}, prefix="several_")

    def training_step(self, batch, index):
        x, y = batch
        self.trained(self(x).detach(), y)
        self.log("trained_misses", self.trained)
        return super().training_step(batch, index)

    def validation_step(self, batch, index):
        x, y = batch
        logits = self(x)
        self.misses(logits, y)  # updates, and gives the batch's
        self.several.update(logits, y)
        self.at_the_end.update(logits, y)
        self.log("misses", self.misses, on_epoch=True)
        self.log_dict(self.several)
        self.log("most", logits.max(), reduce_fx=torch.max)
        self.log("samples", float(len(y)), reduce_fx="sum")
        return {"loss": F.cross_entropy(logits, y), "logits": logits, "misses": -1.0}

    def on_validation_epoch_end(self):
        self.log("end_f1", self.at_the_end.compute())
        self.at_the_end.reset()


def evaluate(module, values=None):
    x, y = samples().tensors
    split = list(zip(torch.split(x, SIZES), torch.split(y, SIZES), strict=True))
    submodels = Submodels(module, split[0])
    evaluator = Evaluator(submodels, lambda: zip(split, SIZES, strict=True), seed=0)
    values = submodels.state(module)
    first = evaluator(values, 0)
    assert evaluator(values, 0) == first
    return first


def test_logged_metric_objects_compute_over_all_batches():
    torch.manual_seed(1)
    module = WithObjects()
    x, y = samples().tensors
    with torch.no_grad():
        logits = module(x)
    misses, score = float((logits.argmax(1) != y).sum()), MacroF1()
    score.update(logits, y)
    f1 = pytest.approx(score.compute().item())
    assert evaluate(module) == {
        "loss": pytest.approx(F.cross_entropy(logits, y).item()),
        "misses": misses,
        "several_misses": misses,
        "several_f1": f1,
        "end_f1": f1,
        "most": logits.max().item(),
        "samples": 22.0,
    }


def test_a_metric_of_torchmetrics_itself():
    classification = pytest.importorskip("torchmetrics.classification")

    class User(Net):
        def __init__(self):
            super().__init__()
            self.f1 = classification.MulticlassF1Score(num_classes=3, average="macro")

        def validation_step(self, batch, index):
            x, y = batch
            self.f1(self(x), y)
            self.log("f1", self.f1)

    torch.manual_seed(1)
    module, score = User(), MacroF1()
    x, y = samples().tensors
    with torch.no_grad():
        score.update(module(x), y)
    assert evaluate(module) == {"f1": pytest.approx(score.compute().item())}


def test_states_of_metrics_are_no_part_of_the_model():
    batch = samples()[:2]
    plain, measured = Submodels(Net(), batch), Submodels(WithObjects(), batch)
    assert measured.layout() == plain.layout() and measured.axes.keys() == plain.axes.keys()
    (axis,) = measured.axes
    spec = Spec.select({axis: [0, 3, 5]})
    small = measured.shrink(spec).module
    assert {name for name, _ in small.named_parameters()} == {name for name, _ in plain.module.named_parameters()}
    assert small.misses is not measured.module.misses


def test_a_task_resets_what_it_logged_and_starts_without_what_was_given_up():
    bench = Bench.of(WithObjects, training=Training(num_epochs=2))
    first, again = (bench.run(assignment())[0].metrics for _ in range(2))
    assert first == again and 0 < first["trained_misses"] <= 44
    stop, given = threading.Event(), bench.data.batches

    def stopping(*args, **more):
        for number, batch in enumerate(given(*args, **more)):
            if number == 2:
                stop.set()
            yield batch

    bench.data.batches = stopping
    with suppress(Stopped):
        bench.run(assignment(), TaskContext(stop))
        pytest.fail("it was not stopped")
    bench.data.batches = given
    assert bench.run(assignment())[0].metrics == first


def test_a_metric_that_is_not_one_number_is_named():
    class Wide(Net):
        def validation_step(self, batch, index):
            self.log("scores", self(batch[0])[0])

    with pytest.raises(BadInput, match=r"'scores' is logged .* a tensor of shape \(3,\): give one number"):
        evaluate(Wide())


# ---- on a client ----


class Held(Net):
    """Drops half of its hidden units while training, and counts its calls in a buffer."""

    dropout = 0.5

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(self.norm(x))

    def validation_step(self, batch, index):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}


def hold_out(bench, seed=9, num=7):
    """Give the bench's client a test part; returns its inputs and labels."""
    held = samples(seed)
    bench.data.test = ClientData(held, torch.arange(num), 3)
    return held.tensors[0][:num], held.tensors[1][:num]


@pytest.mark.parametrize("sends", ["values", "delta"])
@pytest.mark.parametrize("kept", [None, [0, 2, 5]])
def test_a_client_measures_its_trained_submodel_in_eval_mode(sends, kept):
    bench = Bench.of(Held, sends=sends, training=Training(num_epochs=2))
    spec = FULL if kept is None else Spec.select({next(iter(bench.submodels.axes)): kept})
    plain, before = bench.run(assignment(spec))
    x, y = hold_out(bench)
    update, after = bench.run(assignment(spec))

    assert after.fingerprint() == before.fingerprint()  # what is sent does not know of the test
    assert {k: v for k, v in update.metrics.items() if not k.startswith("test/")} == plain.metrics
    assert update.num_samples == plain.num_samples and update.num_steps == plain.num_steps
    small = bench.submodels.shrink(spec)
    small.present.copy_(bench.submodels.plan(spec, "present").gather(bench.values))
    for dtype, buffer in small.trained.buffers.items():
        buffer.copy_(after.buffers[dtype] + (buffer if sends == "delta" else 0))
    module = small.module.eval()
    with torch.no_grad():
        logits = module(x)
    assert update.metrics | plain.metrics == plain.metrics | {
        "test/loss": pytest.approx(F.cross_entropy(logits, y).item(), rel=1e-5),
        "test/accuracy": pytest.approx((logits.argmax(1) == y).float().mean().item()),
        "test/num_samples": 7.0,
    }


class Drawing(Held):
    """Draws a number in each step; the training steps as many as there are epochs."""

    def training_step(self, batch, index):
        torch.rand(1)
        return super().training_step(batch, index)

    def validation_step(self, batch, index):
        return {"drawn": torch.rand(()) if len(batch[0]) == 3 else torch.zeros(())}


@pytest.mark.parametrize("num_epochs", [1, 3])
@pytest.mark.parametrize("revision", [2, 3])
def test_a_test_part_draws_from_a_seed_of_its_own(num_epochs, revision):
    bench = Bench.of(Drawing, training=Training(num_epochs=num_epochs))
    bench.submodels.rules = Rules(revision)
    hold_out(bench, num=3)
    task = replace(assignment(seed=11), version=4)
    drawn = bench.run(task)[0].metrics["test/drawn"]
    torch.manual_seed(seed_of(11, "own test", 4))
    assert (drawn == torch.rand(()).item()) is (revision == 3)


def test_static_batch_norm_is_measured_with_statistics_of_the_test_batches():
    torch.manual_seed(3)
    module, x, y = Held(), *samples(9).tensors
    submodels = Submodels(module, samples()[:2], batch_norm="static")
    bench = Bench.of(Held)
    trainer = type(bench.trainer)(submodels, bench.trainer.local, "values", Training(num_epochs=1))
    bench.data.test = ClientData(samples(9), torch.arange(7), 5)  # in batches of 4 and 3
    received = submodels.state(module)
    update = trainer.run(assignment(), received, bench.data)
    small = submodels.shrink(FULL)
    small.present.copy_(received)
    small.trained.copy_(update.tensors)
    small.module.eval()
    small.module.norm.train()
    with torch.no_grad():
        logits = torch.cat([small.module(x[:4]), small.module(x[4:7])])
    assert update.metrics["test/loss"] == pytest.approx(F.cross_entropy(logits, y[:7]).item(), rel=1e-5)


def test_a_task_may_be_given_up_while_it_is_measured():
    bench = Bench.of(Held)
    hold_out(bench)
    stop, given = threading.Event(), bench.data.test.in_order

    def stopping(size):
        for batch in given(size):
            stop.set()
            yield batch

    bench.data.test.in_order = stopping
    with pytest.raises(Stopped):
        bench.run(assignment(), TaskContext(stop))
