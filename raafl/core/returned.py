"""Check what the hooks of a user's own parts return, so that an error names the hook, not the line of raafl that used the value."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Literal, SupportsFloat, SupportsIndex, Union, get_args, get_origin, get_type_hints
from weakref import WeakSet

from raafl.errors import WrongReturn, briefly

_LOOSE: dict[Any, type] = {float: SupportsFloat, int: SupportsIndex}
"""Types of numbers, and what counts as one: NumPy's numbers and tensors of one element, too."""

_RECORDS = "raafl.core.types"
"""Module of the records that hooks return, whose fields are checked, too."""


_TYPES: dict[type, dict[str, Any]] = {}
"""The types of the fields of such records."""

_CHECKING: WeakSet[Callable[..., Any]] = WeakSet()
"""The functions that check what a hook returns."""


def check_returns(cls: type) -> None:
    """Let each hook that ``cls`` overrides raise `WrongReturn` for a value that is not what raafl's base class promises.

    The outermost base class that has the hook counts, since a ready-made part may promise more than raafl needs.
    """
    for name, value in list(vars(cls).items()):
        if name.startswith("_") and name != "__call__":
            continue
        theirs = [vars(base)[name] for base in cls.__mro__[1:] if name in vars(base) and _is_of_raafl(base)]
        wanted = None if not theirs else _promised(theirs[-1])
        if wanted is None:
            continue
        if isinstance(value, property) and value.fget is not None and isinstance(theirs[-1], property):
            setattr(cls, name, value.getter(_checked(value.fget, f"{cls.__name__}.{name}", *wanted)))
        elif inspect.isfunction(value) and inspect.isfunction(theirs[-1]):
            setattr(cls, name, _checked(value, f"{cls.__name__}.{name}", *wanted))


def _is_of_raafl(base: type) -> bool:
    return base.__module__.startswith("raafl.")


def _promised(hook: Any) -> tuple[Any, str] | None:
    """Return the type that a hook of raafl's returns, and its name; None if nothing is expected, or the type is unknown."""
    function: Any = hook.fget if isinstance(hook, property) else hook
    text = getattr(function, "__annotations__", {}).get("return", "None")
    if text == "None":
        return None
    try:
        # the annotation of the result alone: those of arguments may be imported for type checkers only
        holder = type("Promised", (), {"__annotations__": {"return": text}})
        return get_type_hints(holder, globalns=function.__globals__)["return"], text
    except NameError:
        return None


def _checked(function: Callable[..., Any], name: str, kind: Any, text: str) -> Callable[..., Any]:
    """Return ``function`` with a check of its result; a function that has one, of a class built twice, stays as it is."""
    if function in _CHECKING:
        return function

    call = _drawing(function, name) if name.endswith(".draw") else function

    @functools.wraps(function)
    def checked(*args: Any, **named: Any) -> Any:
        value = call(*args, **named)
        if not _fits(value, kind):
            raise WrongReturn(f"{name} returned {briefly(value)}: let it return `{text}`")
        if type(value).__module__ == _RECORDS:
            _check_fields(name, value)
        return value

    _CHECKING.add(checked)
    return checked


def _check_fields(name: str, record: Any) -> None:
    """Raise `WrongReturn` for a field of a record, such as `Work`, that is not of its type."""
    kind = type(record)
    if kind not in _TYPES:
        _TYPES[kind] = get_type_hints(kind)
    for field in fields(record) if is_dataclass(kind) else ():
        value = getattr(record, field.name)
        if not _fits(value, _TYPES[kind][field.name]):
            what = f"{kind.__name__}(..., {field.name}={briefly(value)})"
            raise WrongReturn(f"{name} returned {what}: let that be `{field.type}`")


def _drawing(draw: Callable[..., list[int]], name: str) -> Callable[..., list[int]]:
    """Return a `Sample.draw` that raises `WrongReturn` for a client that was not idle, or is returned twice.

    The clients that it returns need not be removed from the pool by ``draw`` itself.
    """

    def drawn(self: Any, idle: Any, *args: Any, **named: Any) -> list[int]:
        before = set(idle)
        found = draw(self, idle, *args, **named)
        if not _fits(found, Collection[int]):
            return found  # which is refused for its type
        chosen = [*found]
        if (wrong := sorted(set(chosen) - before)) or len(set(chosen)) < len(chosen):
            which = f"client {wrong[0]}, which is not idle" if wrong else "a client twice"
            raise WrongReturn(f"{name} returned {which}: let it return clients of `idle`, each once")
        for client in chosen:
            idle.discard(client)
        return chosen

    return drawn


def _fits(value: Any, kind: Any) -> bool:
    """Check whether a value is of a type, leniently: ``bool`` is anything but None, numbers may be of any library."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in args)
    if kind is bool:
        return value is not None
    if kind in _LOOSE:
        return isinstance(value, _LOOSE[kind])
    if origin is not None:
        return _contains(value, origin, args)
    return kind is Any or isinstance(value, kind)


def _contains(value: Any, origin: Any, args: tuple[Any, ...]) -> bool:
    """Check a value against a container's type, with its elements where looking at them does not use them up."""
    if origin is Literal:
        return value in args
    if origin is tuple:
        return isinstance(value, tuple | list) and (args[-1] is ... or len(value) == len(args))
    if issubclass(origin, Mapping):
        items = value.items() if isinstance(value, Mapping) else ()
        return isinstance(value, Mapping) and all(_fits(key, args[0]) and _fits(one, args[1]) for key, one in items)
    if issubclass(origin, Collection):
        # an array is as good as a sequence, but lists are added to lists; an iterator would be used up here
        is_one = isinstance(value, origin if origin in (list, frozenset) else Collection)
        return is_one and not isinstance(value, str) and all(_fits(one, args[0]) for one in value)
    return isinstance(value, origin)
