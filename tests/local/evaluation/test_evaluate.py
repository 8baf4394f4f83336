"""Measuring a global model: means over samples, from what a module returns or else logs, without touching anything."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.core.module import Metric
from torch import nn
from torch.nn import functional as F

from raafl.api.modules import Datasets as DataModule
from raafl.data.federated import FederatedData
from raafl.data.partition import Iid
from raafl.errors import BadInput
from raafl.local.evaluate import Evaluator, peak_bytes
from raafl.submodel import Submodels
from tests.local.bench import Net, samples


class Returning(Net):
    def validation_step(self, batch, index):
        x, y = batch
        return {"loss": F.cross_entropy(self(x), y), "accuracy": (self(x).argmax(1) == y).float().mean()}


class Logging(Returning):
    def validation_step(self, batch, index):
        self.log_dict(super().validation_step(batch, index), prog_bar=True)


def evaluator_of(make, sizes=(5, 5, 5, 5, 2)):
    torch.manual_seed(1)
    module = make()
    x, y = samples().tensors
    split = list(zip(torch.split(x, sizes), torch.split(y, sizes), strict=True))
    submodels = Submodels(module, split[0])
    return Evaluator(submodels, lambda: zip(split, sizes, strict=True), seed=0), submodels.state(module), module


@pytest.mark.parametrize("make", [Returning, Logging])
def test_the_mean_is_over_samples_whatever_the_batches(make):
    evaluator, values, module = evaluator_of(make)
    x, y = samples().tensors
    with torch.no_grad():
        loss, correct = F.cross_entropy(module(x), y).item(), (module(x).argmax(1) == y).float().mean().item()
    assert evaluator(values, 0) == {"loss": pytest.approx(loss, rel=1e-6), "accuracy": pytest.approx(correct, rel=1e-6)}


def test_the_values_given_are_measured_not_those_before():
    evaluator, values, _ = evaluator_of(Returning)
    first = evaluator(values, 0)
    zero = values.clone()
    for buffer in zero.buffers.values():
        buffer.zero_()
    assert evaluator(zero, 0)["loss"] == pytest.approx(torch.log(torch.tensor(3.0)).item(), rel=1e-6)
    assert evaluator(values, 0) == first


def test_values_are_prepared_on_a_copy():
    evaluator, values, _ = evaluator_of(Returning)

    def zero(mine):
        for buffer in mine.buffers.values():
            buffer.zero_()

    evaluator._prepare, before = zero, values.fingerprint()
    assert evaluator(values, 0)["loss"] == pytest.approx(torch.log(torch.tensor(3.0)).item(), rel=1e-6)
    assert values.fingerprint() == before


def test_measuring_changes_nothing_and_drops_nothing():
    class Heavy(Returning):
        dropout = 0.9

        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x):
            return super().forward(self.norm(x))

    evaluator, values, _ = evaluator_of(Heavy)
    before = values.fingerprint()
    assert evaluator(values, 0) == evaluator(values, 0)
    assert values.fingerprint() == before


def test_a_module_that_replaces_its_buffer_is_measured_with_the_values_given():
    class Counting(Returning):
        def __init__(self):
            super().__init__()
            self.register_buffer("shift", torch.zeros(6))

        def validation_step(self, batch, index):
            self.shift = self.shift + 1.0
            return {"shift": self.shift[0]}

    evaluator, values, _ = evaluator_of(Counting, sizes=(11, 11))
    assert evaluator(values, 0) == {"shift": 1.5}
    assert evaluator(values, 0) == {"shift": 1.5}


def test_a_model_without_a_validation_step_is_named():
    with pytest.raises(BadInput, match="Net has no validation_step: define one"):
        evaluator_of(Net)


class Both(Net):
    """One metric object, logged under one name and returned under another; both names have its value."""

    def __init__(self):
        super().__init__()
        self.hits = Hits()

    def validation_step(self, batch, index):
        self.hits.update(self(batch[0]), batch[1])
        self.log("hits", self.hits)
        return {"returned_hits": self.hits, "index": index}


class Hits(Metric):
    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("num", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, logits, y):
        self.num += (logits.argmax(1) == y).sum()

    def compute(self):
        return self.num


def test_a_metric_that_is_logged_and_returned_is_computed_before_it_is_reset():
    evaluator, values, module = evaluator_of(Both)
    x, y = samples().tensors
    hits = float((module(x).argmax(1) == y).sum())
    assert hits > 0
    expected = {"returned_hits": hits, "index": pytest.approx((5 * (0 + 1 + 2 + 3) + 2 * 4) / 22), "hits": hits}
    assert evaluator(values, 0) == evaluator(values, 0) == expected


def test_what_is_logged_after_a_measurement_weighs_as_before():
    evaluator, values, _ = evaluator_of(Returning)
    evaluator(values, 0)
    assert evaluator.recorder.weight == 1.0


class Graph:
    """Tensors in attributes, the nodes of all samples in one."""

    def __init__(self, given):
        self.x, self.y = torch.cat([x for x, _ in given]), torch.stack([y for _, y in given])


@pytest.mark.parametrize(
    "collate",
    [
        lambda given: {"x": torch.stack([x for x, _ in given], 1), "y": torch.stack([y for _, y in given])},
        lambda given: {"x": [x for x, _ in given], "y": torch.stack([y for _, y in given])},
        Graph,
    ],
    ids=["time first", "lists of images", "graph"],
)
def test_a_batch_of_any_kind_counts_as_many_samples_as_were_fetched(collate):
    """Of 0 to 9 in batches of 4, 4 and 2 the mean is 4.5; of the batches' means, 5.17."""

    class Mean(Net):
        def validation_step(self, batch, index):
            y = batch.y if isinstance(batch, Graph) else batch["y"]
            self.log("logged", y.mean())
            return {"returned": y.mean()}

    data = [(torch.full((3, 6), float(i)), torch.tensor(float(i))) for i in range(10)]
    module = DataModule(data, data, batch_size=4, collate_fn=collate)
    submodels = Submodels(Mean(), samples()[:2])
    evaluator = Evaluator(submodels, FederatedData(module, Iid(), 2).test_batches, seed=0)
    assert evaluator(submodels.state(Mean()), 0) == {"logged": 4.5, "returned": 4.5}


def test_peak_memory_is_in_bytes_on_a_mac_too(monkeypatch):
    used = SimpleNamespace(ru_maxrss=7)
    monkeypatch.setattr("resource.getrusage", lambda who: used)
    monkeypatch.setattr("sys.platform", "linux")
    assert peak_bytes(torch.device("cpu")) == 7 * 1024
    monkeypatch.setattr("sys.platform", "darwin")
    assert peak_bytes(torch.device("cpu")) == 7
