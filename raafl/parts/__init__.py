"""Provide ready-made parts for the five questions, from which algorithms are composed.

`Rated` is the older name of `RateSelect`; configs may use either.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raafl.parts.select.rate_select import Rated, RateSelect
    from raafl.parts.select.windows import RollingWindows, WindowPieces

_HOME = {
    "RateSelect": "raafl.parts.select.rate_select",
    "Rated": "raafl.parts.select.rate_select",
    "RollingWindows": "raafl.parts.select.windows",
    "WindowPieces": "raafl.parts.select.windows",
}
__all__ = ["RateSelect", "Rated", "RollingWindows", "WindowPieces"]


def __getattr__(name: str) -> object:
    """Import a part at its first use, since importing all here would be circular: core imports parts."""
    if name not in _HOME:
        raise AttributeError(f"module 'raafl.parts' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)
