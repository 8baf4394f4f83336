"""Catching what a module logs, without a Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Recorder:
    """Stands in for ``self.log`` of a LightningModule: keeps weighted means of what is logged.

    Values stay tensors until `means` is called, so that logging never waits for a device.
    """

    def __init__(self) -> None:
        """Start empty, weighing every value by 1."""
        self._sums: dict[str, tuple[Tensor | float, float]] = {}
        self.weight = 1.0

    def attach(self, module: nn.Module) -> None:
        """Take over ``module.log`` and ``module.log_dict``."""
        module.log = self.log  # type: ignore[assignment]
        module.log_dict = self.log_dict  # type: ignore[assignment]

    def log(self, name: str, value: Any, *args: Any, batch_size: int | None = None, **kwargs: Any) -> None:
        """Add one value; display options (``prog_bar`` and the like) are ignored."""
        if isinstance(value, Tensor):
            value = value.detach()
        elif hasattr(value, "compute"):  # a torchmetrics.Metric
            value = value.compute()
        weight = self.weight if batch_size is None else float(batch_size)
        total, count = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (total + value * weight, count + weight)

    def log_dict(self, values: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Add several values."""
        for name, value in values.items():
            self.log(name, value, **kwargs)

    def means(self) -> dict[str, float]:
        """Return the weighted means since the last call, and start again."""
        means = {name: float(total) / count for name, (total, count) in self._sums.items()}
        self._sums.clear()
        return means


def batch_length(batch: Any) -> int:
    """Return the number of samples in ``batch``: the length of the first tensor found in it."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 1
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, list | tuple):
        for item in batch:
            if isinstance(item, Tensor | Mapping | list | tuple):
                return batch_length(item)
    return 1


def to_device(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with its tensors on ``device``."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return type(batch)(**{k: to_device(v, device) for k, v in batch.items()})
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(item, device) for item in batch)
    return batch
