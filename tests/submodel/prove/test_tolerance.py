"""A difference is rounding where the model makes as much of the last place; beyond that, the axis is refuted."""

from __future__ import annotations

import pytest
import torch
from lightning import LightningModule
from torch import nn
from torch.nn import functional as F

from raafl.submodel import Submodels
from raafl.submodel.prove import proof
from raafl.submodel.prove.proof import TIMES, Bound, Rounding, _Proof, apart, refuted
from tests.submodel.prove.shifts import shift_by_a_unit


class Cosine(LightningModule):
    """ArcFace's kind of head: cut to one unit, the features have a direction of 1 or -1, and no gradient at all."""

    def __init__(self, width, squash=lambda x: x):
        super().__init__()
        self.features, self.classes, self.squash = nn.Linear(12, width), nn.Parameter(torch.randn(5, width)), squash

    def training_step(self, batch, batch_idx):
        features = self.squash(self.features(batch[0].mean(1)))
        return F.cross_entropy(F.linear(F.normalize(features), F.normalize(self.classes)) * 10, batch[1])


class Speaker(LightningModule):
    """Dilated convolutions and batch norms before such a head, as speakers are told apart."""

    def __init__(self, depth=8):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv1d(16, 16, 3, padding=1), nn.ReLU(), nn.BatchNorm1d(16)) for _ in range(depth)
        )
        self.first, self.norm, self.head = nn.Conv1d(12, 16, 1), nn.BatchNorm1d(16), Cosine(8)
        self.head.features = nn.Linear(16, 8)

    def training_step(self, batch, batch_idx):
        x = self.first(batch[0].transpose(1, 2))
        for layer in self.layers:
            x = layer(x)
        return self.head.training_step([self.norm(x.mean(2))[:, None], batch[1]], batch_idx)


class Chaotic(LightningModule):
    """Multiplies any difference by about a hundred in each layer; ``wrong`` is added to its loss for each unit that is gone."""

    def __init__(self, wrong=0.0, depth=5):
        super().__init__()
        self.first, self.last, self.wrong = nn.Linear(12, 48), nn.Linear(48, 5), wrong
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(depth))

    def training_step(self, batch, batch_idx):
        x = self.first(batch[0].mean(1))
        for layer in self.layers:
            x = F.normalize(torch.sin(600 * layer(x)))
        gone = 48 - self.last.weight.shape[1]
        return F.cross_entropy(self.last(x), batch[1]) + self.wrong * gone


def batch_of(num):
    return [torch.randn(num, 9, 12, generator=torch.Generator().manual_seed(1)), torch.arange(num) % 5]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("width", "squash"), [(24, nn.Identity()), (24, torch.tanh), (128, nn.Identity())])
def test_an_axis_of_a_cosine_head_is_proven_though_one_unit_has_no_gradient(width, squash, seed):
    torch.manual_seed(seed)
    module, batch = Cosine(width, squash), batch_of(4)
    submodels = Submodels(module, batch)
    assert [axis.size for axis in submodels.axes.values()] == [width] and refuted(submodels, module, batch) == {}


@pytest.mark.parametrize("num", [2, 4])
def test_axes_before_a_cosine_head_are_proven_with_few_samples(num):
    torch.manual_seed(0)
    module, batch = Speaker(), batch_of(num)
    submodels = Submodels(module, batch)
    assert len(submodels.axes) == 10 and refuted(submodels, module, batch) == {}


def measured(monkeypatch, module, batch):
    """Refute what is wrong of a model; return it, and the largest change of the loss that was measured."""
    changes = []
    add = Rounding.add

    def spied(rounding, one, other):
        add(rounding, one, other)
        changes.append(rounding.changes["the loss"])

    monkeypatch.setattr(Rounding, "add", spied)
    return refuted(Submodels(module, batch), module, batch), max(changes, default=0.0)


def test_what_a_model_makes_of_rounding_is_allowed_and_little_more_is_refuted(monkeypatch):
    batch = batch_of(4)
    found, change = measured(monkeypatch, Chaotic(), batch)
    assert found == {} and 1e-9 < change < 1e-6
    fixed = refuted(Submodels(Chaotic(), batch), Chaotic(), batch, measures_rounding=False)
    assert fixed.keys() >= {"first", "layers.0"}
    wrong = Chaotic(wrong=2 * TIMES * change / 24)  # 24 units or more are gone
    assert list(refuted(Submodels(wrong, batch), wrong, batch)) == ["layers.4"]


@pytest.mark.parametrize(("wrong", "names"), [(1e-10, []), (2e-9, ["first"])])
def test_a_model_that_amplifies_nothing_has_the_fixed_tolerance(wrong, names):
    module = Chaotic(wrong, depth=0)  # of its loss of about 2, 24 or 47 units are gone
    assert list(refuted(Submodels(module, batch_of(4)), module, batch_of(4))) == names


def test_rounding_explains_no_more_than_a_share_of_the_values(monkeypatch):
    monkeypatch.setattr(proof, "TIMES", 1e12)
    monkeypatch.setattr(proof, "MOVED", 1e6)
    module = Chaotic(wrong=1e-4, depth=1)
    assert list(refuted(Submodels(module, batch_of(4)), module, batch_of(4))) == ["layers.0"]


@pytest.mark.parametrize(
    "make", [lambda: Cosine(24), lambda: Speaker(3), Chaotic], ids=["cosine", "speaker", "chaotic"]
)
def test_a_member_whose_units_are_shifted_is_refuted_beside_measured_rounding(make, monkeypatch):
    torch.manual_seed(0)
    module, batch = make(), batch_of(4)
    submodels = Submodels(module, batch)
    held = _Proof(submodels, module, batch, torch.float64)
    assert held.begin() is None
    for axis in submodels.axes.values():
        for member in axis.members:
            shift_by_a_unit(monkeypatch, member, axis)
            assert held._failing(list(submodels.axes)), member


def test_values_of_zero_are_compared():
    zero, one = torch.zeros(3), torch.full((3,), 1e-300, dtype=torch.float64)
    assert list(apart("it", one, zero.double(), Bound(1e-8, 0.0))) == ["it is not 0"]
    assert list(apart("it", zero, zero, Bound(1e-8, 0.0))) == []
    assert list(apart("it", one, zero.double(), Bound(1e-8, 0.0, least=1e-299))) == []
    assert list(apart("it", zero, torch.zeros(2), Bound(1e-8))) == ["it has the shape (3,), not (2,)"]
    assert list(apart("it", zero, zero * float("nan"), Bound(1e-8))) == ["it is not finite"]
