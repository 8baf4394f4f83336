"""FLOPs of operations against sums done by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from raafl.submodel import Submodels
from raafl.submodel.cost.fused import FusedKernels
from raafl.submodel.cost.kernels import convolution_flops
from raafl.submodel.cost.ledger import Ledger


def flops_of(step, *tensors, meta=False):
    """What a ledger counts for a forward and backward pass, in which every tensor wants a gradient."""
    leaves = [tensor.to("meta" if meta else "cpu").requires_grad_() for tensor in tensors]
    with Ledger() as ledger, FusedKernels():
        step(*leaves).sum().backward()
    return ledger.flops


# what a forward pass multiplies, for inputs of (2, 8, 10, 10); the backward pass multiplies the same pairs twice
CONVOLUTIONS = {
    "dense": (nn.Conv2d(8, 6, 3, padding=1), 2 * 100 * 6 * 8 * 9),
    "strided": (nn.Conv2d(8, 6, 3, stride=2, padding=1), 2 * 25 * 6 * 8 * 9),
    "dilated": (nn.Conv2d(8, 6, 3, dilation=2), 2 * 36 * 6 * 8 * 9),
    "grouped": (nn.Conv2d(8, 6, 3, padding=1, groups=2), 2 * 100 * 6 * 4 * 9),
    "depthwise": (nn.Conv2d(8, 8, 3, padding=1, groups=8), 2 * 100 * 8 * 1 * 9),
    "depthwise, twice as wide": (nn.Conv2d(8, 16, 3, padding=1, groups=8), 2 * 100 * 16 * 1 * 9),
    "transposed": (nn.ConvTranspose2d(8, 6, 2, stride=2), 2 * 100 * 8 * 6 * 4),  # each input meets the whole kernel
    "transposed, grouped": (nn.ConvTranspose2d(8, 6, 2, stride=2, groups=2), 2 * 100 * 8 * 3 * 4),
}


@pytest.mark.parametrize("meta", [False, True], ids=["values", "meta"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_multiplies_the_same_pairs_forward_and_for_either_gradient(name, meta):
    layer, pairs = CONVOLUTIONS[name]
    layer = layer.to("meta" if meta else "cpu")
    assert flops_of(layer, torch.randn(2, 8, 10, 10), meta=meta) == 3 * 2 * pairs


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_convolution_counts_as_its_loops_do(groups, stride):
    x, weight = torch.randn(2, 4, 7), torch.randn(8, 4 // groups, 3)
    y = nn.functional.conv1d(x, weight, stride=stride, groups=groups)
    multiplied = sum(
        1 for _ in range(2) for _ in range(8) for _ in range(y.shape[-1]) for _ in range(4 // groups) for _ in range(3)
    )
    assert convolution_flops(x, weight, y, transposed=False) == 2 * multiplied


# forward and backward of what torch does not count, or not rightly
PRODUCTS = {
    "two vectors": (torch.dot, [(7,), (7,)], 2 * 7),  # its gradients scale a vector
    "bilinear": (
        nn.functional.bilinear,
        [(3, 4), (3, 5), (6, 4, 5)],
        4 * 2 * 3 * 4 * 5 * 6,
    ),  # four sums of all triples
    "complex": (lambda a, b: torch.view_as_real(a @ b), [(3, 4), (4, 5)], 3 * 8 * 60),  # four products of reals each
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_that_torch_does_not_count(name):
    product, shapes, flops = PRODUCTS[name]
    dtype = torch.cfloat if name == "complex" else torch.float32
    assert flops_of(product, *(torch.randn(shape, dtype=dtype) for shape in shapes)) == flops


def test_a_matrix_by_a_vector_is_counted():
    with Ledger() as ledger:
        torch.mv(torch.randn(5, 7), torch.randn(7))
    assert ledger.flops == 2 * 5 * 7


def test_distances_and_transforms_are_counted():
    with Ledger() as ledger:
        torch.cdist(torch.randn(3, 4, 2), torch.randn(3, 5, 2), p=1)
    assert ledger.flops == 3 * 3 * 4 * 5 * 2
    with Ledger() as ledger:
        torch.fft.fft(torch.randn(3, 16, dtype=torch.cfloat))
    assert ledger.flops == 5 * 3 * 16 * math.log2(16)


@pytest.mark.parametrize("meta", [False, True], ids=["values", "meta"])
@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_a_recurrent_net_multiplies_inputs_and_states_of_each_position(kind, gates, meta):
    net = kind(6, 5, num_layers=2, bidirectional=True, batch_first=True).to("meta" if meta else "cpu")
    first, second = (2 * 3 * 7 * gates * 5 * (inputs + 5) for inputs in (6, 2 * 5))  # 3 samples, 7 positions
    flops = flops_of(lambda x: net(x)[0], torch.randn(3, 7, 6), meta=meta)
    # of the first state, which is zero, some take no gradient
    assert flops == pytest.approx(3 * 2 * (first + second), rel=0.06)
    if kind is nn.LSTM:  # one kernel takes all
        assert flops == 3 * 2 * (first + second)


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_a_recurrent_net_does_the_same_on_the_meta_device_as_on_a_processor(kind):
    ledgers = []
    for device in ("cpu", "meta"):
        net, x = kind(6, 8, batch_first=True).to(device), torch.randn(3, 7, 6, device=device)
        with Ledger([x, *net.parameters()]) as ledger, FusedKernels(ledger=ledger):
            net(x)[0].sum().backward()
        ledgers.append(ledger)
    one, other = ledgers
    assert (one.peak_bytes, one.moved_bytes, one.kernels) == (other.peak_bytes, other.moved_bytes, other.kernels)
    assert one.launches == pytest.approx(other.launches)


class Factors(nn.Module):
    """Matrix factorisation: rows of two tables, their products, a sum; no matrix product."""

    def __init__(self, width=16):
        super().__init__()
        self.user, self.item = nn.Embedding(50, width), nn.Embedding(40, width)

    def training_step(self, batch, index):
        return ((self.user(batch[0]) * self.item(batch[1])).sum(1) - batch[2]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("width", [4, 16])
def test_a_step_without_products_costs_its_arithmetic(width):
    batch = (torch.arange(8), torch.arange(8), torch.rand(8))
    flops = Submodels(Factors(width), batch).cost(batch_size=8).flops_per_sample
    forward = 2 * width + 3  # products and their sum; a difference, its square, the mean
    backward = 4 * width  # two products by the other's row, and two additions to a table
    assert flops == pytest.approx(forward + backward, abs=6)  # and of the loss, a value or two a sample each
    assert flops >= 2 * width
