"""Provide the base class of merges that wrap a merge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from raafl.core.algorithm import Merge
from raafl.core.payload import Bundles
from raafl.core.state import GlobalState
from raafl.core.types import Update
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
