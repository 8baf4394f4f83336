"""What the server remembers of each client: what it is at, and the scores of its mask; around any select and merge."""

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
    """Look up the scores that a client has sent last, of each axis that it has trained."""
    known = state.clients.find(SCORES, client)
    return {} if known is None else {a: s.tolist() for a, s in known.items() if not bool(s.isnan().any())}


def note_work(state: GlobalState, client: int, work: Work) -> None:
    """Note that ``client`` starts from the values as they are now."""
    noted = {"spec": work.spec, "masks": list(work.extra.get("masks", ())), "start": None}
    state.memory.setdefault(AT_WORK, {})[client] = noted


def forget_work(state: GlobalState, client: int) -> None:
    """Note that ``client`` is at work no more."""
    state.memory.get(AT_WORK, {}).pop(client, None)


@dataclass(frozen=True)
class Noted(WrappedSelect):
    """A select whose clients' starts are noted, for `ImportanceMerge` and `WithScores`; passes everything on."""

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Return the inner select's work."""
        work = self.inner(client, fleet)
        note_work(fleet.state, client.id, work)
        return work

    def on_loss(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Forget what the client was at, and pass it on."""
        forget_work(fleet.state, client.id)
        self.inner.on_loss(client, fleet)


@dataclass(frozen=True)
class WithScores(Wrapped):
    """A merge that keeps each client's scores of masks as well; what trained no values does not reach the inner merge."""

    by_client: ClassVar[bool] = True

    def personalize(self, state: GlobalState, client: int, spec: Spec, values: FlatTensors, bundles: Bundles) -> None:
        """Fill in the client's own scores, where it is to train some."""
        known = state.clients.find(SCORES, client)
        for axis, scores in bundles[SCORES].items():
            scores.fill_(math.nan) if known is None else scores.copy_(known[axis])
        super().personalize(state, client, spec, values, bundles)

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Check scores, where they were asked for, or pass on the objection of the inner merge."""
        if spec.trained != ():
            return super().reject_reason(state, update, spec, staleness)
        sound = all(bool((buffer.abs() <= MAX_SCORE).all()) for buffer in update.bundles[SCORES].buffers.values())
        return None if sound else "wrong-scores"

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Keep scores, or pass the update on; its client is at work no more."""
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
        """Let the inner merge keep what it received, if it has received anything."""
        if state.memory.get("received"):
            super().detach(state)

    def apply(self, state: GlobalState) -> None:
        """Let the inner merge fold in what it received, if it has received anything."""
        if state.memory.pop("received", False):
            super().apply(state)
