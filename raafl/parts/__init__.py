"""Provide ready-made parts for the five questions, from which algorithms are composed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raafl.parts.select.rated import Rated
    from raafl.parts.select.window_pieces import WindowPieces
    from raafl.parts.select.windows import RollingWindows

_HOME = {
    "Rated": "raafl.parts.select.rated",
    "RollingWindows": "raafl.parts.select.windows",
    "WindowPieces": "raafl.parts.select.window_pieces",
}

__all__ = ["Rated", "RollingWindows", "WindowPieces"]


def __getattr__(name: str) -> Any:
    """Import what a config names when it is first asked for: parts and core are made of each other."""
    if name not in _HOME:
        raise AttributeError(f"module 'raafl.parts' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)
