"""Keep attributes of a Trainer, which all copies of its model share, apart for each copy and each task."""

from __future__ import annotations

import copy
import inspect
import random
import sys
import types
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raafl.errors import BadInput
from raafl.lean_import import import_lightning

import_lightning()
from torchmetrics import Metric  # noqa: E402

RESTORED = ("model", "model_wrapped", "state", "log", "_prepare_inputs", "optimizer", "lr_scheduler", "_gen_kwargs")
"""Attributes that are restored after a step."""
_CACHES = (
    "_signature_columns",
    "_created_lr_scheduler",
    "current_gradient_accumulation_steps",
    "_total_train_tokens",
    "_metrics",
)
"""Attributes that transformers and TRL set or empty, on which no step depends."""
_LEFT = frozenset((*RESTORED, *_CACHES))
_LIBRARIES = ("transformers", "trl", "accelerate", "datasets", "peft", "tokenizers", "torch")
_NO_DATA = (type, types.ModuleType, types.FunctionType, types.MethodType, nn.Module)
_SMALL_BYTES, _MANY = 1 << 24, 10_000
"""Size and number of values up to which an attribute is taken for the state of a loss; copies share what is larger.

A process has about ten copies at once, however many clients it trains: one for each module that it keeps built."""


@contextmanager
def restored_attributes(owner: Any, *names: str) -> Iterator[None]:
    """Let attributes of an object be set in the ``with`` block; afterwards it has those that were set on it before."""
    before = {name: vars(owner)[name] for name in names if name in vars(owner)}
    try:
        yield
    finally:
        for name in names:
            vars(owner).pop(name, None)
        vars(owner).update(before)


@contextmanager
def lent_attributes(trainer: Any, values: dict[str, Any]) -> Iterator[None]:
    """Set attributes of a Trainer in the ``with`` block; afterwards move those that the block has set to ``values``."""
    attributes = vars(trainer)
    before = dict(attributes)
    attributes.update(values)
    given = dict(attributes)
    try:
        yield
    finally:
        for name, value in attributes.items():
            if (name not in given or value is not given[name]) and name not in _LEFT:
                values[name] = value
        for name in values:
            attributes.pop(name, None)
            if name in before:
                attributes[name] = before[name]


def state_of(trainer: Any) -> dict[str, Any]:
    """Return copies of the attributes that a loss may change in place: small containers, tensors, and records of these."""
    given, found = _given(trainer) | _LEFT, {}
    for name, value in vars(trainer).items():
        changeable: dict[int, int] = {}
        if name not in given and _holds_data(value, changeable) and changeable and _is_small(changeable):
            found[name] = value
    return copy.deepcopy(found)  # at once, so that what two attributes share is one object in the copies, too


def _is_small(changeable: dict[int, int]) -> bool:
    return sum(changeable.values()) <= _SMALL_BYTES


def _given(trainer: Any) -> set[str]:
    """Return the names of the arguments of the libraries' constructors, such as data sets; a loss's object may have state."""
    kinds = [kind for kind in type(trainer).__mro__ if _is_of_library(kind) and "__init__" in vars(kind)]
    return {name for kind in kinds for name in inspect.signature(vars(kind)["__init__"]).parameters} - {
        "compute_loss_func"
    }


def _holds_data(value: Any, seen: dict[int, int]) -> bool:
    """Check whether a value is data throughout, of few parts; ``seen`` gets the ids and bytes of those that change in place."""
    if value is None or isinstance(value, str | bytes | int | float | complex) or id(value) in seen:
        return True
    if isinstance(value, tuple | frozenset):
        return all(_holds_data(item, seen) for item in value)
    seen[id(value)] = 0
    if isinstance(value, Tensor | np.ndarray):
        seen[id(value)] = value.nbytes
        return bool(getattr(value, "is_leaf", True))  # others have no copies
    if isinstance(value, torch.Generator | random.Random | np.random.Generator | bytearray | Metric):
        return True
    parts: list[Any] = []
    if isinstance(value, dict):
        parts = [*value, *value.values()]
    elif isinstance(value, list | set | deque):
        parts = list(value)
    elif _is_of_library(type(value)) or not hasattr(value, "__dict__") or isinstance(value, _NO_DATA):
        return False
    if hasattr(value, "__dict__"):
        parts += vars(value).values()
    return max(len(parts), len(seen)) < _MANY and all(_holds_data(part, seen) for part in parts)


def _is_of_library(kind: type) -> bool:
    package = kind.__module__.partition(".")[0]
    return kind is not types.SimpleNamespace and (package in _LIBRARIES or package in sys.stdlib_module_names)


def shared_of(trainer: Any) -> tuple[str, ...]:
    """Return the names of the attributes that all copies share and no step may change.

    They are modules of the user's own, such as a teacher, and tensors that are too large to be copied.
    """
    given = _given(trainer) | _LEFT
    return tuple(name for name, value in vars(trainer).items() if name not in given and _is_shared(value))


def _is_shared(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return not isinstance(value, Metric)
    changeable: dict[int, int] = {}
    return bool(_tensors_of(value)) and _holds_data(value, changeable) and not _is_small(changeable)


@contextmanager
def unchanged(trainer: Any, names: tuple[str, ...]) -> Iterator[None]:
    """Raise `BadInput` if the ``with`` block changes a tensor that a Trainer has under ``names``."""
    before = [_versions(getattr(trainer, name)) for name in names]
    yield
    for name, versions in zip(names, before, strict=True):
        now = _versions(getattr(trainer, name))
        if len(now) != len(versions) or any(map(_differs, versions, now)):
            remedy = "keep what changes in buffers of the model"
            if isinstance(getattr(trainer, name), nn.Module):
                remedy = f"put it into eval mode if it only computes, or {remedy}"
            else:
                remedy = f"keep it below {_SMALL_BYTES >> 20} MiB, or {remedy}"
            raise BadInput(
                f"{type(trainer).__name__}.{name} changes in a step, so it would carry over from client to client: {remedy}"
            )


def _tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a module, or of a tensor or a container of tensors, without what lies deeper."""
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    items = [value] if isinstance(value, Tensor) else value.values() if isinstance(value, dict) else value
    if not isinstance(items, list | tuple | deque) and not isinstance(value, dict):
        return []
    return [item for item in items if isinstance(item, Tensor)]


def _versions(value: Any) -> list[tuple[Tensor, int]]:
    return [(tensor, tensor._version) for tensor in _tensors_of(value)]


def _differs(before: tuple[Tensor, int], now: tuple[Tensor, int]) -> bool:
    """Check whether a tensor was changed, or replaced by one of other values; `Module.to` replaces buffers that it moves."""
    (tensor, version), (other, later) = before, now
    if other is tensor:
        return later != version
    return (other.device, other.dtype) == (tensor.device, tensor.dtype) and not torch.equal(other, tensor)
