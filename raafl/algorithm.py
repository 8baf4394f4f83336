# mypy: implicit-reexport
# ruff: noqa: F401
"""All that a method of your own is written with, in one place; docs/add-an-algorithm.md shows how.

A method is a function that returns an `Algorithm`: a frozen record of five parts, each a class here or a subclass of one.

| part | base | ready to use |
| --- | --- | --- |
| which clients work now | `Sample` | `Sample(cohort, concurrency)` |
| which submodel, and how much work | `Select` | `Full`, `Fragments`, `RateSelect`, `RollingWindows`, `WindowPieces` |
| what a client does with it | `Local`, `Hook` | `Local()` trains the user's own step |
| when updates are merged | `Trigger` | `EachArrival`, `Buffered`, `AllReported`, `MinRatio` |
| how they are merged | `Merge` | `Mean`, `Deltas` |

Everything is imported when it is first asked for, so that importing this module costs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raafl.core.algorithm import Algorithm, Merge, Select, SelectContext, Trigger, TriggerContext
    from raafl.core.local import Hook, Local, Task, Traits
    from raafl.core.sample import Sample
    from raafl.core.state import GlobalState, MergeMemory
    from raafl.core.types import Assignment, ClientInfo, Update, Work, derive_seed
    from raafl.errors import BadInput, at_least, fraction, one_of, positive
    from raafl.parts.merge.deltas import Deltas
    from raafl.parts.merge.mean import Kind, Mean, Staleness
    from raafl.parts.select.rate_select import Rates, RateSelect
    from raafl.parts.select.submodels import Fragments, Full, Ranking
    from raafl.parts.select.units import at_random, leading, rolling
    from raafl.parts.select.windows import RollingWindows, WindowPieces
    from raafl.parts.trigger import AllReported, Buffered, EachArrival, MinRatio
    from raafl.submodel import FULL, Cost, FlatTensors, Layout, Spec, Submodels

_HOME = {
    **dict.fromkeys(
        ("Algorithm", "Merge", "Select", "SelectContext", "Trigger", "TriggerContext"), "raafl.core.algorithm"
    ),
    **dict.fromkeys(("Hook", "Local", "Task", "Traits"), "raafl.core.local"),
    "MergeMemory": "raafl.core.state",
    "Sample": "raafl.core.sample",
    "GlobalState": "raafl.core.state",
    **dict.fromkeys(("Assignment", "ClientInfo", "Update", "Work", "derive_seed"), "raafl.core.types"),
    **dict.fromkeys(("BadInput", "at_least", "fraction", "one_of", "positive"), "raafl.errors"),
    "Deltas": "raafl.parts.merge.deltas",
    **dict.fromkeys(("Kind", "Mean", "Staleness"), "raafl.parts.merge.mean"),
    "Ranking": "raafl.parts.select.submodels",
    **dict.fromkeys(("RateSelect", "Rates"), "raafl.parts.select.rate_select"),
    **dict.fromkeys(("Fragments", "Full"), "raafl.parts.select.submodels"),
    **dict.fromkeys(("at_random", "leading", "rolling"), "raafl.parts.select.units"),
    "WindowPieces": "raafl.parts.select.windows",
    "RollingWindows": "raafl.parts.select.windows",
    **dict.fromkeys(("AllReported", "Buffered", "EachArrival", "MinRatio"), "raafl.parts.trigger"),
    **dict.fromkeys(("FULL", "Cost", "FlatTensors", "Layout", "Spec", "Submodels"), "raafl.submodel"),
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    """Import the module of a public name at its first use, so that importing this one stays fast."""
    if name not in _HOME:
        raise AttributeError(f"module 'raafl.algorithm' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
