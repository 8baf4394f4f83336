"""Keep the latest value of everything that a module logs, like a Trainer's `callback_metrics`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Latest:
    """Latest value of each logged metric, and the mean over the current epoch for those logged with ``on_epoch``."""

    def __init__(self) -> None:
        self._last: dict[str, Any] = {}
        self._epoch: dict[str, tuple[Any, float]] = {}

    def add(self, name: str, value: Any, weight: float, on_step: bool | None, on_epoch: bool | None) -> None:
        """Record one logged value.

        `on_step`: argument ``on_step`` of Lightning's `log`; None = Lightning's default.
        `on_epoch`: argument ``on_epoch`` of Lightning's `log`; None = Lightning's default.
        """
        if not on_epoch:
            self._last[name] = value
            return
        if on_step:
            self._last[f"{name}_step"] = value
        if not callable(getattr(value, "compute", None)):
            total, count = self._epoch.get(name, (0.0, 0.0))
            value, weight = total + value * weight, count + weight
        self._epoch[name] = value, weight
        if on_step:
            self._epoch[f"{name}_epoch"] = value, weight

    def metrics(self) -> dict[str, Tensor]:
        """Return the latest values, and the means over the current epoch, by name."""
        found = {name: _computed(value) for name, value in self._last.items()}
        for name, (value, weight) in self._epoch.items():
            found[name] = _computed(value) if callable(getattr(value, "compute", None)) else _computed(value) / weight
        return found

    def begin_epoch(self) -> None:
        """Reset the means for a new epoch."""
        self._epoch.clear()

    def clear(self) -> None:
        """Delete all recorded values and means."""
        self._last.clear()
        self._epoch.clear()


def _computed(value: Any) -> Tensor:
    return torch.as_tensor(value.compute() if callable(getattr(value, "compute", None)) else value)
