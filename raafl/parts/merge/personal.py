"""Record on the server each client's current task, and the scores of its mask; wraps any select and merge."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from raafl.core.algorithm import SelectContext
from raafl.core.memory import MergeMemory, OneValue
from raafl.core.payload import Bundles
from raafl.core.state import GlobalState
from raafl.core.types import ClientInfo, Update, Work
from raafl.parts.local.mask_training import SCORES
from raafl.parts.merge.wrapped import Wrapped, WrappedSelect
from raafl.submodel import FlatTensors, Spec

MAX_SCORE = 1e4
"""Largest score that is accepted: far beyond it a probability is 0 or 1, which no optimizer reaches."""


@dataclass(slots=True)
class Start:
    """Submodel and values from which a client's task started.

    Attributes:
        spec: submodel of the task.
        masks: names of the axes whose scores the task trains.
        start: copy of the values that the task started from, made before the model first changes; None = it has not changed.
    """

    spec: Spec
    masks: list[str]
    start: FlatTensors | None = None


@dataclass
class AtWork(MergeMemory):
    """Starts of the tasks of clients at work, by client id."""

    key = "at_work"
    starts: dict[int, Start] = field(default_factory=dict)

    def to_plain(self) -> object:
        """Return the fields of each start, by client."""
        return {c: {"spec": one.spec, "masks": one.masks, "start": one.start} for c, one in self.starts.items()}

    @classmethod
    def from_plain(cls, data: dict[int, dict[str, Any]]) -> AtWork:
        """Restore the record from the result of `to_plain`."""
        return cls({client: Start(**one) for client, one in data.items()})


@dataclass
class Received(OneValue[bool]):
    """Whether the inner merge of `WithScores` has received an update since the last merge."""

    key = "received"
    value: bool = False


def scores_of(state: GlobalState, client: int) -> dict[str, list[float]]:
    """Return the scores that a client sent last, for each axis on which it has trained them."""
    stored = state.clients.find(SCORES, client)
    return {} if stored is None else {a: s.tolist() for a, s in stored.items() if not bool(s.isnan().any())}


def record_work(state: GlobalState, client: int, work: Work) -> None:
    """Record that ``client`` starts ``work`` from the current values.

    Args:
        state: the global model, whose memory changes in place.
        client: id of the client.
        work: work of the client's task.
    """
    state.memory.of(AtWork).starts[client] = Start(work.spec, list(work.extra.get("masks", ())))


def forget_work(state: GlobalState, client: int) -> None:
    """Delete the record of the task that ``client`` works on."""
    state.memory.of(AtWork).starts.pop(client, None)


@dataclass(frozen=True)
class RecordingSelect(WrappedSelect):
    """Select wrapper that records each client's task and start, for `ImportanceMerge` and `WithScores`."""

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Return the inner select's work, and record it."""
        work = self.inner(client, fleet)
        record_work(fleet.state, client.id, work)
        return work

    def on_loss(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Delete the record of the lost client's task."""
        forget_work(fleet.state, client.id)
        self.inner.on_loss(client, fleet)


@dataclass(frozen=True)
class WithScores(Wrapped):
    """Merge wrapper that stores each client's mask scores; the inner merge gets no updates that trained scores alone."""

    by_client: ClassVar[bool] = True

    def personalize(self, state: GlobalState, client: int, spec: Spec, values: FlatTensors, bundles: Bundles) -> None:
        """Send the client the scores that it sent last, for a task that trains scores; NaN = never trained."""
        stored = state.clients.find(SCORES, client)
        for axis, scores in bundles[SCORES].items():
            scores.fill_(math.nan) if stored is None else scores.copy_(stored[axis])
        super().personalize(state, client, spec, values, bundles)

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Return "wrong-scores" if scores are not finite and within bounds; ask the inner merge about other updates."""
        if spec.trained != ():
            return super().reject_reason(state, update, spec, staleness)
        sound = all(bool((buffer.abs() <= MAX_SCORE).all()) for buffer in update.bundles[SCORES].buffers.values())
        return None if sound else "wrong-scores"

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Store scores, or pass the update to the inner merge; delete the record of the client's task."""
        if spec.trained == ():
            sent = update.bundles[SCORES]
            stored = state.clients.of(SCORES, update.client, sent.layout, fill=math.nan)
            for axis in state.memory.of(AtWork).starts[update.client].masks:
                stored[axis].copy_(sent[axis])
        else:
            state.memory.of(Received).value = True
            super().receive(state, update, spec, staleness)
        forget_work(state, update.client)

    def detach(self, state: GlobalState) -> None:
        """Let the inner merge copy shared tensors, if it has received any update."""
        if state.memory.of(Received).value:
            super().detach(state)

    def apply(self, state: GlobalState) -> None:
        """Apply the inner merge, if it has received any update."""
        received = state.memory.pop(Received)
        if received is not None and received.value:
            super().apply(state)
