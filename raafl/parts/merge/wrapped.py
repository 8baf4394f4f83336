"""Provide base classes for merges that wrap a merge, and selects that wrap a select."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from raafl.core.algorithm import Merge, Select, SelectContext
from raafl.core.payload import Bundles
from raafl.core.state import GlobalState
from raafl.core.types import Assignment, ClientInfo, Update, Work
from raafl.submodel import FlatTensors, Layout, Spec


@dataclass(frozen=True)
class Wrapped(Merge):
    """Base of merges that wrap another merge: it forwards every call to it, and a subclass overrides the calls that differ.

    A subclass that holds updates back until `apply` must override `detach`, too, since the inner merge has received nothing yet.

    Attributes:
        inner: the algorithm's own merge, or another wrapper.
        sends: content of updates, "values" or "delta"; the inner merge decides.
    """

    inner: Merge
    sends: Literal["values", "delta"] = field(init=False)

    def __post_init__(self) -> None:
        """Take over what the inner merge wants clients to send."""
        object.__setattr__(self, "sends", self.inner.sends)

    def check(self, state: GlobalState) -> list[str]:
        """Return the problems that the inner merge finds before the run."""
        return self.inner.check(state)

    def notes(self, state: GlobalState, num_clients: int) -> list[str]:
        """Return the inner merge's notes for the start of the run."""
        return self.inner.notes(state, num_clients)

    @property
    def personalizes(self) -> bool:
        """Whether this merge or the inner one sends each client values of its own."""
        return type(self).personalize is not Wrapped.personalize or self.inner.personalizes

    def personalize(self, state: GlobalState, client: int, spec: Spec, values: FlatTensors, bundles: Bundles) -> None:
        """Let the inner merge write the values and bundles that it sends to this client alone."""
        self.inner.personalize(state, client, spec, values, bundles)

    def too_stale(self, staleness: float) -> str | None:
        """Return the inner merge's warning about stale updates, if it has one."""
        return self.inner.too_stale(staleness)

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Return the inner merge's reason to refuse the update; None = it accepts it."""
        return self.inner.reject_reason(state, update, spec, staleness)

    def received_layout(self, state: GlobalState, spec: Spec, layout: Layout) -> Layout:
        """Return the layout in which the inner merge takes updates."""
        return self.inner.received_layout(state, spec, layout)

    def numbers(self, update: Update) -> Sequence[float]:
        """Return the numbers in `Update.extra` that the inner merge uses in place of tensors."""
        return self.inner.numbers(update)

    def overflows(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> bool:
        """Check whether the inner merge expects the update to overflow."""
        return self.inner.overflows(state, update, spec, staleness)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Pass the update to the inner merge."""
        self.inner.receive(state, update, spec, staleness)

    def detach(self, state: GlobalState) -> None:
        """Let the inner merge copy tensors that it still shares with an update."""
        self.inner.detach(state)

    def apply(self, state: GlobalState) -> None:
        """Let the inner merge change the model."""
        self.inner.apply(state)

    def on_rollback(self, state: GlobalState, merged: Sequence[tuple[int, int]]) -> None:
        """Tell the inner merge which merges a crash has rolled back."""
        self.inner.on_rollback(state, merged)

    def ends_run(self, state: GlobalState) -> str | None:
        """Return the inner merge's reason to end the run, or None."""
        return self.inner.ends_run(state)

    def figures(self, state: GlobalState) -> dict[str, float | None]:
        """Return the inner merge's columns of metrics.csv."""
        return self.inner.figures(state)

    def report(self, state: GlobalState) -> dict[str, Any]:
        """Return the inner merge's entries of the run's report."""
        return self.inner.report(state)

    def __str__(self) -> str:
        return str(self.inner)


@dataclass(frozen=True)
class WrappedSelect(Select):
    """Base of selects that wrap another select: it forwards every call to it, and a subclass overrides the calls that differ.

    Attributes:
        inner: the wrapped select.
    """

    inner: Select

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Return the inner select's work."""
        return self.inner(client, fleet)

    def on_join(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Forward the join of a client to the inner select."""
        self.inner.on_join(client, fleet)

    def on_loss(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Forward the loss of a client to the inner select."""
        self.inner.on_loss(client, fleet)

    def on_round_start(self, out: Sequence[ClientInfo], fleet: SelectContext) -> None:
        """Forward the start of a round to the inner select."""
        self.inner.on_round_start(out, fleet)

    def on_update(self, client: ClientInfo, assignment: Assignment, seconds: float, fleet: SelectContext) -> None:
        """Forward the arrival of an update to the inner select."""
        self.inner.on_update(client, assignment, seconds, fleet)

    def check(self, fleet: SelectContext) -> list[str]:
        """Return the problems that the inner select finds before the run."""
        return self.inner.check(fleet)

    def notes(self, fleet: SelectContext) -> list[str]:
        """Return the inner select's notes for the start of the run."""
        return self.inner.notes(fleet)

    def __str__(self) -> str:
        return str(self.inner)
