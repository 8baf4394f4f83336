"""Merge updates as Co-S2P's published code does, which is not what its paper says.

One weight for a client, not for a segment (L1 norms)::

    gamma_n = ||Delta_n||_1 / rate_n / (||theta_t - theta_{t - tau_n}||_1 + 1)
    theta_{t+1} = theta_t + sum_n gamma_n Delta_n / sum_n gamma_n

where Delta_n is 0 on what client n does not hold: an element that few clients hold moves less, not the mean of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from raafl.algorithms.co_s2p.merge import copy_start_values
from raafl.core.algorithm import Merge
from raafl.core.memory import MergeMemory
from raafl.core.state import GlobalState
from raafl.core.types import Update
from raafl.parts.merge.mean import zeros_like
from raafl.parts.merge.personal import AtWork
from raafl.submodel import FlatTensors, Spec


@dataclass
class _PublishedMemory(MergeMemory):
    """Running sums of a merge: weighted differences, and weights, for each element."""

    key = "published"
    sum: FlatTensors
    weight: float = 0.0


@dataclass(frozen=True)
class PublishedMerge(Merge):
    """Merge as in Co-S2P's published code, which differs from its paper.

    Two faults of that code are corrected: a client's rate is the share of parameters that it really trains, and the
    change of the model since the client's start is measured on these parameters only.

    Attributes:
        absent_inputs: whether to repeat a fault of the published code. If a client has only some columns of a weight
            theta, since the layer before is narrowed, that code uses ``-theta`` instead of 0 as the client's change of
            the missing columns.
    """

    absent_inputs: bool = True
    sends: Literal["values", "delta"] = "delta"
    by_client: ClassVar[bool] = True

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Add an update, weighted by its client's importance, to the running sum of the next merge."""
        plan = state.submodels.plan(spec)
        memory = state.memory.of(_PublishedMemory, lambda: _PublishedMemory(zeros_like(state.values)))
        rate = plan.layout.num_bytes / state.submodels.layout(part="trained").num_bytes
        size = sum(float(tensor.double().abs().sum()) for _, tensor in update.tensors.items())
        gamma = size / rate / (_drift(state, update.client, spec) + 1)
        plan.add_(memory.sum, update.tensors.to(state.values.device), gamma)
        memory.weight += gamma
        if self.absent_inputs:
            _forget_absent(state, spec, update.tensors, memory.sum, gamma)

    def apply(self, state: GlobalState) -> None:
        """Move the model by the weighted sum of the updates."""
        copy_start_values(state)
        memory = state.memory.pop(_PublishedMemory)
        if memory is None or not memory.weight:
            return
        trained = state.submodels.layout(part="trained")
        total = memory.sum.prefix(trained)
        for name, values in state.values.prefix(trained).items():
            values.add_(total[name], alpha=1 / memory.weight)

    def __str__(self) -> str:
        return "one weight a client, as published" + (", absent inputs forgotten" if self.absent_inputs else "")


def _drift(state: GlobalState, client: int, spec: Spec) -> float:
    """Return the L1 norm of the model's change since the client started, over what it trains."""
    task = state.memory.of(AtWork).starts.get(client)
    if task is None or task.start is None:
        return 0.0
    now = state.submodels.plan(spec).gather(state.values)
    return sum(float((tensor - task.start[name]).double().abs().sum()) for name, tensor in now.items())


def _forget_absent(state: GlobalState, spec: Spec, present: FlatTensors, total: FlatTensors, gamma: float) -> None:
    """Add ``-gamma theta`` to ``total`` at columns that a client does not hold, in the rows that it holds."""
    for name, dims in state.submodels.selections(state.submodels.normal(spec)).items():
        if 1 not in dims or name not in present:
            continue
        theta = state.values[name]
        absent, rows = torch.ones(theta.shape[1], dtype=torch.bool), torch.ones(theta.shape[0], dtype=torch.bool)
        for start, stop in dims[1]:
            absent[start:stop] = False
        if 0 in dims:
            rows.fill_(False)
            for start, stop in dims[0]:
                rows[start:stop] = True
        place = (rows[:, None] & absent).view(*theta.shape[:2], *[1] * (theta.dim() - 2)).to(theta.device)
        total[name].sub_(theta * place, alpha=gamma)
