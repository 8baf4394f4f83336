"""Look up sizes of models by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Shape = TypeVar("Shape")


def shape_of(model: str, size: str, sizes: Mapping[str, Shape]) -> Shape:
    """Return the shape of a model by the name of its size.

    Args:
        model: name of the model, for the error.
        size: name of the size.
        sizes: shapes by the name of the size.

    Raises:
        ValueError: the model has no size of that name.
    """
    if size not in sizes:
        raise ValueError(f"{model}: size is '{size}': give one of {', '.join(sizes)}")
    return sizes[size]
