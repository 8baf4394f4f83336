"""A client that trains a fragment holds the fragment: measured in processes of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(400)

CLIENT = """
import os, sys
import torch
from torch import nn
from raafl.submodel import Spec, Submodels, skeleton

torch.set_num_threads(1)


def client(units):
    with skeleton():
        model = nn.Sequential(nn.Linear(3072, 8192), nn.ReLU(), nn.Linear(8192, 10))
    submodels = Submodels(model)
    small = submodels.shrink(Spec.keep({"0": range(8192 - units, 8192)}))
    for buffer in small.present.buffers.values():
        buffer.normal_(0, 0.01)
    optimizer = torch.optim.SGD(small.module.parameters(), lr=0.01, momentum=0.9, foreach=False)
    for _ in range(3):
        loss = nn.functional.cross_entropy(small.module(torch.randn(4, 3072)), torch.zeros(4, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # of this address space alone: ru_maxrss would remember the process that started this one
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")), flush=True)


for units in map(int, sys.argv[1:]):  # one process imports everything; each client is a fork of it
    if os.fork() == 0:
        try:
            client(units)
        finally:
            os._exit(0)
    os.wait()
"""

MIB = 2**20
FULL_WEIGHTS = 4 * (3072 * 8192 + 8192 + 8192 * 10 + 10)  # 96 MiB


def peak_bytes(*units: int) -> list[int]:
    command = [sys.executable, "-c", CLIENT, *map(str, units)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    return [int(line) * 1024 for line in result.stdout.splitlines()]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.slow("processes of their own train, for what each holds at most")
def test_a_fragment_is_trained_in_a_fragments_memory():
    least, fragment, full = peak_bytes(1, 8192 * 5 // 100, 8192)
    # Weights, gradients and momentum of 5 %: 15 MiB. Had the full model been there even once: 96 MiB.
    assert fragment - least < 40 * MIB
    assert full - least > 2.9 * FULL_WEIGHTS
    assert full - fragment > 0.9 * 2.9 * FULL_WEIGHTS


START = """
import sys
import torch
before = set(sys.modules)
from torch import nn
from raafl.submodel import Spec, Submodels, skeleton

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def submodel_axes(self):
        norm = [(f"norm.{name}", 0) for name in ("weight", "bias", "running_mean", "running_var")]
        return {"hidden": [("fc1.weight", 0), ("fc1.bias", 0), *norm, ("fc2.weight", 1)]}

with skeleton():
    model = Net()
submodels = Submodels(model)
submodels.shrink(Spec.keep({"hidden": [1]}), rescale=True)
heavy = ("sympy", "torch.fx", "torch.utils.flop_counter", "raafl.submodel.find.discover", "lightning", "torch._dynamo")
print([name for name in sorted(set(sys.modules) - before) if name in heavy])
"""


def test_a_client_with_declared_axes_starts_without_tracing_tools():
    result = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "[]"
