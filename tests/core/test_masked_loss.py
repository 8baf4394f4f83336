"""On which models a masked loss masks nothing; each reason is checked against what `masked` does in a real step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from lightning import LightningModule
from torch import nn
from torch.nn import functional as F

from model_zoo import MLP, CharLM
from raafl.algorithms import fed_avg, hetero_fl
from raafl.core.algorithm import Local
from raafl.core.masked_loss import masked, why_unmasked
from raafl.submodel import Submodels

X, Y = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0])
"""Of three classes the samples have two."""


class Named(LightningModule):
    """Makes its loss in `training_step` of the attribute `logits`."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x, y=None):
        logits = self.head(x)
        return SimpleNamespace(logits=logits, loss=None if y is None else F.cross_entropy(logits, y))

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self(x).logits, y)
        self.log("train_loss", loss)
        return {"loss": loss}


class Inside(Named):
    """Makes its loss in `forward`, as transformers do where they are given the labels."""

    def training_step(self, batch, index):
        return self(*batch).loss


class Scalar(Named):
    """Whose forward gives the loss alone."""

    def forward(self, x, y):
        return F.cross_entropy(self.head(x), y)

    def training_step(self, batch, index):
        return self(*batch)


class Around(Named):
    """Whose training step goes around its forward."""

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.head(x), y)


CASES = [
    (lambda: MLP(6, (4,), 3), None),
    (Named, None),
    (Inside, "the loss of Inside is not computed from the logits that its forward returns"),
    (Scalar, "Scalar.forward returns no logits of shape (batch, classes)"),
    (Around, "Around.training_step does not call the module itself"),
]


def gradients(make, classes):
    torch.manual_seed(1)
    module = make()
    module.log = lambda *args, **kwargs: None
    with masked(module, classes):
        answer = module.training_step((X, Y), 0)
        (answer["loss"] if isinstance(answer, dict) else answer).backward()
    return [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize(("make", "why"), CASES, ids=["plain", "named", "inside", "scalar", "around"])
def test_what_is_said_is_what_happens(make, why):
    assert why_unmasked(Submodels(make(), (X, Y))) == why
    plain, with_mask = gradients(make, None), gradients(make, {0, 1})
    assert all(map(torch.equal, plain, with_mask)) is (why is not None)


@pytest.mark.parametrize(
    "batch",
    [(X, Y.float()), (X, Y.view(4, 1)), {"x": X}, X],
    ids=["floats", "a label for each place", "none", "inputs"],
)
def test_labels_that_are_not_one_class_for_each_sample(batch):
    assert (
        why_unmasked(Submodels(MLP(6, (4,), 3), batch)) == "the last entry of a batch is not one class for each sample"
    )


def test_a_language_model_under_hetero_fl_is_told():
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    submodels = Submodels(CharLM(vocab_size=7, hidden=4), (tokens, tokens))
    (note,) = hetero_fl().local.notes(submodels)
    assert note.startswith("masked loss: no class is masked, since the last entry of a batch is not")
    assert hetero_fl(masked=False).local.notes(submodels) == fed_avg().local.notes(submodels) == []


def test_nothing_is_said_of_what_cannot_be_known():
    class Reads(Named):
        def training_step(self, batch, index):
            return super().training_step(batch, index)["loss"] * float(batch[0].sum())

    assert why_unmasked(Submodels(Reads(), (X, Y))) is None
    assert why_unmasked(Submodels(Named())) is None
    submodels = Submodels(MLP(6, (4,), 3), (X, Y))
    assert Local(masked=True).notes(submodels) == []
    assert not submodels.module._forward_hooks  # what looked on is gone
