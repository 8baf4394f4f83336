"""Discovery: what couples is found together, and what may not shrink is kept whole, with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from raafl.submodel import Member, Spec, SpecError, Submodels


def sizes(module):
    return {name: axis.size for name, axis in Submodels(module).axes.items()}


def traced(forward, **layers):
    """A module with these layers and this forward."""

    class Traced(nn.Module):
        def __init__(self):
            super().__init__()
            for name, layer in layers.items():
                setattr(self, name, layer)

    Traced.forward = forward
    return Traced()


LINEAR = {"a": nn.Linear(4, 6), "b": nn.Linear(6, 6), "c": nn.Linear(6, 2)}


@pytest.mark.parametrize(
    ("forward", "axes"),
    [
        (lambda self, x: self.c(self.a(x).relu()), {"a": 6}),
        (lambda self, x: self.c(F.dropout(F.relu(self.a(x)), 0.1, self.training)), {"a": 6}),
        (lambda self, x: self.c(self.b(self.a(x)) * 2 + 1), {"a": 6, "b": 6}),
        (lambda self, x: self.c(self.a(x) + self.b(self.a(x))), {"a": 6}),  # a residual joins both
        (lambda self, x: self.c(torch.sigmoid(self.a(x)) * self.b(self.a(x))), {"a": 6}),  # and so does a gate
        (lambda self, x: self.c(self.b(self.b(self.a(x)))), {"a": 6}),  # a layer used twice has one input width
        (lambda self, x: self.c(torch.softmax(self.a(x), -1)), {}),
        (lambda self, x: self.c(self.a(x).sort().values), {}),
        (lambda self, x: self.c(F.layer_norm(self.a(x), (6,))), {}),
        (lambda self, x: self.c(self.a(x)[:, :6]), {"a": 6}),
        (lambda self, x: self.c(torch.cat([self.a(x)], 1)), {"a": 6}),
        (lambda self, x: (self.c(self.a(x)), self.a(x)), {}),  # it is an output, too
        (
            lambda self, x: self.c(self.a(x) @ self.b.weight),
            {},
        ),  # a tensor of a layer used by hand, and its bias is not used
        (lambda self, x: self.c(self.a(x) + x.new_ones(6)), {"a": 6}),
        (lambda self, x: self.c(self.a(x).view(-1, 6)), {"a": 6}),  # a width written as a number
        (lambda self, x: self.c(self.a(x).view(x.size(0), -1)), {"a": 6}),
    ],
)
def test_operations(forward, axes):
    called = {name: layer for name, layer in LINEAR.items() if name in forward.__code__.co_names}
    assert sizes(traced(forward, **called)) == axes


def conv(*args, **options):
    return nn.Conv2d(*args, **options)


@pytest.mark.parametrize(
    ("layers", "axes"),
    [
        ([conv(3, 6, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 2)], {"0": 6}),
        ([conv(3, 6, 1), nn.BatchNorm2d(6, affine=False), conv(6, 2, 1)], {"0": 6}),
        ([conv(3, 6, 1), nn.InstanceNorm2d(6), conv(6, 2, 1)], {"0": 6}),
        ([conv(3, 6, 1), nn.GroupNorm(1, 6), conv(6, 2, 1)], {}),
        ([conv(3, 6, 1), nn.GroupNorm(2, 6), conv(6, 2, 1)], {"0": 2}),
        ([conv(3, 6, 1), nn.GroupNorm(6, 6), conv(6, 2, 1)], {"0": 6}),
        ([conv(3, 6, 1), nn.GroupNorm(2, 6, affine=False), conv(6, 2, 1)], {"0": 2}),
        ([conv(3, 6, 1), conv(6, 6, 3, groups=6), conv(6, 2, 1)], {"0": 6}),
        ([conv(3, 6, 1), conv(6, 6, 3, groups=3), conv(6, 2, 1)], {"0": 3}),
        ([conv(3, 6, 1), conv(6, 12, 3, groups=3), conv(12, 2, 1)], {"0": 3}),
        ([conv(4, 4, 3, groups=2), conv(4, 2, 1)], {}),  # its inputs are the model's
        (
            [conv(3, 6, 1), nn.ConvTranspose2d(6, 5, 2), nn.PReLU(5), nn.Upsample(scale_factor=2), conv(5, 2, 1)],
            {"0": 6, "1": 5},
        ),
        ([nn.Conv1d(3, 6, 1), nn.BatchNorm1d(6), nn.AvgPool1d(2), nn.Flatten(), nn.Linear(12, 2)], {"0": 6}),
        ([nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 2)], {"0": 6}),
        ([nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 2)], {}),
        ([nn.Linear(3, 6), nn.Flatten(), nn.Linear(24, 2)], {"0": 6}),  # four positions of six features
        ([nn.Embedding(9, 6), nn.Flatten(), nn.Linear(24, 2)], {"0": 6}),
        ([nn.EmbeddingBag(9, 6), nn.Linear(6, 2)], {"0": 6}),
        (
            [conv(3, 6, 1), nn.Linear(4, 4), nn.Flatten(), nn.Linear(96, 2)],
            {"0": 6},
        ),  # what it makes of a row of pixels lies within each channel
        ([nn.Linear(3, 6), nn.Softmax(-1), nn.Linear(6, 2)], {}),
        ([nn.Linear(3, 1), nn.Linear(1, 2)], {}),  # nothing to drop
        ([nn.Linear(3, 2)], {}),
    ],
)
def test_layers(layers, axes):
    assert sizes(nn.Sequential(*layers)) == axes


@pytest.mark.parametrize(
    ("layers", "inputs"),
    [
        ([conv(3, 6, 1), conv(6, 6, 3, groups=3), conv(6, 2, 1)], (2, 3, 4, 4)),
        ([conv(3, 6, 1), nn.ConvTranspose2d(6, 5, 2), nn.PReLU(5), conv(5, 2, 1)], (2, 3, 4, 4)),
        ([nn.Linear(3, 6), nn.Flatten(), nn.BatchNorm1d(24), nn.Linear(24, 2)], (2, 4, 3)),
        ([nn.Conv1d(3, 6, 1), nn.Flatten(), nn.BatchNorm1d(24), nn.Linear(24, 2)], (2, 3, 4)),
    ],
)
def test_less_common_layers_run_and_equal_the_zeroed_model(layers, inputs):
    module = nn.Sequential(*layers).eval()
    submodels = Submodels(module)
    spec = Spec.select({name: range(axis.size - 1) for name, axis in submodels.axes.items()})
    plan, full = submodels.plan(spec, "present"), submodels.state(module)
    small = submodels.shrink(spec)
    plan.gather(full, out=small.present)
    x = torch.randn(inputs)
    for buffer in full.buffers.values():
        buffer.zero_()
    plan.scatter_(full, small.present)
    submodels.load_(module, full)
    torch.testing.assert_close(small.module.eval()(x), module(x))


def test_a_flattened_sequence_repeats_its_axis():
    axis = Submodels(nn.Sequential(nn.Linear(3, 6), nn.Flatten(), nn.Linear(12, 2))).axes["0"]
    assert [m for m in axis.members if m.name == "2.weight"] == [
        Member("2.weight", 1, 1, 0),
        Member("2.weight", 1, 1, 6),
    ]


def test_tied_layers_with_different_roles_are_kept_whole():
    first, second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
    second.weight = first.weight  # its inputs are the model's in one place and hidden in the other
    submodels = Submodels(nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(6, 2)))
    assert submodels.axes == {}


def test_a_width_kept_whole_says_why():
    submodels = Submodels(nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 2)))
    assert submodels.axes == {}
    spans = "a norm takes statistics across it: it shrinks only with residual_width: true"
    assert submodels.kept_whole["0"].startswith(spans)
    assert submodels.kept_whole["2"] == "it is an output of the model"
    with pytest.raises(SpecError, match="'0' cannot shrink: a norm takes statistics across it"):
        submodels.normal(Spec.select({"0": [0]}))


@pytest.mark.parametrize("layer", [nn.Conv2d, nn.ConvTranspose2d])
def test_the_convolution_that_makes_channels_is_named_where_they_stay_whole(layer):
    """Without a bias, which would name it too: by the side of its weight that makes them, not by that which reads."""
    net = nn.Sequential(layer(2, 4, 3, bias=False), nn.ReLU(), layer(4, 3, 1, bias=False))
    submodels = Submodels(net, (torch.zeros(2, 2, 5, 5),))
    assert list(submodels.axes) == ["0"] and submodels.kept_whole == {"2": "it is an output of the model"}


def test_a_forward_that_needs_values_is_followed_with_values():
    def forward(self, x):
        return self.c(self.a(x) if x.sum() > 0 else -self.a(x))

    submodels = Submodels(traced(forward, a=nn.Linear(4, 6), c=nn.Linear(6, 2)), [torch.ones(2, 4)])
    assert {name: axis.size for name, axis in submodels.axes.items()} == {"a": 6}


def test_a_forward_that_does_not_run_leaves_the_full_model():
    def forward(self, x):
        return self.c(self.d(x))

    submodels = Submodels(traced(forward, **LINEAR), [torch.ones(2, 4)])
    assert submodels.axes == {}
    assert "test_discover.py:" in submodels.problem and "declare `submodel_axes`" in submodels.problem
    with pytest.raises(SpecError, match=r"no attribute 'd'.*train the full model"):
        submodels.normal(Spec.select({"a": [0]}))


def test_a_subclass_with_a_forward_of_its_own_is_followed():
    class Odd(nn.Linear):
        def forward(self, x):
            return super().forward(x).cumsum(-1)

    class Same(nn.Linear):
        pass

    assert sizes(nn.Sequential(Odd(3, 6), nn.Linear(6, 2))) == {}
    assert sizes(nn.Sequential(Same(3, 6), nn.Linear(6, 2))) == {"0": 6}


def test_a_model_without_a_forward_or_a_batch_says_so():
    class Without(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

    assert Submodels(Without()).problem == (
        "axes of Without were not found: there is no batch to follow: give an example batch; declare `submodel_axes` on the "
        "model, or train the full model"
    )
