"""Shared answers to the five questions, from which the algorithms are put together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raafl.parts.rated import Rated

__all__ = ["Rated"]


def __getattr__(name: str) -> Any:
    """Import what a config names when it is first asked for: parts and core are made of each other."""
    if name not in __all__:
        raise AttributeError(f"module 'raafl.parts' has no attribute '{name}'")
    from raafl.parts.rated import Rated

    return Rated
