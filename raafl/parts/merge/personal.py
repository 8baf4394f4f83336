"""Record on the server each client's current task, and the scores of its mask; wraps any select and merge."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from raafl.core.algorithm import SelectContext
from raafl.core.payload import Bundles
from raafl.core.state import GlobalState, MergeMemory
from raafl.core.types import ClientInfo, Update, Work
from raafl.parts.local.mask_training import SCORES
from raafl.parts.merge.wrapped import Wrapped
from raafl.parts.select.submodels import WrappedSelect
from raafl.submodel import FlatTensors, Spec

MAX_SCORE = 1e4
"""Largest score that is accepted: far beyond it a probability is 0 or 1, which no optimizer reaches."""


@dataclass(slots=True)
class TaskStart:
    """Record of the submodel and parameter values with which a client's current task started."""

    spec: Spec  # submodel of the task
    # names of the axes for which the task trains scores, which decide the units that the client keeps
    masks: list[str]
    # copy of the parameter values; None = those of the global model, which has not changed since
    start: FlatTensors | None = None


@dataclass
class AtWork(MergeMemory):
    """Record of the submodel and values with which each client's current task started, by client id."""

    key = "at_work"
    starts: dict[int, TaskStart] = field(default_factory=dict)

    def to_plain(self) -> object:
        """Return each client's current task (submodel, trained masks, starting values) as plain data, by client id."""
        return {c: {"spec": one.spec, "masks": one.masks, "start": one.start} for c, one in self.starts.items()}

    @classmethod
    def from_plain(cls, data: dict[int, dict[str, Any]]) -> AtWork:
        """Restore the record of clients' current tasks from the result of `to_plain`."""
        return cls({client: TaskStart(**one) for client, one in data.items()})


def scores_of(state: GlobalState, client: int) -> dict[str, list[float]]:
    """Return the mask scores (logits of the probabilities to keep a segment of units) that a client sent last, by axis."""
    stored = state.clients.find(SCORES, client)
    return {} if stored is None else {a: s.tolist() for a, s in stored.items() if not bool(s.isnan().any())}


def record_work(state: GlobalState, client: int, work: Work) -> None:
    """Record the task that a client starts now: its submodel, and the axes whose mask scores it trains."""
    state.memory.of(AtWork).starts[client] = TaskStart(work.spec, list(work.extra.get("masks", ())))


def forget_work(state: GlobalState, client: int) -> None:
    """Delete the record of the task that a client works on."""
    state.memory.of(AtWork).starts.pop(client, None)


@dataclass(frozen=True)
class RecordingSelect(WrappedSelect):
    """Wrapper of a select part (choice of submodels) that records on the server what each client trains."""

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Return the wrapped selector's work; record its submodel, and the version from which the client starts."""
        work = self.inner(client, fleet)
        record_work(fleet.state, client.id, work)
        return work

    def on_loss(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Delete the record of the lost client's task."""
        forget_work(fleet.state, client.id)
        self.inner.on_loss(client, fleet)


@dataclass(frozen=True)
class WithScores(Wrapped):
    """Wrapper of a merge for clients that learn masks: it stores the mask scores that each client sends.

    Mask scores are logits of the probabilities that segments of units are kept. A task trains either these or the
    model's values; only updates of values go on to the wrapped merge.
    """

    by_client: ClassVar[bool] = True

    def personalize(self, state: GlobalState, client: int, spec: Spec, values: FlatTensors, bundles: Bundles) -> None:
        """Send a client the mask scores that it trained last, if its task trains them; NaN = never trained."""
        stored = state.clients.find(SCORES, client)
        for axis, scores in bundles[SCORES].items():
            scores.fill_(math.nan) if stored is None else scores.copy_(stored[axis])
        super().personalize(state, client, spec, values, bundles)

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Return "wrong-scores" if the update's scores are not finite or out of bounds; else ask the wrapped merge."""
        if spec.trained != ():
            return super().reject_reason(state, update, spec, staleness)
        sound = all(bool((buffer.abs() <= MAX_SCORE).all()) for buffer in update.bundles[SCORES].buffers.values())
        return None if sound else "wrong-scores"

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Store the mask scores in the update, or pass its values to the wrapped merge; then delete the task's record."""
        if spec.trained == ():
            sent = update.bundles[SCORES]
            stored = state.clients.of(SCORES, update.client, sent.layout, fill=math.nan)
            for axis in state.memory.of(AtWork).starts[update.client].masks:
                stored[axis].copy_(sent[axis])
        else:
            super().receive(state, update, spec, staleness)
        forget_work(state, update.client)

    def view(self, state: GlobalState) -> GlobalState:
        """Return the state without the waiting updates of mask scores, which the wrapped merge does not receive."""
        return state.with_waiting([item for item in state.waiting if item.spec.trained != ()])

    def apply(self, state: GlobalState) -> None:
        """Apply the wrapped merge if an update of values waits."""
        if self.view(state).waiting:
            super().apply(state)
