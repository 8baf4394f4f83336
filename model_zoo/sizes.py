"""Look up sizes of models by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Shape = TypeVar("Shape")


def shape_of(model: str, size: str, sizes: Mapping[str, Shape]) -> Shape:
    """Look up a model's shape by the name of its size.

    Args:
        model: its name, for the message.
        size: name of the size.
        sizes: shapes by name.

    Raises:
        ValueError: there is no such size of ``model``.
    """
    if size not in sizes:
        raise ValueError(f"{model}: size is '{size}': give one of {', '.join(sizes)}")
    return sizes[size]
