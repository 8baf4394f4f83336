"""What merges around other merges share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from raafl.core.algorithm import Merge
from raafl.core.state import GlobalState
from raafl.core.types import Update
from raafl.submodel import Spec


@dataclass(frozen=True)
class Wrapped(Merge):
    """A merge around another; passes everything on, so that a subclass says only what it does otherwise.

    One that holds updates back until `apply` overrides `keep`, too: the inner merge has received nothing yet.

    Attributes:
        inner: the algorithm's own merge, or another around it.
        sends: what the inner merge wants.
    """

    inner: Merge
    sends: Literal["values", "delta"] = field(init=False)

    def __post_init__(self) -> None:
        """Ask clients for what the inner merge wants."""
        object.__setattr__(self, "sends", self.inner.sends)

    def check(self, state: GlobalState) -> list[str]:
        """Return the inner merge's problems."""
        return self.inner.check(state)

    def notes(self, state: GlobalState, num_clients: int) -> list[str]:
        """Return the inner merge's notes."""
        return self.inner.notes(state, num_clients)

    def problem(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Return what the inner merge objects to."""
        return self.inner.problem(state, update, spec, staleness)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Pass the update on."""
        self.inner.receive(state, update, spec, staleness)

    def keep(self, state: GlobalState) -> None:
        """Let the inner merge keep what it received."""
        self.inner.keep(state)

    def apply(self, state: GlobalState) -> None:
        """Let the inner merge fold in what it received."""
        self.inner.apply(state)

    def undone(self, state: GlobalState, merged: Sequence[tuple[int, int]]) -> None:
        """Let the inner merge know."""
        self.inner.undone(state, merged)

    def report(self, state: GlobalState) -> dict[str, Any]:
        """Return what the inner merge reports."""
        return self.inner.report(state)
