"""A variate of each client, and their mean: what SCAFFOLD corrects steps by, and FedDyn its objectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from raafl.core.payload import Bundles
from raafl.core.state import GlobalState
from raafl.core.types import Update
from raafl.parts.merge.wrapped import Wrapped
from raafl.submodel import FlatTensors, Spec
from raafl.submodel.extract import CopyPlan


@dataclass(frozen=True)
class Variates:
    """A flat tensor for each client, over all that trains, 0 at first; and the sum over clients, as of the last merge.

    The mean is over all N clients of the run, those that were not heard of at 0, as papers have it; of an element of submodels
    without those that have sent others and not this one. With them, elements that few hold would have a mean that is too
    small for the variates to cancel out, and would be pulled from their optimum for good.

    Attributes:
        name: in `GlobalState.clients`, and of the bundle with it.
        mean: of the bundle with the mean; None = none is sent.
    """

    name: str
    mean: str | None = None

    def own_(self, state: GlobalState, client: int, spec: Spec, out: FlatTensors) -> None:
        """Fill ``out`` with the client's own, of a submodel."""
        own = state.clients.find(self.name, client)
        if own is None:
            out.zero_()
        else:
            plan_of(state, spec).gather(own, out)

    def mean_(self, state: GlobalState, spec: Spec, out: FlatTensors) -> None:
        """Fill ``out`` with the mean, of a submodel."""
        memory, plan = self._memory(state), plan_of(state, spec)
        plan.gather(memory["sum"], out)
        count, unheard = plan.gather(memory["count"]), state.num_clients - len(memory["seen"])
        for dtype, buffer in out.buffers.items():
            buffer.div_((count.buffers[dtype] + unheard).clamp_min(1))

    def add_(self, state: GlobalState, client: int, spec: Spec, change: FlatTensors, alpha: float = 1.0) -> None:
        """Add ``alpha * change`` to the client's own; it is part of the mean once `settle` is called."""
        memory, plan = self._memory(state), plan_of(state, spec)
        own = state.clients.of(self.name, client, plan.full_layout, state.values.device)
        for flat in (own, memory["new"]):
            plan.add_(flat, change.to(flat.device), alpha)
        memory["received"].append((client, spec))

    def settle(self, state: GlobalState) -> None:
        """Take into the mean what was added: at a merge, so that it stands still in a round."""
        memory = self._memory(state)
        for dtype, total in memory["sum"].buffers.items():
            total.add_(memory["new"].buffers[dtype])
        memory["new"].zero_()
        for client, spec in memory["received"]:
            self._count(state, memory, client, spec)
        memory["received"].clear()

    def _count(self, state: GlobalState, memory: dict[str, Any], client: int, spec: Spec) -> None:
        """Count a client at the elements that it has not trained before."""
        seen: list[Spec] = memory["seen"].setdefault(client, [])
        if spec in seen:
            return
        new = FlatTensors.zeros(memory["count"].layout, state.values.device)
        plan_of(state, spec).cover_(new)
        for other in seen:
            plan_of(state, other).scatter_(new, FlatTensors.zeros(plan_of(state, other).layout, new.device))
        for dtype, count in memory["count"].buffers.items():
            count.add_(new.buffers[dtype])
        seen.append(spec)

    def _memory(self, state: GlobalState) -> dict[str, Any]:
        memory: dict[str, Any] = state.memory.setdefault(f"variates {self.name}", {})
        if not memory:
            layout = state.submodels.layout(part="trained")
            memory |= {name: FlatTensors.zeros(layout, state.values.device) for name in ("sum", "new", "count")}
            memory |= {"received": [], "seen": {}}
        return memory

    def notes(self, state: GlobalState, num_clients: int) -> list[str]:
        """Say what is kept for clients."""
        each = state.submodels.layout(part="trained").num_bytes
        return [
            f"the server keeps {self.name} for each client: {num_clients} clients x {each:,} bytes = {num_clients * each:,} bytes, "
            "and in each checkpoint"
        ]


@dataclass(frozen=True)
class WithVariates(Wrapped):
    """A merge whose clients have variates, which they send the change of; the mean moves when the model does."""

    variates: Variates
    by_client: ClassVar[bool] = True

    def personalize(self, state: GlobalState, client: int, spec: Spec, values: FlatTensors, bundles: Bundles) -> None:
        """Fill in the client's own, and the mean."""
        self.variates.own_(state, client, spec, bundles[self.variates.name])
        if self.variates.mean is not None:
            self.variates.mean_(state, spec, bundles[self.variates.mean])
        super().personalize(state, client, spec, values, bundles)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Keep the client's new variate, and pass its values on."""
        self.variates.add_(state, update.client, spec, update.bundles[self.variates.name])
        super().receive(state, update, spec, staleness)

    def apply(self, state: GlobalState) -> None:
        """Move the model, and the mean."""
        super().apply(state)
        self.variates.settle(state)

    def notes(self, state: GlobalState, num_clients: int) -> list[str]:
        """Return the inner merge's notes, and what is kept."""
        return super().notes(state, num_clients) + self.variates.notes(state, num_clients)

    def __str__(self) -> str:
        return f"{self.inner}, a variate for each client"


def plan_of(state: GlobalState, spec: Spec) -> CopyPlan:
    """Return the plan between all that trains and what a submodel trains."""
    return state.submodels.plan(spec, "trained", "trained")
