"""Layers that are made anew when they are copied keep what raafl has set on them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from raafl.submodel import Spec, Submodels
from raafl.submodel.cut.sizes import put, set_carried
from tests.local.bench import filled


class Regrouped(nn.Module):
    """As an einops layer: its state is the arguments it was made with, and a copy is made anew of them."""

    def __init__(self, heads):
        super().__init__()
        self.heads, self.sizes = heads, (heads, 8)

    def forward(self, x):
        return x.unflatten(-1, (self.heads, -1)).softmax(-2).flatten(-2)

    def __getstate__(self):
        return {"heads": 4}

    def __setstate__(self, state):
        self.__init__(**state)


class Copied(Regrouped):
    """The same by a method of copying alone."""

    def __deepcopy__(self, memo):
        return type(self)(4)


class Plain(nn.Module):
    """A layer whose copies have all attributes."""


class LiteralHeads(nn.Module):
    """Sizes that the code works out, in a layer that is made anew: its call is corrected."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 2)
        self.regroup = Literal()

    def forward(self, x):
        return self.last(self.regroup(self.first(x)))


class Literal(Regrouped):
    def __init__(self, heads=4):
        super().__init__(heads)

    def forward(self, x):
        return x.view(len(x), 4, 2).softmax(-1).reshape(len(x), 8)


def copies(module):
    return copy.deepcopy(module), pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("kind", [Regrouped, Copied])
def test_attributes_that_are_set_survive(kind):
    layer = kind(4)
    put({"layer": layer}, {("layer", ("heads",)): 2, ("layer", ("sizes", 0)): 2})
    x = torch.randn(3, 8)
    for other in (*copies(layer), *copies(copies(layer)[0])):
        assert isinstance(other, kind) and (other.heads, other.sizes) == (2, (2, 8))
        assert torch.equal(other(x), layer(x)) and not torch.equal(other(x), kind(4)(x))


def test_a_layer_that_keeps_its_attributes_keeps_its_class():
    layer = Plain()
    set_carried(layer, "heads", 2)
    assert type(layer) is Plain and vars(copy.deepcopy(layer))["heads"] == 2


def test_a_corrected_call_survives_and_belongs_to_the_copy():
    torch.manual_seed(0)
    module, batch = LiteralHeads(), torch.randn(5, 3)
    submodels = Submodels(module, (batch,))
    (name,) = (name for name, axis in submodels.axes.items() if axis.size in (4, 8))
    spec = Spec.select({name: range(submodels.axes[name].size // 2)})
    shrunk = filled(submodels, spec, submodels.state(module))
    assert shrunk.module.first.weight.shape == (4, 3)
    expected = shrunk.module(batch)
    for other in copies(shrunk.module):
        assert torch.allclose(other(batch), expected, rtol=1e-6)
        assert other.regroup.forward.module is other.regroup
