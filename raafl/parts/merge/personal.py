"""Record on the server what each client works on, and the scores of its mask; wraps any select and merge."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from raafl.core.algorithm import SelectContext
from raafl.core.payload import Bundles
from raafl.core.state import GlobalState
from raafl.core.types import ClientInfo, Update, Work
from raafl.parts.local.mask_training import SCORES
from raafl.parts.merge.wrapped import Wrapped, WrappedSelect
from raafl.submodel import FlatTensors, Spec

AT_WORK = "at_work"
"""In `GlobalState.memory`, of each client at work: its "spec", the axes whose scores it trains ("masks"), and the values that
it started from ("start"), once they have changed."""

MAX_SCORE = 1e4
"""Scores beyond this are no work of an optimiser: their probability is 0 or 1."""


def scores_of(state: GlobalState, client: int) -> dict[str, list[float]]:
    """Return the scores that a client sent last, for each axis that it has trained."""
    known = state.clients.find(SCORES, client)
    return {} if known is None else {a: s.tolist() for a, s in known.items() if not bool(s.isnan().any())}


def note_work(state: GlobalState, client: int, work: Work) -> None:
    """Record that ``client`` starts from the current values."""
    noted = {"spec": work.spec, "masks": list(work.extra.get("masks", ())), "start": None}
    state.memory.setdefault(AT_WORK, {})[client] = noted


def forget_work(state: GlobalState, client: int) -> None:
    """Delete the record of what ``client`` works on."""
    state.memory.get(AT_WORK, {}).pop(client, None)


@dataclass(frozen=True)
class Noted(WrappedSelect):
    """Select that records each client's start, for `ImportanceMerge` and `WithScores`."""

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Return the inner select's work."""
        work = self.inner(client, fleet)
        note_work(fleet.state, client.id, work)
        return work

    def on_loss(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Delete the record of the client's work."""
        forget_work(fleet.state, client.id)
        self.inner.on_loss(client, fleet)


@dataclass(frozen=True)
class WithScores(Wrapped):
    """Merge that stores each client's mask scores; updates that trained scores only do not reach the inner merge."""

    by_client: ClassVar[bool] = True

    def personalize(self, state: GlobalState, client: int, spec: Spec, values: FlatTensors, bundles: Bundles) -> None:
        """Send the client its own scores, in tasks that train some."""
        known = state.clients.find(SCORES, client)
        for axis, scores in bundles[SCORES].items():
            scores.fill_(math.nan) if known is None else scores.copy_(known[axis])
        super().personalize(state, client, spec, values, bundles)

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Check the scores where they were requested; otherwise ask the inner merge."""
        if spec.trained != ():
            return super().reject_reason(state, update, spec, staleness)
        sound = all(bool((buffer.abs() <= MAX_SCORE).all()) for buffer in update.bundles[SCORES].buffers.values())
        return None if sound else "wrong-scores"

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Store scores, or pass the update on; the client no longer works."""
        if spec.trained == ():
            sent = update.bundles[SCORES]
            known = state.clients.of(SCORES, update.client, sent.layout, fill=math.nan)
            for axis in state.memory[AT_WORK][update.client]["masks"]:
                known[axis].copy_(sent[axis])
        else:
            state.memory["received"] = True
            super().receive(state, update, spec, staleness)
        forget_work(state, update.client)

    def detach(self, state: GlobalState) -> None:
        """Detach the inner merge, if it received anything."""
        if state.memory.get("received"):
            super().detach(state)

    def apply(self, state: GlobalState) -> None:
        """Apply the inner merge, if it received anything."""
        if state.memory.pop("received", False):
            super().apply(state)
