"""Provide a tiny LoRA model whose merges can be computed by hand, and clients that answer with random adapters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raafl.core.state import GlobalState
from raafl.core.types import Arrived, Update
from raafl.parts import RateSelect
from raafl.submodel import FlatTensors, Submodels
from tests.helpers.coordinators import assigned, coordinator_for, join

peft = pytest.importorskip("peft")

RANK, SCALING = 3, 2.0  # alpha 6 over rank 3
A, B, BASE = "layer.lora_A.default.weight", "layer.lora_B.default.weight", "layer.base_layer.weight"
RANKS = {1: 3, 2: 2, 3: 1}
BY_RANK = RateSelect(rates=[1.0, 2 / 3, 1 / 3], rate_of="width")


class Tiny(nn.Module):
    """Model with an adapted layer from 5 to 4 features, and a head."""

    def __init__(self, target="layer", **more):
        super().__init__()
        self.layer, self.head = nn.Linear(5, 4, bias=False), nn.Linear(4, 2)
        self.conv = nn.Conv1d(2, 2, 1)
        self.conv.requires_grad_(False)
        if target:
            peft.inject_adapter_in_model(peft.LoraConfig(r=RANK, lora_alpha=6, target_modules=[target], **more), self)
            self.head.requires_grad_(True)

    def forward(self, x):
        return self.head(self.layer(x))

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)


BATCH = torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64)


def state_of(algorithm, seed=0):
    torch.manual_seed(seed)
    module = algorithm.local.prepare(Tiny())
    submodels = Submodels(module, BATCH)
    state = GlobalState(submodels, submodels.state(module))
    state.values[B].normal_()  # peft would start B at 0
    submodels.attach_base(state.values)
    return state


def started(algorithm, clients=3, state=None):
    """Return a coordinator of ``algorithm`` whose clients are at work, and their tasks; ``state`` None = a new model."""
    coordinator = coordinator_for(algorithm, state or state_of(algorithm), min_clients=clients)
    return coordinator, assigned(join(coordinator, range(1, clients + 1)))


def product(b, a):
    return SCALING * b.double() @ a.double()


def adapters(state, rank=RANK):
    return product(state.values[B][:, :rank], state.values[A][:rank])


def weight(state):
    """Return the effective weight of the adapted layer."""
    return state.values[BASE].double() + adapters(state)


def trained(coordinator, task, num_samples=1):
    """Return an update of ``task`` with random values, valid until the next call, and the product of its adapters."""
    state = coordinator.state
    small = FlatTensors.empty(state.submodels.layout(task.spec, "trained"))
    for buffer in small.buffers.values():
        buffer.normal_(generator=torch.Generator().manual_seed(task.id))
    wanted = product(small[B], small[A])
    if coordinator.algorithm.merge.sends == "delta":
        received = STARTS[task.id]
        for name in (A, B):
            small[name].sub_(received[name])
    return Update(task.id, task.client, 0, small, num_samples), wanted


STARTS: dict = {}


def note_starts(state, tasks):
    """Record the values that each client receives: A and B of its rank, as they are now."""
    for task in tasks.values():
        sent = state.submodels.plan(task.spec, "sent").gather(state.values)
        STARTS[task.id] = {name: sent[name].clone() for name in (A, B)}


def give(coordinator, task, num_samples=1):
    """Answer ``task`` with random values; return the product of the adapters, and the tasks that follow."""
    update, wanted = trained(coordinator, task, num_samples)
    tasks = assigned(coordinator.handle(Arrived(update), 0.0))
    for buffer in update.tensors.buffers.values():
        buffer.fill_(torch.nan)
    note_starts(coordinator.state, tasks)
    return wanted, tasks


def start_product(task):
    return product(STARTS[task.id][B], STARTS[task.id][A])
