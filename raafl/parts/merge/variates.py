"""Store a control variate for each client and their mean, for SCAFFOLD's corrections and FedDyn's objectives."""

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
    """One flat tensor per client over all trained parameters, initially 0, and their sum as of the last merge.

    The mean is over all N clients of the run, with 0 for those never heard of, as in the papers. Per element of submodels it leaves
    out clients that have sent others and not this one: otherwise elements held by few would have a mean too small to cancel the
    variates, and would be pulled from their optimum permanently.

    Attributes:
        name: of the entry in `GlobalState.clients` and of its bundle.
        mean: name of the bundle with the mean; None = it is not sent.
    """

    name: str
    mean: str | None = None

    def own_(self, state: GlobalState, client: int, spec: Spec, out: FlatTensors) -> None:
        """Write the client's variate, cut to ``spec``, into ``out``."""
        own = state.clients.find(self.name, client)
        if own is None:
            out.zero_()
        else:
            plan_of(state, spec).gather(own, out)

    def mean_(self, state: GlobalState, spec: Spec, out: FlatTensors) -> None:
        """Write the mean, cut to ``spec``, into ``out``."""
        memory, plan = self._memory(state), plan_of(state, spec)
        plan.gather(memory["sum"], out)
        count, unheard = plan.gather(memory["count"]), state.num_clients - len(memory["seen"])
        for dtype, buffer in out.buffers.items():
            buffer.div_((count.buffers[dtype] + unheard).clamp_min(1))

    def add_(self, state: GlobalState, client: int, spec: Spec, change: FlatTensors, alpha: float = 1.0) -> None:
        """Add ``alpha * change`` to the client's variate; `settle` adds it to the mean."""
        memory, plan = self._memory(state), plan_of(state, spec)
        own = state.clients.of(self.name, client, plan.full_layout, state.values.device)
        for flat in (own, memory["new"]):
            plan.add_(flat, change.to(flat.device), alpha)
        memory["received"].append((client, spec))

    def settle(self, state: GlobalState) -> None:
        """Add pending changes to the mean. Called once per merge, so that the mean is constant within a round."""
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
        """Report the memory used per client."""
        each = state.submodels.layout(part="trained").num_bytes
        return [
            f"the server keeps {self.name} for each client: {num_clients} clients x {each:,} bytes = {num_clients * each:,} bytes, "
            "and in each checkpoint"
        ]


@dataclass(frozen=True)
class WithVariates(Wrapped):
    """Merge whose clients have variates: clients send changes of them, and the mean moves with the model."""

    variates: Variates
    by_client: ClassVar[bool] = True

    def personalize(self, state: GlobalState, client: int, spec: Spec, values: FlatTensors, bundles: Bundles) -> None:
        """Send the client its variate and the mean."""
        self.variates.own_(state, client, spec, bundles[self.variates.name])
        if self.variates.mean is not None:
            self.variates.mean_(state, spec, bundles[self.variates.mean])
        super().personalize(state, client, spec, values, bundles)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Store the client's new variate, and pass its values on."""
        self.variates.add_(state, update.client, spec, update.bundles[self.variates.name])
        super().receive(state, update, spec, staleness)

    def apply(self, state: GlobalState) -> None:
        """Merge the model, then update the mean."""
        super().apply(state)
        self.variates.settle(state)

    def notes(self, state: GlobalState, num_clients: int) -> list[str]:
        """Return the inner merge's notes, and the memory used per client."""
        return super().notes(state, num_clients) + self.variates.notes(state, num_clients)

    def __str__(self) -> str:
        return f"{self.inner}, a variate for each client"


def plan_of(state: GlobalState, spec: Spec) -> CopyPlan:
    """Return the copy plan from all trained parameters to those of ``spec``."""
    return state.submodels.plan(spec, "trained", "trained")
