"""A model whose tensors a copy would not follow is refused by name; what hooks compute anew is no such tensor."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm

from raafl.errors import BadInput
from raafl.local.prepare import check_tensors


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)


def with_memory_of_another(net):
    net.b.weight.data = net.a.weight.data


def with_a_view_of_a_parameter(net):
    net.transposed = net.a.weight.data.t()


def with_a_buffer_in_a_parameter(net):
    net.register_buffer("shift", net.a.bias.detach())


def with_a_result(net):
    net.last = net.a(torch.ones(1, 3))


def with_a_sparse_buffer(net):
    net.register_buffer("edges", torch.eye(3).to_sparse())


def without_a_size(net):
    net.c = nn.LazyLinear(2)


def with_a_script(net):
    net.c = torch.jit.script(nn.Linear(3, 3))


def with_an_inference_parameter(net):
    with torch.inference_mode():
        net.c = nn.Linear(3, 3)


def with_an_inference_buffer(net):
    with torch.inference_mode():
        net.register_buffer("mask", torch.ones(3))


def with_an_expanded_parameter(net):
    net.scale = nn.Parameter(torch.ones(1, 3).expand(5, 3))


def with_overlapping_windows(net):
    net.scale = nn.Parameter(torch.ones(6).unfold(0, 3, 1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_an_inference_parameter, r"Net.c.weight was made in torch.inference_mode.*clone it"),
        (with_an_inference_buffer, r"Net.mask was made in torch.inference_mode"),
        (with_an_expanded_parameter, r"Net.scale is expanded, \(5, 3\) with several.*\.clone\(\)"),
        (with_overlapping_windows, r"Net.scale is expanded, \(4, 3\)"),
        (with_memory_of_another, "Net.b.weight shares memory with 'a.weight'"),
        (with_a_view_of_a_parameter, "Net.transposed shares memory with 'a.weight'"),
        (with_a_buffer_in_a_parameter, "Net.shift shares memory with 'a.bias'"),
        (with_a_result, "Net.last was computed from parameters"),
        (with_a_sparse_buffer, "Net.edges is sparse_coo.*or register it with persistent=False"),
        (without_a_size, "Net.c.weight has no size before a first batch"),
        (with_a_script, "Net.c is made by torch.jit"),
    ],
)
def test_what_copies_would_not_follow_is_refused(change, words):
    net = Net()
    change(net)
    with pytest.raises(BadInput, match=f"^the model cannot be copied, cut and sent: {words}"):
        check_tensors(net)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_copies_follow_is_taken():
    net = Net()
    net.b.weight = net.a.weight  # tied as torch ties
    net.several = [net.a.weight, net.a.bias]
    net.register_buffer("edges", torch.eye(3).to_sparse(), persistent=False)
    net.register_buffer("none", None)
    net.mask = torch.ones(3)
    net.normed, net.spectral, net.pruned = weight_norm(nn.Linear(3, 3)), spectral_norm(nn.Linear(3, 3)), nn.Linear(3, 3)
    prune.l1_unstructured(net.pruned, "weight", 0.5)
    net.recurrent = weight_norm(nn.LSTM(3, 3), "weight_hh_l0")
    check_tensors(net)
