"""Patterns of code that people write: the axes that each has, all of them proven."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from raafl.submodel import Submodels
from raafl.submodel.prove.proof import refuted

ROWS = [torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 2, 1, 1])]
PICTURES = [torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 2])]


class Pattern(nn.Module):
    """These layers, called as ``forward(layers, x)`` says."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.layers, self.answer = nn.ModuleDict(layers), forward

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.answer(self.layers, batch[0]), batch[1])


def rows(forward, units=8, of=lambda layer: layer, **more):
    return Pattern(forward, **{"a": of(nn.Linear(6, units)), "b": nn.Linear(units, 3), **more}), ROWS


def pictures(forward, **more):
    return Pattern(forward, **{"a": nn.Conv2d(3, 8, 3, padding=1), "b": nn.Linear(8, 3), **more}), PICTURES


def plain(own, x):
    return own["b"](torch.tanh(own["a"](x)))


def standardised(own, x):
    """Weights whose statistics are taken over what each unit reads."""
    weight = F.batch_norm(own["c"].weight[None], None, None, training=True)[0]
    return own["b"](F.linear(own["a"](x).relu(), weight, own["c"].bias))


def shuffled(own, x):
    return own["b"](F.channel_shuffle(own["a"](x), 2).mean((2, 3)))


def unpooled(own, x):
    y, places = F.max_pool2d(own["a"](x), 2, return_indices=True)
    return own["b"](F.max_unpool2d(own["c"](y), places, 2).square().mean((2, 3)))


def windows(own, x):
    """Windows of three of six rows that overlap, of features that stay as they are."""
    y = own["a"](x).flatten(2).transpose(1, 2).contiguous()
    size, step = y.size(), y.stride()
    y = y.as_strided((size[0], 7, 4, size[2]), (step[0], 2 * step[1], step[1], step[2]))
    return own["b"](y.square().sum((1, 2)))


def unfolded(own, x):
    y = own["a"](x)
    return own["b"](F.unfold(y, 2).view(len(y), y.shape[1], 4, 9).square().mean((2, 3)))


def shifted(own, x):
    """A view that deals rows and columns out anew, as relative positions are shifted."""
    n, channels, height, width = own["a"](x).shape
    y = F.pad(own["a"](x), (1, 0)).view(n, channels, width + 1, height)[:, :, 1:]
    return own["b"](y.square().mean((2, 3)))


def noisy(own, x, made=torch.randn_like):
    """A variational bottleneck."""
    mean, spread = own["b"](own["a"](x).relu()).chunk(2, -1)
    return own["c"](mean + made(spread) * spread.exp())


def dropped(own, x):
    """A dropout by hand."""
    y = torch.tanh(own["a"](x))
    return own["b"](y * torch.empty_like(y).bernoulli_(0.9) / 0.9)


def masked(own, x):
    """A buffer of booleans and a list of empty places beside the layers."""
    return own["b"](torch.relu(own["a"](x)) * own["c"].mask)


def mask(units=8):
    layer = nn.Identity()
    layer.register_buffer("mask", torch.arange(units) % 3 > 0)
    return layer


def embedded(forward, **more):
    """A table of eight features whose gradients are sparse, and what it is called with."""
    batch = torch.tensor([[1, 2, 2], [0, 3, 4], [1, 1, 0], [4, 0, 2]]), torch.tensor([0, 2, 1, 1])
    return Pattern(forward, **{"b": nn.Linear(8, 3), **more}), batch


class Splines(nn.Module):
    """A learnable curve from each input to each output, of hats over a buffer of knots, by whose distances is divided."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.register_buffer("knots", torch.linspace(-3.0, 3.0, 7).repeat(inputs, 1))
        self.curve = nn.Parameter(torch.randn(outputs, inputs, 5))

    def forward(self, x):
        at = x[..., None]
        first, second, third = self.knots[:, :-2], self.knots[:, 1:-1], self.knots[:, 2:]
        up = (at - first) / (second - first) * ((at >= first) & (at < second))
        down = (third - at) / (third - second) * ((at >= second) & (at < third))
        return (up + down).flatten(1) @ self.curve.flatten(1).T


def averaged(own, x):
    return own["b"](torch.tanh(own["a"](x)).mean(1))


def looked_up(own, x):
    return own["b"](torch.tanh(F.embedding(x, own["a"].weight, sparse=True)).mean(1))


def recurrent(own, x):
    return own["b"](own["a"](x[:, None].expand(-1, 3, -1))[0][:, -1])


BOTTLENECK = {"b": nn.Linear(8, 10), "c": nn.Linear(5, 3)}
PATTERNS = {
    "weight norm": (partial(rows, plain, of=parametrizations.weight_norm), [8]),
    "weight norm by hooks": (partial(rows, plain, of=nn.utils.weight_norm), [8]),
    "weight norm of a depthwise convolution": (
        lambda: pictures(
            windows,
            c=nn.Identity(),
            a=nn.Sequential(
                nn.utils.weight_norm(nn.Conv2d(3, 8, 1)), nn.utils.weight_norm(nn.Conv2d(8, 8, 3, padding=1, groups=8))
            ),
        ),
        [8],
    ),
    "weight norm of a recurrent layer": (
        lambda: rows(recurrent, a=nn.utils.weight_norm(nn.LSTM(6, 8, batch_first=True), "weight_hh_l0")),
        [8],
    ),
    "splines over knots": (lambda: rows(plain, a=Splines(6, 8), b=Splines(8, 3)), [8]),
    "pruned": (partial(rows, plain, of=partial(prune.random_unstructured, name="weight", amount=0.5)), [8]),
    "a mask of booleans": (lambda: rows(masked, c=mask()), [8]),
    "a sparse table": (lambda: embedded(averaged, a=nn.Embedding(5, 8, sparse=True)), [8]),
    "a sparse bag": (lambda: embedded(plain, a=nn.EmbeddingBag(5, 8, sparse=True)), [8]),
    "a sparse look-up": (lambda: embedded(looked_up, a=nn.Embedding(5, 8)), [8]),
    "spectral norm": (partial(rows, plain, of=parametrizations.spectral_norm), [8]),
    "standardised weights": (lambda: rows(standardised, c=nn.Linear(8, 8)), [8]),
    "shuffled channels": (partial(pictures, shuffled), [4]),
    "unpooled": (lambda: pictures(unpooled, c=nn.Conv2d(8, 8, 1)), [8]),
    "overlapping windows": (partial(pictures, windows), [8]),
    "unfolded": (partial(pictures, unfolded), [8]),
    "noise": (lambda: rows(noisy, **BOTTLENECK), [8, 5]),
    "noise of a size in the code": (
        lambda: rows(partial(noisy, made=lambda x: torch.randn(4, 5)), **BOTTLENECK),
        [8, 5],
    ),
    "a dropout by hand": (partial(rows, dropped), [8]),
    "shifted": (partial(pictures, shifted), [8]),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", PATTERNS)
def test_its_axes_are_found_and_proven(name):
    make, sizes = PATTERNS[name]
    torch.manual_seed(0)
    module, batch = make()
    submodels = Submodels(module, batch)
    assert [axis.size for axis in submodels.axes.values()] == sizes
    assert refuted(submodels, module, batch) == {}
