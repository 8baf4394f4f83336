"""Store a control variate for each client and their mean, for SCAFFOLD's corrections and FedDyn's objectives."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from raafl.core.payload import Bundles
from raafl.core.state import GlobalState, MergeMemory
from raafl.core.types import Update
from raafl.parts.merge.wrapped import Wrapped
from raafl.submodel import FlatTensors, Spec
from raafl.submodel.extract import CopyPlan


@dataclass
class _VariatesMemory(MergeMemory):
    """Sum of all clients' control variates, which themselves are in `GlobalState.clients`."""

    sum: FlatTensors  # sum of the variates at the last merge
    new: FlatTensors  # changes of the variates since the last merge
    count: FlatTensors  # for each element, total weight of the clients that have trained it
    weights: dict[int, float] = field(default_factory=dict)  # weight of each client, from its first update
    seen: dict[int, list[Spec]] = field(default_factory=dict)  # by client: submodels that it has trained so far


@dataclass(frozen=True)
class Variates:
    """Control variates of all clients, which correct the drift of local training: one number for each trained parameter.

    All start at 0. Their mean is over all N clients of the run, as in the papers. With submodels, the mean of an element
    leaves out clients that have sent updates but never trained this element. Otherwise the mean of a rarely trained
    element would be too small to cancel the clients' variates, and the clients would drift away from their optimum.
    """

    # name of the variates in `GlobalState.clients`, and of the bundle (tensors beside the model) in which they are sent
    name: str
    mean: str | None = None  # name of the bundle in which the mean is sent; None = it is not sent
    by_samples: bool = False  # whether clients are weighted by |D_n| in the mean; False = equally

    def own_(self, state: GlobalState, client: int, spec: Spec, out: FlatTensors) -> None:
        """Write a client's control variate, cut to its submodel, into ``out``."""
        own = state.clients.find(self.name, client)
        if own is None:
            out.zero_()
        else:
            plan_of(state, spec).gather(own, out)

    def mean_(self, state: GlobalState, spec: Spec, out: FlatTensors) -> None:
        """Write the mean of all control variates, cut to a submodel, into ``out``."""
        memory, plan = self._memory(state), plan_of(state, spec)
        plan.gather(memory.sum, out)
        # a client without updates counts at every element, as a variate of 0 with the mean weight of the other clients
        count, unheard = plan.gather(memory.count), float(state.num_clients - len(memory.seen))
        if memory.seen:
            unheard *= math.fsum(memory.weights.get(client, 1.0) for client in memory.seen) / len(memory.seen)
        for dtype, buffer in out.buffers.items():
            buffer.div_((count.buffers[dtype] + unheard).clamp_min(1))

    def add_(
        self, state: GlobalState, client: int, spec: Spec, change: FlatTensors, alpha: float = 1.0, weight: float = 1.0
    ) -> None:
        """Add ``alpha * change`` to a client's control variate; `settle` later adds it to the mean."""
        memory, plan = self._memory(state), plan_of(state, spec)
        # earlier versions stored no weight
        weight = memory.weights.setdefault(client, 1.0 if client in memory.seen else weight)
        own = state.clients.of(self.name, client, plan.full_layout, state.values.device)
        for flat, scale in ((own, alpha), (memory.new, alpha * weight)):
            plan.add_(flat, change.to(flat.device), scale)

    def settle(self, state: GlobalState) -> None:
        """Add the changes of control variates, from the updates that wait, to the mean over all clients.

        Called once per merge, so that the mean is constant within a round.
        """
        memory = self._memory(state)
        for dtype, total in memory.sum.buffers.items():
            total.add_(memory.new.buffers[dtype])
        memory.new.zero_()
        for item in state.waiting:
            self._count(state, memory, item.update.client, item.spec)

    def _count(self, state: GlobalState, memory: _VariatesMemory, client: int, spec: Spec) -> None:
        """Add the client's weight to the count of each element that it trains for the first time."""
        seen = memory.seen.setdefault(client, [])
        if spec in seen:
            return
        new = FlatTensors.zeros(memory.count.layout, state.values.device)
        plan_of(state, spec).cover_(new, memory.weights.get(client, 1.0))
        # elements that it has trained before are counted already
        for other in seen:
            plan_of(state, other).scatter_(new, FlatTensors.zeros(plan_of(state, other).layout, new.device))
        for dtype, count in memory.count.buffers.items():
            count.add_(new.buffers[dtype])
        seen.append(spec)

    def _memory(self, state: GlobalState) -> _VariatesMemory:
        layout = state.submodels.layout(part="trained")

        def new() -> _VariatesMemory:
            total, changes, count = (FlatTensors.zeros(layout, state.values.device) for _ in range(3))
            return _VariatesMemory(total, changes, count)

        return state.memory.of(_VariatesMemory, new, f"variates {self.name}")

    def notes(self, state: GlobalState, num_clients: int) -> list[str]:
        """Return a note on the memory that the variates of all clients take on the server."""
        each = state.submodels.layout(part="trained").num_bytes
        return [
            f"the server keeps {self.name} for each client: {num_clients} clients x {each:,} bytes = {num_clients * each:,} bytes, "
            "and in each checkpoint"
        ]


@dataclass(frozen=True)
class WithVariates(Wrapped):
    """Wrapper of a merge that maintains a control variate for each client, and their mean.

    A client sends the change of its variate together with its update; each merge then updates the mean.

    Attributes:
        variates: store of all clients' control variates.
    """

    variates: Variates
    by_client: ClassVar[bool] = True

    def personalize(self, state: GlobalState, client: int, spec: Spec, values: FlatTensors, bundles: Bundles) -> None:
        """Write the client's control variate, and the mean of all, to the tensors that the client receives beside the model."""
        self.variates.own_(state, client, spec, bundles[self.variates.name])
        if self.variates.mean is not None:
            self.variates.mean_(state, spec, bundles[self.variates.mean])
        super().personalize(state, client, spec, values, bundles)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Update the client's control variate, and pass the client's values to the wrapped merge."""
        weight = float(update.num_samples) if self.variates.by_samples else 1.0
        self.variates.add_(state, update.client, spec, update.bundles[self.variates.name], weight=weight)
        super().receive(state, update, spec, staleness)

    def apply(self, state: GlobalState) -> None:
        """Apply the wrapped merge, then update the mean of the control variates."""
        super().apply(state)
        self.variates.settle(state)

    def notes(self, state: GlobalState, num_clients: int) -> list[str]:
        """Return notes for the user: the wrapped merge's, and one on the memory for control variates."""
        return super().notes(state, num_clients) + self.variates.notes(state, num_clients)

    def __str__(self) -> str:
        return f"{self.inner}, a variate for each client"


def plan_of(state: GlobalState, spec: Spec) -> CopyPlan:
    """Return the copy plan (which elements go where) from all trained parameters to those of a submodel."""
    return state.submodels.plan(spec, "trained", "trained")
