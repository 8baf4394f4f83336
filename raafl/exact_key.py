"""Make keys of values that Python does not hash, such as arrays, tensors and records with them, for caches and comparisons."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN = frozenset({bool, int, str, bytes, range, type(None), torch.dtype, torch.device, torch.Size})
_ARRAYS = (np.ndarray, np.memmap, Tensor, torch.nn.Parameter)


def exact_key(value: object) -> Hashable:
    """Return a key that two values share only if they are of one type and equal in all digits.

    The `repr` of an array or tensor leaves out digits, and most entries of a long one; that of a record leaves out attributes
    that are no fields. Of other objects, and of tensors on a GPU, only the same one has the same key, which keeps it alive.
    """
    try:
        return _key(value)
    except RecursionError:  # a record that contains itself
        return _Same(value)


class _Same:
    """Key of one object: equal to other keys of this object alone, whose address is not used again while the key exists."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def _key(value: object) -> Hashable:
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind in (float, complex):
        return kind, repr(value)  # tells 0.0 from -0.0, and NaN equals itself
    if isinstance(value, dict):
        return kind, tuple((_key(name), _key(item)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return kind, tuple(map(_key, value))
    if isinstance(value, slice):
        return kind, _key((value.start, value.stop, value.step))
    if isinstance(value, set | frozenset):
        return kind, frozenset(map(_key, value))
    if isinstance(value, np.generic | np.ndarray | Tensor):
        digest = digest_of(value) if kind in _ARRAYS or isinstance(value, np.generic) else None
        return _Same(value) if digest is None else (kind, value.dtype, value.shape, digest)
    if is_dataclass(value) and not isinstance(value, type):
        named = {one.name: getattr(value, one.name) for one in fields(value) if hasattr(value, one.name)}
        return kind, _key(named | getattr(value, "__dict__", {}))
    return _Same(value)


def digest_of(values: np.generic | np.ndarray[Any, Any] | Tensor) -> str | None:
    """Return a digest of the bytes of an array or tensor; None where its values are objects, not on the CPU or not dense."""
    if isinstance(values, Tensor):
        if values.device.type != "cpu" or values.layout is not torch.strided or values.is_quantized:
            return None
        plain = values.detach().resolve_conj().resolve_neg().contiguous()
        values = plain.reshape(-1).view(torch.uint8).numpy()
    return None if values.dtype.hasobject else hashlib.sha256(values.tobytes()).hexdigest()
