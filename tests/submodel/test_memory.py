"""A client that trains a fragment holds the fragment: measured in processes of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch._dynamo
from torch import nn

from raafl.local import malloc
from raafl.submodel import Spec, Submodels, skeleton
from tests.helpers.forked_command import in_fork

MIB = 2**20
FULL_WEIGHTS = 4 * (3072 * 8192 + 8192 + 8192 * 10 + 10)  # 96 MiB


def peak_bytes(units: int) -> int:
    """Most memory that this process holds while a client with so many of 8192 hidden units trains in it."""
    torch.set_num_threads(1)
    # What earlier tests have freed must not serve for the client, nor their peak count.
    malloc.free_at_once()
    malloc.give_back(0)
    Path("/proc/self/clear_refs").write_text("5")
    with skeleton():
        model = nn.Sequential(nn.Linear(3072, 8192), nn.ReLU(), nn.Linear(8192, 10))
    submodels = Submodels(model)
    small = submodels.shrink(Spec.select({"0": range(8192 - units, 8192)}))
    for buffer in small.present.buffers.values():
        buffer.normal_(0, 0.01)
    optimizer = torch.optim.SGD(small.module.parameters(), lr=0.01, momentum=0.9, foreach=False)
    for _ in range(3):
        loss = nn.functional.cross_entropy(small.module(torch.randn(4, 3072)), torch.zeros(4, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return 1024 * int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_fragment_is_trained_in_a_fragments_memory():
    """Each client is a fork of this process, and what that holds is in each number."""
    least, fragment, full = (in_fork(peak_bytes, units) for units in (1, 8192 * 5 // 100, 8192))
    # Weights, gradients and momentum of 5 %: 15 MiB. Had the full model been there even once: 96 MiB.
    assert fragment - least < 40 * MIB
    assert full - least > 2.9 * FULL_WEIGHTS
    assert full - fragment > 0.9 * 2.9 * FULL_WEIGHTS
