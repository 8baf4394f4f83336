"""Prune the LoRA ranks that a client does not need: HetLoRA's self-pruning (Cho et al. 2024, arXiv:2401.06432).

Of a client's r ranks the last ones, from ``k = max(1, floor(share r))`` on, are held down by a loss, summed over its adapters::

    penalty * tail,    tail = sum_layers ||B[:, k:]||_F ||A[k:]||_F

If the tail is smaller after a task than it was in the values that the client received, it has k ranks from its next task on.
The server compares: the select notes the tail of what it sends, the merge the tail of what comes back.

Shapes: B is (out, rank), A is (rank, in).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from raafl.core.algorithm import Hook, SelectContext, Task
from raafl.core.memory import MergeMemory
from raafl.core.state import GlobalState
from raafl.core.types import ClientInfo, Update, Work
from raafl.parts.merge.wrapped import WrappedSelect
from raafl.submodel import Axis, Submodels
from raafl.submodel.lora import LoraPair, pairs_of


@dataclass
class RankMemory(MergeMemory):
    """Record of the clients whose LoRA ranks were pruned."""

    key = "lora ranks"
    # number of times that each client's ranks were pruned, by client
    pruned: dict[int, int] = field(default_factory=dict)
    # norm of the ranks that pruning would remove next, in the values that a client received, by client
    tails: dict[int, float] = field(default_factory=dict)


def kept(num_ranks: int, share: float) -> int:
    """Return the number k of ranks that remain when a client's ranks are pruned once."""
    return max(1, int(share * num_ranks))


def tail(adapters: Iterable[tuple[Tensor, Tensor]], share: float) -> Tensor:
    """Return the size of the ranks that pruning would remove: the sum over layers of ``||B[:, k:]|| ||A[k:]||``, a scalar.

    Pruning keeps the first k ranks of a layer (`kept`).
    """
    norms = []
    for b, a in adapters:
        k = kept(len(a), share)
        if k < len(a):
            norms.append(torch.linalg.vector_norm(b[:, k:]) * torch.linalg.vector_norm(a[k:]))
    return torch.stack(norms).sum() if norms else torch.zeros(())


class Penalised(Hook):
    """Hook that adds to the loss a penalty on the last LoRA ranks, which shrinks them until they can be pruned."""

    def __init__(self, task: Task, share: float, penalty: float) -> None:
        """Find the adapters of the task's module."""
        super().__init__(task)
        self._share, self._penalty = share, penalty
        module = task.module
        self._adapters = [(module.get_parameter(p.b), module.get_parameter(p.a)) for p in pairs_of(module)[0]]

    def loss(self, batch: Any, index: int) -> Tensor:
        """Return the module's loss plus the penalty on the last LoRA ranks."""
        return super().loss(batch, index) + self._penalty * tail(self._adapters, self._share)


@dataclass(frozen=True)
class PrunedRanks(WrappedSelect):
    """Wrapper of a select part (choice of submodels) that gives a client only the first LoRA ranks, fewer after each pruning."""

    adapters: Callable[[Submodels], tuple[LoraPair, ...]]  # function that returns the LoRA adapters of a model
    share: float  # share of its ranks that a client keeps at each pruning

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Return the wrapped select part's work with fewer ranks, and note the tail of what is sent."""
        work, state = super().__call__(client, fleet), fleet.state
        memory = state.memory.of(RankMemory)
        chosen, sent = dict(work.spec.kept), []
        for pair in self.adapters(state.submodels):
            name = _axis_of(pair, state)
            if name is None:
                continue
            ranks = list(chosen.get(name) or range(len(state.values[pair.a])))
            for _ in range(memory.pruned.get(client.id, 0)):
                ranks = ranks[: kept(len(ranks), self.share)]
            if len(ranks) < len(state.values[pair.a]):
                chosen[name] = tuple(ranks)
            sent.append((state.values[pair.b][:, ranks], state.values[pair.a][ranks]))
        memory.tails[client.id] = float(tail(sent, self.share))
        return replace(work, spec=replace(work.spec, kept=tuple(chosen.items())))

    def on_join(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Delete the record of pruning for this client id, since a newly joined client may have other data."""
        fleet.state.memory.of(RankMemory).pruned.pop(client.id, None)
        super().on_join(client, fleet)


def _axis_of(pair: LoraPair, state: GlobalState) -> str | None:
    """Return the axis of an adapter's ranks; None where they are kept whole."""
    for name, axis in state.submodels.axes.items():
        if isinstance(axis, Axis) and any(member.name == pair.a and member.dim == 0 for member in axis.members):
            return name
    return None


def prune_if_shrunk(state: GlobalState, update: Update, pairs: Iterable[LoraPair], share: float) -> None:
    """Let a client have fewer LoRA ranks from its next task on if training has shrunk its last ranks (`tail`)."""
    memory = state.memory.of(RankMemory)
    if update.client not in memory.tails:
        return
    own = [(update.tensors[p.b], update.tensors[p.a]) for p in pairs if p.a in update.tensors and p.b in update.tensors]
    if float(tail(own, share)) < memory.tails.pop(update.client):
        memory.pruned[update.client] = memory.pruned.get(update.client, 0) + 1
