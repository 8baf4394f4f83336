"""Check Python values against the declared types of settings, before the settings compute with them."""

from __future__ import annotations

import numbers
import types
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Literal, Union, get_args, get_origin

from raafl.errors import BadInput, briefly


def check_types(values: Mapping[str, Any], hints: Mapping[str, Any], section: str = "") -> None:
    """Raise one `BadInput` with a line for each value that is not of its declared type."""
    from raafl.config.messages import describe_type

    lines = []
    for name, value in values.items():
        if name in hints and not fits(value, hints[name]):
            words = " or ".join(dict.fromkeys(describe_type(hints[name])))
            lines.append(f"{section}{'.' if section else ''}{name} is {briefly(value)}: give {words}")
    if lines:
        raise BadInput("\n".join(lines))


def fits(value: object, hint: Any) -> bool:
    """Check whether a value is of a declared type.

    A whole number fits where a number is wanted, a list fits a tuple, and a mapping of fields a dataclass. Any text fits
    a `Literal` of texts: which one it is, the settings check themselves. A type that is unknown here fits all values.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner or (isinstance(value, str) and any(isinstance(one, str) for one in inner))
    if hint in (None, type(None)):
        return value is None
    if hint in (int, float):
        kind = numbers.Integral if hint is int else numbers.Real  # numpy's numbers are registered with these classes
        return isinstance(value, kind) and not isinstance(value, bool)
    if hint in (bool, str):
        return isinstance(value, hint)
    if origin in (list, tuple, Sequence):
        return isinstance(value, (list, tuple)) and _all_fit(value, origin, inner)
    if origin in (dict, Mapping) or (isinstance(hint, type) and is_dataclass(hint)):
        return isinstance(value, Mapping) or (isinstance(hint, type) and isinstance(value, hint))
    return True


def _all_fit(items: Sequence[object], origin: object, inner: Sequence[Any]) -> bool:
    if origin is not tuple or inner[-1] is Ellipsis:
        return all(fits(item, inner[0]) for item in items)
    return len(items) == len(inner) and all(map(fits, items, inner))
