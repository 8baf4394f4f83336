"""Plain LightningModules to train with raafl, or without it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model_zoo.cnn import CNN as CNN
    from model_zoo.mlp import MLP as MLP

_HOMES = {"CNN": "cnn", "MLP": "mlp"}


def __getattr__(name: str) -> Any:
    """Import a model when it is first asked for: a rank that trains an MLP need not import the others."""
    if name not in _HOMES:
        raise AttributeError(f"module 'model_zoo' has no model {name!r}; it has {', '.join(sorted(_HOMES))}")
    return getattr(importlib.import_module(f"model_zoo.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Return the names of all models."""
    return [*globals(), *_HOMES]
