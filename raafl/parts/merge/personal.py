"""What the server remembers of each client: what it is at, and the scores of its mask; around any select and merge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from raafl.core.algorithm import Fleet
from raafl.core.state import GlobalState
from raafl.core.types import ClientInfo, Update, Work
from raafl.parts.local.mask_training import scores_problem
from raafl.parts.merge.wrapped import Wrapped, WrappedSelect
from raafl.submodel import Spec

AT_WORK = "at_work"
"""In `GlobalState.memory`, of each client at work: its "spec", the number of "scores" that it trains by axis, and the values
that it started from ("start"), once they have changed."""

SCORES = "mask_scores"
"""In `GlobalState.memory`, of each client: the scores that it sent last, a list for each axis."""


def note_work(state: GlobalState, client: int, work: Work) -> None:
    """Note that ``client`` starts from the values as they are now."""
    scores = {axis: len(values) for axis, values in work.extra.get("scores", {}).items()}
    noted = {"spec": work.spec, "scores": scores, "start": None}
    state.memory.setdefault(AT_WORK, {})[client] = noted


def forget_work(state: GlobalState, client: int) -> None:
    """Note that ``client`` is at work no more."""
    state.memory.get(AT_WORK, {}).pop(client, None)


@dataclass(frozen=True)
class Noted(WrappedSelect):
    """A select whose clients' starts are noted, for `ImportanceMerge` and `WithScores`; passes everything on."""

    def __call__(self, client: ClientInfo, fleet: Fleet) -> Work:
        """Return the inner select's work."""
        work = self.inner(client, fleet)
        note_work(fleet.state, client.id, work)
        return work

    def lost(self, client: ClientInfo, fleet: Fleet) -> None:
        """Forget what the client was at, and pass it on."""
        forget_work(fleet.state, client.id)
        self.inner.lost(client, fleet)


@dataclass(frozen=True)
class WithScores(Wrapped):
    """A merge that takes in the scores of masks as well; what trained no tensors does not reach the inner merge."""

    by_client: ClassVar[bool] = True

    def problem(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Check scores, where they were asked for, then pass on the objection of the inner merge."""
        expected = state.memory.get(AT_WORK, {}).get(update.client, {}).get("scores")
        if expected:
            return scores_problem(update.extra, expected)
        return super().problem(state, update, spec, staleness)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Remember scores, or pass the update on; its client is at work no more."""
        expected = state.memory.get(AT_WORK, {}).get(update.client, {}).get("scores")
        if expected:
            known = state.memory.setdefault(SCORES, {}).setdefault(update.client, {})
            known.update({axis: [float(v) for v in update.extra["scores"][axis]] for axis in expected})
        else:
            state.memory["received"] = True
            super().receive(state, update, spec, staleness)
        forget_work(state, update.client)

    def keep(self, state: GlobalState) -> None:
        """Let the inner merge keep what it received, if it has received anything."""
        if state.memory.get("received"):
            super().keep(state)

    def apply(self, state: GlobalState) -> None:
        """Let the inner merge fold in what it received, if it has received anything."""
        if state.memory.pop("received", False):
            super().apply(state)
