"""Provide base classes for merges that wrap a merge, and selects that wrap a select."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from raafl.core.algorithm import Merge, Select, SelectContext
from raafl.core.payload import Bundles
from raafl.core.state import GlobalState
from raafl.core.types import Assignment, ClientInfo, Update, Work
from raafl.submodel import FlatTensors, Spec


@dataclass(frozen=True)
class Wrapped(Merge):
    """Base class of merges that wrap another merge: calls that a wrapper does not override are passed on.

    What only the outermost merge is asked (`overflows`, `received_layout`), or only the method's own (`too_stale`,
    `numbers`; see `innermost`), is not passed on. A subclass whose wrapped merge must see another state, such as one in
    which other updates wait, overrides `view`.

    Attributes:
        inner: the wrapped merge: the algorithm's own, or another wrapper.
        sends: content of updates, "values" or "delta", as the wrapped merge requires.
    """

    inner: Merge
    sends: Literal["values", "delta"] = field(init=False)

    def __post_init__(self) -> None:
        """Copy ``sends`` from the wrapped merge: whether clients send values or differences."""
        object.__setattr__(self, "sends", self.inner.sends)

    def view(self, state: GlobalState) -> GlobalState:
        """Return the global model as the wrapped merge sees it; what is not replaced is shared, and changed in place."""
        return state

    def check(self, state: GlobalState) -> list[str]:
        """Return the problems that the wrapped merge finds before the run."""
        return self.inner.check(self.view(state))

    def notes(self, state: GlobalState, num_clients: int) -> list[str]:
        """Return the wrapped merge's notes for the start of the run."""
        return self.inner.notes(self.view(state), num_clients)

    @property
    def innermost(self) -> Merge:
        """The method's own merge, which all wrappers enclose."""
        return self.inner.innermost

    @property
    def personalizes(self) -> bool:
        """Whether this merge or the wrapped one sends each client values of its own."""
        return type(self).personalize is not Wrapped.personalize or self.inner.personalizes

    def personalize(self, state: GlobalState, client: int, spec: Spec, values: FlatTensors, bundles: Bundles) -> None:
        """Let the wrapped merge write the values, and other tensors (bundles), that only this client receives."""
        self.inner.personalize(self.view(state), client, spec, values, bundles)

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Return the wrapped merge's reason to refuse the update; None = it accepts the update."""
        return self.inner.reject_reason(self.view(state), update, spec, staleness)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Pass the update to the wrapped merge."""
        self.inner.receive(self.view(state), update, spec, staleness)

    def detach(self, state: GlobalState) -> None:
        """Let the wrapped merge copy the tensors that it still shares with an update."""
        self.inner.detach(self.view(state))

    def apply(self, state: GlobalState) -> None:
        """Let the wrapped merge change the model."""
        self.inner.apply(self.view(state))

    def on_rollback(self, state: GlobalState, merged: Sequence[tuple[int, int]]) -> None:
        """Tell the wrapped merge which merges a crash of the server has undone."""
        self.inner.on_rollback(self.view(state), merged)

    def ends_run(self, state: GlobalState) -> str | None:
        """Return the wrapped merge's reason to end the run, or None."""
        return self.inner.ends_run(self.view(state))

    def figures(self, state: GlobalState) -> dict[str, float | None]:
        """Return the values that the wrapped merge adds to metrics.csv, by column."""
        return self.inner.figures(self.view(state))

    def report(self, state: GlobalState) -> dict[str, Any]:
        """Return the wrapped merge's entries for the run's summary."""
        return self.inner.report(self.view(state))

    def __str__(self) -> str:
        return str(self.inner)


@dataclass(frozen=True)
class WrappedSelect(Select):
    """Base class of wrappers of a select part (choice of submodels): calls that a wrapper does not override are passed on."""

    inner: Select  # the wrapped select part

    @property
    def needs_last_update(self) -> bool:
        """Whether the wrapped select part (choice of submodels) must see a client's last update before it chooses again."""
        return self.inner.needs_last_update

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Return what the wrapped select part assigns to the client."""
        return self.inner(client, fleet)

    def on_join(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Tell the wrapped select part (choice of submodels) that a client has joined."""
        self.inner.on_join(client, fleet)

    def on_loss(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Tell the wrapped select part (choice of submodels) that a client was lost."""
        self.inner.on_loss(client, fleet)

    def on_round_start(self, out: Sequence[ClientInfo], fleet: SelectContext) -> None:
        """Tell the wrapped select part (choice of submodels) that a round starts."""
        self.inner.on_round_start(out, fleet)

    def on_update(self, client: ClientInfo, assignment: Assignment, seconds: float, fleet: SelectContext) -> None:
        """Tell the wrapped select part (choice of submodels) that an update has arrived."""
        self.inner.on_update(client, assignment, seconds, fleet)

    def check(self, fleet: SelectContext) -> list[str]:
        """Return the problems that the wrapped select part (choice of submodels) finds before the run."""
        return self.inner.check(fleet)

    def notes(self, fleet: SelectContext) -> list[str]:
        """Return the notes of the wrapped select part (choice of submodels) for the start of the run."""
        return self.inner.notes(fleet)

    def __str__(self) -> str:
        return str(self.inner)
