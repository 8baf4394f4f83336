"""A client under a hard memory limit: what the cost model gives it trains to the end, the whole model dies.

So too does what fits, in a heap with holes: a client that is short of memory gives what it frees back at once.

The baseline of a client process is all writable memory (`VmData`) that it has when it has imported everything, holds its
data and has trained the smallest submodel once. On top of that it gets its budget for the tensors of a task, and a reserve
for what the libraries keep for themselves: the allocator's odds and ends, and the blocks that matrix kernels pack.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from raafl.local import malloc

MIB = 2**20
BUDGET = 96 * MIB
RESERVE = {"mlp": 32 * MIB, "cnn": 32 * MIB, "vit": 32 * MIB}
TIGHT_RESERVE = 64 * MIB

# One process imports everything; each client is a fork of it, and a limit of its own.
CLIENTS = """
import json, os, resource, sys
import torch
import torch._dynamo  # the first optimiser does: here it is done for all clients
from torch.utils.data import TensorDataset
from model_zoo import BERT, CNN, MLP, ViT
from raafl.lean_import import import_lightning
import_lightning()
from raafl.core.algorithm import Local, Training
from raafl.core.types import Assignment
from raafl.data import ClientData
from raafl.local import malloc
from raafl.local.train import LocalTrainer
from raafl.parts.select.units import Budget, largest_rate, leading, steps
from raafl.submodel import FULL, FlatTensors, Submodels, skeleton

torch.set_num_threads(1)
BATCH = 16


def writable():  # what RLIMIT_DATA limits
    line = next(line for line in open("/proc/self/status") if line.startswith("VmData"))
    return int(line.split()[1]) * 1024


def client(submodels, spec, data, limit, warm, tight):
    num_steps = 3
    if tight:
        malloc.free_at_once()
        num_steps = 2  # each takes three seconds; the second has all that is ever alive
    trainer = LocalTrainer(submodels, Local(), "values", Training(num_epochs=None, num_steps=num_steps))

    def train(spec):
        received = FlatTensors.empty(submodels.layout(spec))
        for buffer in received.buffers.values():
            buffer.normal_(0, 0.01)
        return trainer.run(Assignment(1, 1, 0, 0, 0, spec, 1, None, num_steps, seed=0, assigned_s=0.0), received, data)

    if warm:
        train(leading(submodels.axes, 0.02))  # what a task needs beside its tensors is there before the limit is set
    limit += writable()
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    update = train(spec)
    return {"steps": update.num_steps, "refusal": update.refusal}


MODELS = {
    "mlp": lambda: MLP(3072, (4096,), 10),
    "cnn": lambda: CNN(3, 32, (64, 128), (1536, 512), 10),
    "vit": lambda: ViT("tiny", patch_size=8),
    "bert": lambda: BERT("small"),
}
for kind, budget, reserve in json.loads(sys.argv[1]):
    with skeleton():
        model = MODELS[kind]()
    if kind == "bert":
        inputs = torch.randint(1, 1000, (BATCH, 64)), torch.ones(BATCH, 64).long()
    else:
        inputs = (torch.randn(BATCH, *((3072,) if kind == "mlp" else (3, 32, 32))),)
    samples = (*inputs, torch.zeros(BATCH).long())
    submodels = Submodels(model, tuple(x[:2] for x in samples))
    data = ClientData(TensorDataset(*samples), torch.arange(BATCH), batch_size=BATCH)

    def cost(spec):
        return submodels.cost(spec, BATCH)

    def of_rate(rate):
        return leading(submodels.axes, rate)

    if budget is None:
        cases = [("tight", FULL), ("full", FULL)]
    else:
        rates = [i / 64 for i in range(1, 65)] if kind == "vit" else steps(submodels.axes)
        cases = [("fitted", of_rate(largest_rate(of_rate, cost, Budget(memory_bytes=budget), rates=rates))), ("full", FULL)]
    for name, spec in cases:
        needed = cost(spec).peak_bytes
        limit = (needed if budget is None else budget) + reserve
        note = {"kind": kind, "name": name, "needed": needed}
        child = os.fork()
        if child == 0:
            try:
                note |= client(submodels, spec, data, limit, budget is not None, name == "tight")
            except (MemoryError, RuntimeError) as error:
                note["died"] = str(error)
            print(json.dumps(note), flush=True)
            os._exit("died" in note)
        os.waitpid(child, 0)
"""


pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not sys.platform.startswith("linux"), reason="RLIMIT_DATA holds for mapped memory on Linux only"
    ),
]


def notes(*asked):
    """Return what became of each client, by name.

    Args:
        asked: model, bytes of its budget (None = those that the whole model needs), and bytes of its reserve.
    """
    command = [sys.executable, "-c", CLIENTS, json.dumps([asked])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    return {note["name"]: note for note in map(json.loads, result.stdout.splitlines())}


@pytest.mark.long("tests/submodel/test_memory.py::test_a_fragment_is_trained_in_a_fragments_memory")
@pytest.mark.parametrize("kind", RESERVE)
def test_a_client_under_a_hard_limit_finishes_what_it_is_given_and_the_whole_model_does_not(kind):
    found = notes(kind, BUDGET, RESERVE[kind])
    fitted, full = found["fitted"], found["full"]
    least = 0.75 if kind == "vit" else 0.9  # one head more is a step of an eighth in every block
    assert least * BUDGET < fitted["needed"] <= BUDGET, "as large as the budget allows"
    assert (fitted.get("steps"), fitted.get("refusal"), fitted.get("died")) == (3, None, None)
    assert full["needed"] > 1.5 * (BUDGET + RESERVE[kind])
    assert "allocate memory" in full.get("died", "it lived"), full


@pytest.mark.long(
    "tests/local/test_malloc.py::test_a_process_that_keeps_what_it_frees_gets_few_new_pages_and_can_give_them_back"
)
@pytest.mark.skipif(malloc._glibc("mallopt") is None, reason="the C library is not glibc")
def test_a_client_that_frees_at_once_trains_in_what_the_tensors_need_and_another_has_no_room_for_holes():
    found = notes("bert", None, TIGHT_RESERVE)
    tight, usual = found["tight"], found["full"]
    assert (tight.get("steps"), tight.get("refusal"), tight.get("died")) == (2, None, None)
    assert "allocate memory" in usual.get("died", "it lived"), usual
