"""A client under a hard memory limit: what the cost model gives it trains to the end, the whole model dies.

The client's tensors get the limit less a reserve for what the libraries keep for themselves: the allocator's odds and ends, and
under convolutions the kernels' workspaces, which the cost model does not know.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MIB = 2**20
BUDGET = 96 * MIB
RESERVE = {"mlp": 8 * MIB, "cnn": 32 * MIB}

CLIENT = """
import json, resource, sys
import torch
from torch.utils.data import TensorDataset
from model_zoo import CNN, MLP
from raafl._lean import import_lightning
import_lightning()
from raafl.core.algorithm import Local, Training
from raafl.core.types import Assignment
from raafl.data import ClientData
from raafl.local.train import LocalTrainer
from raafl.parts.selectors import Budget, largest, leading, memory_needed, steps
from raafl.submodel import FULL, FlatTensors, Spec, Submodels, skeleton

torch.set_num_threads(1)
kind, which, budget, limit, batch_size = *sys.argv[1:3], *map(int, sys.argv[3:5]), 16
shape = {"mlp": (3072,), "cnn": (3, 32, 32)}[kind]
with skeleton():
    model = MLP(3072, (4096,), 10) if kind == "mlp" else CNN(3, 32, (64, 128), (1536, 512), 10)
inputs, labels = torch.randn(batch_size, *shape), torch.zeros(batch_size, dtype=torch.long)
submodels = Submodels(model, (inputs[:2], labels[:2]))
data = ClientData(TensorDataset(inputs, labels), torch.arange(batch_size), batch_size=batch_size)
trainer = LocalTrainer(submodels, Local(), "values", Training(num_epochs=None, num_steps=3))


def cost(spec):
    return submodels.cost(spec, batch_size)


def train(spec):
    received = FlatTensors.empty(submodels.layout(spec))
    for buffer in received.buffers.values():
        buffer.normal_(0, 0.01)
    task = Assignment(1, 1, 0, 0, 0, spec, 1, None, 3, seed=0, assigned_s=0.0)
    return trainer.run(task, received, data)


def writable():  # what RLIMIT_DATA limits
    line = next(line for line in open("/proc/self/status") if line.startswith("VmData"))
    return int(line.split()[1]) * 1024


spec = largest(lambda rate: leading(submodels.axes, rate), cost, Budget(memory_bytes=budget), rates=steps(submodels.axes))
spec = spec if which == "fitted" else FULL
note = {"needed": memory_needed(cost(spec)), "full": memory_needed(cost(FULL)), "spec": str(spec)}
# what every task needs beside its tensors is there before the limit is set: code, and the allocator's own
train(leading(submodels.axes, 0.02))
before = writable()
resource.setrlimit(resource.RLIMIT_DATA, (before + limit, before + limit))
print(json.dumps(note), flush=True)
update = train(spec)
print(json.dumps({"steps": update.num_steps, "refusal": update.refusal, "used": writable() - before}), flush=True)
"""


def client(kind: str, which: str) -> tuple[int, list[dict], str]:
    result = subprocess.run(
        [sys.executable, "-c", CLIENT, kind, which, str(BUDGET), str(BUDGET + RESERVE[kind])],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    return result.returncode, [json.loads(line) for line in result.stdout.splitlines()], result.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA holds for mapped memory on Linux only")
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.timeout(250)
def test_a_client_under_a_hard_limit_finishes_what_it_is_given_and_the_whole_model_does_not(kind):
    code, notes, errors = client(kind, "fitted")
    assert code == 0, errors
    given, done = notes
    # as large as the budget allows, and half of the whole
    assert 0.9 * BUDGET < given["needed"] <= BUDGET < 0.55 * given["full"]
    assert (done["steps"], done["refusal"]) == (3, None)
    code, notes, errors = client(kind, "full")
    assert code != 0 and len(notes) == 1, "the whole model has been trained within the budget"
    assert notes[0]["spec"] == "full"
    assert "allocate memory" in errors or "MemoryError" in errors, errors
