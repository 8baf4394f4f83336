"""Preserve attributes set on a layer of a small module through copying and pickling.

A layer whose class defines `__getstate__` or `__setstate__`, as einops layers do, is rebuilt when copied and would lose corrected
sizes. Such a layer gets a subclass of its class that adds them to its state.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from torch import nn

_NAMES = "_raafl_carried"
"""Attribute of a layer that lists the names of its carried attributes."""


def set_carried(layer: nn.Module, name: str, value: object) -> None:
    """Set an attribute of a layer such that copies of the layer (deepcopy, pickle) keep it."""
    attributes = layer.__dict__
    attributes[name] = value
    if not isinstance(layer, _Carrying):
        if not _is_made_anew(type(layer)):
            return
        layer.__class__ = _carrying(type(layer))  # type: ignore[arg-type]
    attributes[_NAMES] = tuple(dict.fromkeys((*attributes.get(_NAMES, ()), name)))


def _is_made_anew(kind: type[nn.Module]) -> bool:
    """Check whether copies of a class may lack attributes of the instance; torch's own layers keep them all."""
    names = ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__deepcopy__")
    owners = (next((base for base in kind.__mro__ if name in vars(base)), object) for name in names)
    return not all(owner is object or owner.__module__.startswith("torch.nn.") for owner in owners)


class _Carrying(nn.Module):
    """Adds the carried attributes to the state of a layer's own class."""

    _kind: type[nn.Module]

    def __reduce_ex__(self, protocol: object) -> Any:
        carried = {name: self.__dict__[name] for name in self.__dict__[_NAMES]}
        return _empty, (self._kind,), (super().__getstate__(), carried)  # type: ignore[no-untyped-call]

    def __setstate__(self, state: Any) -> None:
        own, carried = state
        super().__setstate__(own)  # type: ignore[no-untyped-call]
        self.__dict__.update(carried, **{_NAMES: tuple(carried)})


def _deep_copy(self: Any, memo: dict[int, Any]) -> object:
    made = memo[id(self)] = super(_Carrying, self).__deepcopy__(memo)
    made.__class__ = type(self)
    carried = {name: self.__dict__[name] for name in self.__dict__[_NAMES]}
    made.__dict__.update(copy.deepcopy(carried, memo), **{_NAMES: tuple(carried)})
    return made


@cache
def _carrying(kind: type[nn.Module]) -> Any:
    own: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_kind": kind}
    if hasattr(kind, "__deepcopy__"):
        own["__deepcopy__"] = _deep_copy
    return type(kind.__name__, (_Carrying, kind), own)


def _empty(kind: type[nn.Module]) -> object:
    carrying = _carrying(kind)  # type: ignore[arg-type]
    return carrying.__new__(carrying)
