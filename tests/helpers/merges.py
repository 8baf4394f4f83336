"""Drive a merge by hand, as the coordinator does."""

from __future__ import annotations

from raafl.core.algorithm import Merge
from raafl.core.state import GlobalState, PendingUpdate
from raafl.core.types import Update
from raafl.submodel import FULL, Spec


def take(merge: Merge, state: GlobalState, update: Update, spec: Spec = FULL, staleness: int = 0) -> None:
    """Let a merge receive an update, which then waits.

    Args:
        merge: outermost merge.
        state: the global model.
        update: that arrives.
        spec: its submodel.
        staleness: merges since its assignment.
    """
    merge.take(state, PendingUpdate(update, spec, staleness))


def merge_all(merge: Merge, state: GlobalState) -> GlobalState:
    """Merge all that waits, after which nothing does; return the state."""
    merge.apply(state)
    state.waiting.clear()
    return state
