"""Drive a merge by hand, in the way the coordinator does."""

from __future__ import annotations

from dataclasses import replace

from raafl.core.algorithm import Algorithm, Merge
from raafl.core.state import GlobalState, PendingUpdate
from raafl.core.types import Update
from raafl.parts.protect.assembly import Bounded
from raafl.submodel import FULL, Spec


def take(merge: Merge, state: GlobalState, update: Update, spec: Spec = FULL, staleness: int = 0) -> None:
    """Let the outermost merge receive an update, which then waits; ``staleness``: merges since its assignment."""
    merge.take(state, PendingUpdate(update, spec, staleness))


def merge_all(merge: Merge, state: GlobalState) -> GlobalState:
    """Merge all waiting updates, after which none waits; return the state."""
    merge.apply(state)
    state.waiting.clear()
    return state


def bounded(algorithm: Algorithm, max_norm_ratio: float | None) -> Algorithm:
    """Return ``algorithm`` with a merge that refuses updates whose norm is more than this multiple of the usual one."""
    return replace(algorithm, merge=Bounded(algorithm.merge, max_norm_ratio))
