"""Try a merge: copy the global state before it, check that what it leaves is finite, and restore the copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from raafl.core.state import GlobalState
from raafl.submodel.flat import FlatTensors, is_finite, is_merged

RUINED = 1e6
"""Magnitude of a parameter of a global model on which clients may fail through no fault of their own."""


def copied(state: GlobalState, but: str) -> dict[str, Any]:
    """Copy what a merge may change, without the entry ``but`` of the merge's memory.

    What is stored for clients is copied when it is first touched, by `ClientState.recording` into the entry "clients".
    """
    memory = {name: _copy(value) for name, value in state.memory.items() if name != but}
    return {"values": state.values.clone(), "memory": memory, "clients": {}}


def restore(state: GlobalState, saved: dict[str, Any], but: str) -> None:
    """Return the state to what `copied` saved, in place; ``saved`` is used up, and the entry ``but`` stays as it is."""
    state.values.copy_(saved["values"])
    for name in [name for name in state.memory if name != but]:
        del state.memory[name]
    state.memory.update(saved["memory"])
    state.scratch.clear()  # the memory from before may be shared with it
    for (name, client), flat in saved["clients"].items():
        if flat is None:
            state.clients.forget(name, client)
        else:
            state.clients.kept[name][client].copy_(flat)


def is_sound(state: GlobalState, saved: dict[str, Any], but: str) -> bool:
    """Check that a merge after `copied` has left finite numbers everywhere.

    Of what is stored for clients only infinities are looked for: NaN stands for what a client has never trained, and the sum
    that overflows is infinite before it is anything else.
    """
    touched = (state.clients.find(name, client) for name, client in saved["clients"])
    if any(bool(buffer.isinf().any()) for flat in touched if flat is not None for buffer in flat.buffers.values()):
        return False
    leaves = _leaves({name: value for name, value in state.memory.items() if name != but})
    return state.values.is_finite() and all(map(is_finite, leaves))


def is_ruined(state: GlobalState) -> bool:
    """Check whether the global model's parameters are not finite, or so large that honest training may not be."""
    for entry in state.submodels.layout(part="trained").entries:
        if entry.name in state.submodels.parameter_names and is_merged(entry.dtype):
            most = min(RUINED, torch.finfo(entry.dtype).max / 10)
            if not bool((state.values[entry.name].abs() <= most).all()):
                return True
    return False


def _copy(value: Any) -> Any:
    """Copy containers and tensors; what else a memory has is never changed in place."""
    match value:
        case Tensor() | FlatTensors():
            return value.clone()
        case dict():
            return {key: _copy(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)([_copy(item) for item in value])
    return value


def _leaves(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in a merge's memory."""
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
