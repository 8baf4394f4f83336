"""Convert plain data, tensors, numpy values and dataclasses to JSON text."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from typing import Any


def to_json(value: object, indent: int | None = None) -> str:
    """Convert plain data, tensors, numpy values or dataclasses to JSON text; NaN and infinity become null."""
    try:
        return _ENCODE(value) if indent is None else json.dumps(value, indent=indent, allow_nan=False, default=plain)
    except ValueError:  # a float that JSON has no word for: rare, so only then is the value walked
        return json.dumps(finite(value), indent=indent, separators=None if indent else (",", ":"), allow_nan=False)


def plain(value: object) -> object:
    """Convert an object to data that JSON can represent."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):  # tensors and numpy arrays; a plain number where they hold one without a dimension
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} {value!r} cannot be written as JSON; convert it to plain data first")


def finite(value: object) -> Any:
    """Replace numbers that JSON cannot represent (NaN, infinity) by None in plain data; return the result."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value if value is None or isinstance(value, str | int) else finite(plain(value))


_ENCODE = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=plain).encode
