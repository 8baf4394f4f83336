from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from raafl.core.masked_loss import masked
from raafl.data import ClientData
from raafl.data.labels import classes_in


def test_logits_of_absent_classes_are_zero_and_have_no_gradient():
    layer, x, y = nn.Linear(2, 3), torch.tensor([[1.0, 2.0]]), torch.tensor([2])
    plain = layer(x)
    with masked(layer, {0, 2}):
        logits = layer(x)
        F.cross_entropy(logits, y).backward()
    assert logits[0, 1] == 0 and torch.equal(logits[:, [0, 2]], plain[:, [0, 2]])
    assert layer.weight.grad[1].eq(0).all() and layer.bias.grad[1] == 0
    share = torch.softmax(torch.stack([plain[0, 0], torch.tensor(0.0), plain[0, 2]]), 0)  # class 1 at logit 0
    torch.testing.assert_close(layer.bias.grad, torch.stack([share[0], torch.tensor(0.0), share[2] - 1]))
    assert torch.equal(layer(x), plain)  # outside it is as it was


def test_logits_as_an_attribute():
    class Model(nn.Module):
        def forward(self, x):
            return SimpleNamespace(logits=x)

    model = Model()
    with masked(model, {1}):
        assert model(torch.ones(1, 3)).logits.tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("classes", [None, {0, 1, 2}, {0, 7}, {-100, 1}])
def test_what_cannot_be_masked_or_need_not_be_is_left_alone(classes):
    layer, x = nn.Linear(2, 3), torch.ones(2, 2)
    with masked(layer, classes):
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


def test_only_logits_of_samples_are_masked():
    layer = nn.Linear(2, 3)
    with masked(layer, {1}):
        assert layer(torch.ones(2, 4, 2)).ne(0).all()


def test_the_hook_is_gone_after_an_error():
    layer = nn.Linear(2, 3)
    with pytest.raises(RuntimeError), masked(layer, {1}):
        raise RuntimeError
    assert not layer._forward_hooks


class Slow:
    """The same samples one by one."""

    def __init__(self, y):
        self.y = y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return torch.zeros(2), self.y[i]


def test_the_classes_of_a_client():
    y = torch.tensor([3, 1, 1, 0, 3, 2])
    for dataset in (TensorDataset(torch.zeros(6, 2), y), Slow(y)):
        data = ClientData(dataset, torch.tensor([0, 1, 2, 4]), batch_size=2)
        assert data.classes() == {1, 3} and data.classes() is data.classes()
    assert ClientData(TensorDataset(torch.zeros(6, 2), y.float()), torch.arange(6)).classes() is None


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([[torch.zeros(2, 3), torch.tensor([1, 2])], [torch.zeros(1, 3), torch.tensor([2])]], {1, 2}),
        ([{"input_ids": torch.zeros(2, 3), "labels": torch.tensor([4, 4])}], {4}),
        ([[torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64)]], None),  # a label for each position
        ([{"input_ids": torch.zeros(2, 3)}], None),
        ([torch.zeros(2)], None),
    ],
)
def test_classes_in_batches(batches, expected):
    assert classes_in(batches) == expected
