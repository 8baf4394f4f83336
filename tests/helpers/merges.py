"""Drive a merge by hand, in the way the coordinator does."""

from __future__ import annotations

from raafl.core.algorithm import Merge
from raafl.core.state import GlobalState, PendingUpdate
from raafl.core.types import Update
from raafl.submodel import FULL, Spec


def take(merge: Merge, state: GlobalState, update: Update, spec: Spec = FULL, staleness: int = 0) -> None:
    """Let the outermost merge receive an update, which then waits; ``staleness``: merges since its assignment."""
    merge.take(state, PendingUpdate(update, spec, staleness))


def merge_all(merge: Merge, state: GlobalState) -> GlobalState:
    """Merge all waiting updates, after which none waits; return the state."""
    merge.apply(state)
    state.waiting.clear()
    return state
