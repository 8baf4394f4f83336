"""Try a merge, see whether it leaves only finite numbers, and undo it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # torch lists it in no __all__

from raafl.core.algorithm import Merge
from raafl.core.state import GlobalState, PendingUpdate
from raafl.core.types import Update
from raafl.submodel import FlatTensors, Spec
from raafl.submodel.flat import is_finite

HEADROOM = 16.0
"""Factor by which a large update is scaled for the trial, so that later updates of the same merge cannot make it overflow."""


def is_sound_merge(
    merge: Merge,
    state: GlobalState,
    update: Update,
    spec: Spec,
    staleness: int,
    *,
    scale: float,
    detaches: bool,
    but: str,
) -> bool:
    """Merge a copy of an update with those that wait, check the result, and restore the state.

    `scale`: factor of the copy's values. `detaches`: whether the merge copies what it shares with updates before it applies them.
    `but`: key of the record in `GlobalState.memory` that is left alone.
    """
    saved = copied(state, but)
    bundles = {name: bundle.clone() for name, bundle in update.bundles.items()}
    tried = replace(update, tensors=update.tensors.clone(), bundles=bundles)
    for flat in (tried.tensors, *bundles.values()) if scale != 1 else ():
        for dtype, buffer in flat.buffers.items():
            # scaling could overflow float16, whose sums are float32 and have enough room without it
            if dtype != torch.float16:
                buffer.mul_(scale)
    try:
        with state.clients.recording(saved["clients"]):
            merge.take(state, PendingUpdate(tried, spec, staleness))
            if detaches:
                merge.detach(state)
            merge.apply(state)
        return is_sound(state, saved, but)
    except (ArithmeticError, LinAlgError):
        return False
    finally:
        restore(state, saved, but)


def copied(state: GlobalState, but: str) -> dict[str, Any]:
    """Copy all state that a merge may change, so that the merge can be undone.

    The tensors stored for clients are not copied here; each is copied only when it first changes (`ClientState.recording`).
    """
    memory = {name: _copy(value) for name, value in state.memory.to_plain().items() if name != but}
    return {"values": state.values.clone(), "memory": memory, "clients": {}, "waiting": list(state.waiting)}


def restore(state: GlobalState, saved: dict[str, Any], but: str) -> None:
    """Restore in place the state that `copied` saved."""
    state.values.copy_(saved["values"])
    state.memory.load(saved["memory"], but)
    state.waiting[:] = saved["waiting"]
    state.scratch.clear()  # scratch memory may be shared with the state that was tried
    for (name, client), flat in saved["clients"].items():
        if flat is None:
            state.clients.forget(name, client)
        else:
            state.clients.values[name][client].copy_(flat)


def is_sound(state: GlobalState, saved: dict[str, Any], but: str) -> bool:
    """Check that a merge made after `copied` left only finite numbers.

    Tensors stored for clients are checked for infinities only: NaN marks elements that a client has never trained, and
    a sum that overflows becomes infinite before it becomes NaN.
    """
    touched = (state.clients.find(name, client) for name, client in saved["clients"])
    if any(bool(buffer.isinf().any()) for flat in touched if flat is not None for buffer in flat.buffers.values()):
        return False
    leaves = _leaves({name: value for name, value in state.memory.to_plain().items() if name != but})
    return state.values.is_finite() and all(map(is_finite, leaves))


def _copy(value: object) -> object:
    """Copy containers and tensors recursively; all other values are immutable, and returned as they are."""
    match value:
        case Tensor() | FlatTensors():
            return value.clone()
        case dict():
            return {key: _copy(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)([_copy(item) for item in value])
    return value


def _leaves(value: object) -> Iterator[Tensor]:
    """Yield every tensor in nested containers, such as the memory of a merge."""
    match value:
        case Tensor():
            yield value
        case FlatTensors():
            yield from value.buffers.values()
        case dict():
            for item in value.values():
                yield from _leaves(item)
        case list() | tuple():
            for item in value:
                yield from _leaves(item)
