"""Carry the state of a module's torchmetrics metrics from evaluation to evaluation, through checkpoints too.

A metric that the module logs as an object is reset after each evaluation. Any other goes on, as under Lightning's Trainer: a
`MaxMetric` that is updated at the end of each evaluation has the best value of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (type(None), bool, int, float, str)
_OF_ITSELF = ("training", "_computed")


class LivingMetrics:
    """Reader and writer of the states of the metrics in one module."""

    def __init__(self, module: nn.Module) -> None:
        """Remember the metrics' attributes as they are now, before any evaluation."""
        self._metrics = dict(_metrics_in(module))
        self._first = {path: dict(vars(metric)) for path, metric in self._metrics.items()}

    def state(self) -> dict[str, dict[str, Any]]:
        """Return copies of all values that differ from the first ones, by path of the metric and name, tensors on the CPU."""
        return {path: values for path in self._metrics if (values := self._changed(path))}

    def _changed(self, path: str) -> dict[str, Any]:
        metric, first = self._metrics[path], self._first[path]
        is_updated = getattr(metric, "_update_count", 0) > 0
        names = [name for name, value in vars(metric).items() if value is not first.get(name, value)]
        names += [name for name in getattr(metric, "_defaults", {}) if is_updated and name not in names]
        found = {name: getattr(metric, name) for name in names if name not in _OF_ITSELF}
        return {name: _copied(value, torch.device("cpu")) for name, value in found.items() if _is_plain(value)}

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the metrics to the result of `state`; what names no metric or attribute of this module is left out."""
        for path, values in state.items():
            metric = self._metrics.get(path)
            known = {} if metric is None else vars(metric)
            for name, value in values.items():
                if name in known and _is_plain(value) and _is_plain(known[name]):
                    setattr(metric, name, _copied(value, getattr(metric, "device", torch.device("cpu"))))

    def updated(self, counts: Mapping[str, int], logged: Mapping[str, Any]) -> list[str]:
        """Return the paths of metrics that were updated since `counts`, but are not logged as objects."""
        parts = {id(part) for metric in logged.values() if isinstance(metric, nn.Module) for part in metric.modules()}
        now = self.counts()
        return [path for path, metric in self._metrics.items() if now[path] > counts[path] and id(metric) not in parts]

    def counts(self) -> dict[str, int]:
        """Return the number of each metric's updates since its last reset, by path."""
        return {path: int(getattr(metric, "_update_count", 0)) for path, metric in self._metrics.items()}


def _metrics_in(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, part in module.named_modules():
        if callable(getattr(part, "compute", None)) and callable(getattr(part, "reset", None)):
            yield path, part


def _is_plain(value: object) -> bool:
    return type(value) in (*_PLAIN, Tensor) or (type(value) is list and all(map(_is_plain, value)))


def _copied(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    return [_copied(item, device) for item in value] if isinstance(value, list) else deepcopy(value)
