"""Record what a module logs, without a Trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from raafl.errors import BadInput
from raafl.submodel import FlatTensors


class Latest:
    """Latest value of each logged metric, and the mean over the current epoch for those logged with ``on_epoch``."""

    def __init__(self) -> None:
        self._last: dict[str, Any] = {}
        self._epoch: dict[str, tuple[Any, float]] = {}

    def add(self, name: str, value: Any, weight: float, on_step: bool | None, on_epoch: bool | None) -> None:
        """Record one logged value; None of ``on_step`` and ``on_epoch`` is Lightning's default."""
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
        found = {name: _latest(value) for name, value in self._last.items()}
        for name, (value, weight) in self._epoch.items():
            found[name] = _latest(value) if callable(getattr(value, "compute", None)) else _latest(value) / weight
        return found

    def begin_epoch(self) -> None:
        """Reset the means for a new epoch."""
        self._epoch.clear()

    def clear(self) -> None:
        """Delete all recorded values and means."""
        self._last.clear()
        self._epoch.clear()


def _latest(value: Any) -> Tensor:
    return torch.as_tensor(value.compute() if callable(getattr(value, "compute", None)) else value)


class Recorder:
    """Replacement for ``self.log`` of a LightningModule, which computes weighted means of the logged values.

    Sums are in float64, whatever the model's precision. They remain tensors until `means`, so that logging never waits
    for a GPU. A torchmetrics ``Metric`` is stored as an object; at the end it computes one value from all its updates,
    and is reset.

    `weight`: weight of values that are logged without a ``batch_size``: the number of samples in the current batch.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor | float, float]] = {}
        self._how: dict[str, str] = {}  # by name: reduction of a value that is logged several times
        self._metrics: dict[str, Any] = {}
        self.latest = Latest()
        self.weight = 1.0

    def attach(self, module: nn.Module) -> None:
        """Redirect ``log`` and ``log_dict`` of the module, and of LightningModules inside it, to this recorder."""
        attach_log(module, self.log)

    def log(
        self,
        name: str,
        value: Any,
        *,
        reduce_fx: str | Callable[..., Any] = "mean",
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record one logged value; display options such as ``prog_bar`` are ignored.

        `batch_size`: weight of the value; None = use `weight`.

        Raises:
            BadInput: ``reduce_fx`` is none of these, or ``value`` is not a number.
        """
        is_metric = callable(getattr(value, "compute", None))
        value = value if is_metric else logged_value(name, value)
        weight = self.weight if batch_size is None else float(batch_size)
        self.latest.add(name, value, weight, kwargs.get("on_step"), kwargs.get("on_epoch"))
        if is_metric:
            self._metrics[name] = value
            return
        total, count = self._sums.get(name, (None, 0.0))
        how = self._how[name] = reduction_of(reduce_fx)
        if how == "mean":
            self._sums[name] = (value * weight if total is None else total + value * weight, count + weight)
        elif how in _REDUCE:
            self._sums[name] = (value if total is None else _REDUCE[how](total, value), 1.0)
        else:
            raise BadInput(f"self.log of '{name}' has reduce_fx '{how}': use mean, sum, min or max, or log a Metric")

    @property
    def names(self) -> list[str]:
        """Names of all values that were logged."""
        return list(dict.fromkeys((*self._sums, *self._metrics)))

    @property
    def sums(self) -> Mapping[str, tuple[Tensor | float, float]]:
        """Sum and total weight of each number that was logged, by name."""
        return self._sums

    def carry(self, name: str, how: str, into: Tensor, weight: float) -> None:
        """Let the sum of a value go on in ``into``, to which a graph adds the next one, and count that one's weight."""
        total, count = self._sums.get(name, (START[how], 0.0))
        if total is not into:
            into.copy_(total) if isinstance(total, Tensor) else into.fill_(total)
        self._how[name] = how
        self._sums[name] = into, count + weight if how == "mean" else 1.0

    def finish(
        self, more: Mapping[str, Tensor | float], most: int, tensors: FlatTensors
    ) -> tuple[dict[str, float], bool]:
        """Return ``more`` and the means as numbers, and whether ``tensors`` are finite; a GPU is waited for once.

        `most`: number of means to return; see `means`.
        """
        if tensors.device.type != "cuda":
            return {name: float(x) for name, x in more.items()} | self.means(most), tensors.is_finite()
        pending = {name: total for name, (total, _) in self._sums.items() if isinstance(total, Tensor)}
        pending = {name: total for name, total in pending.items() if total.is_cuda and total.numel() == 1}
        losses = [torch.as_tensor(x, device=tensors.device) for x in more.values()]
        # float64 represents each of these numbers exactly
        numbers = [x.detach().double().reshape(()) for x in (*pending.values(), *losses, *tensors.sums())]
        read = iter(torch.stack(numbers).tolist() if numbers else ())
        for name in pending:
            self._sums[name] = next(read), self._sums[name][1]
        metrics = {name: next(read) for name in more}
        return metrics | self.means(most), all(map(math.isfinite, read)) or tensors.is_finite()

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Metrics that were logged, by name."""
        return self._metrics

    def means(self, most: int | None = None) -> dict[str, float]:
        """Return the mean of each logged value since the last call, and the values of metrics; then reset.

        `most`: number of values to return, in the order of logging; None = all.

        Raises:
            BadInput: the value of a metric is not one number.
        """
        try:
            names = self.names[:most]
            sums = [(name, *self._sums[name]) for name in names if name in self._sums]
            means = {name: _number(name, total) / count for name, total, count in sums if count}
            return means | {name: _computed(name, self._metrics[name]) for name in names if name in self._metrics}
        finally:
            self.clear()

    def take_over(self, sums: Mapping[str, tuple[Tensor | float, float]]) -> None:
        """Replace all recorded values by ``sums``, which maps each value's name to its sum and total weight."""
        self.clear()
        self._sums.update(sums)

    def partial(self) -> tuple[list[tuple[str, str]], Tensor]:
        """Return (name, reduction) of each logged number, and their sums and weights as a tensor of shape (2, names)."""
        sums = [(_number(name, self._sums[name][0]), self._sums[name][1]) for name in self._how]
        return list(self._how.items()), torch.tensor(sums, dtype=torch.float64).view(-1, 2).t()

    def combine(self, parts: Tensor) -> None:
        """Replace the recorded values by those of several recorders together.

        `parts`: tensors that `partial` has returned for these recorders, stacked to shape (recorders, 2, names).
        """
        for place, (name, how) in enumerate(self._how.items()):
            totals, counts = parts[:, :, place].unbind(1)
            total = _REDUCE_ALL.get(how, torch.sum)(totals).item()
            self._sums[name] = total, counts.sum().item() if how == "mean" else 1.0

    def clear(self) -> None:
        """Delete all recorded values, and reset the metrics."""
        for metric in self._metrics.values():
            if hasattr(metric, "reset"):
                metric.reset()
        self._sums.clear()
        self._how.clear()
        self._metrics.clear()
        self.weight = 1.0
        self.latest.clear()


POSITIONS = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "reduce_fx",
    "enable_graph",
    "sync_dist",
    "sync_dist_group",
    "add_dataloader_idx",
    "batch_size",
)
"""Arguments of Lightning's ``self.log`` and ``self.log_dict`` after the values, in the order in which they may be given."""


def attach_log(module: nn.Module, log: Callable[..., None]) -> None:
    """Let ``log`` and ``log_dict`` of the module, and of LightningModules inside it, call ``log`` for each value, in place."""
    for part in module.modules():
        if part is module or callable(getattr(type(part), "log_dict", None)):
            part.log = partial(_log_one, log)  # type: ignore[assignment]
            part.log_dict = partial(_log_all, log)  # type: ignore[assignment]


def _log_one(log: Callable[..., None], name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    log(name, value, **dict(zip(POSITIONS, args, strict=False)), **kwargs)


def _log_all(log: Callable[..., None], dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
    for name, value in dictionary.items():
        _log_one(log, name, value, *args, **kwargs)


def reduction_of(reduce_fx: str | Callable[..., Any]) -> str:
    """Return the name of a reduction, which Lightning takes as a name or as a function such as `torch.mean`."""
    return getattr(reduce_fx, "__name__", str(reduce_fx))


def widened(value: Tensor) -> Tensor:
    """Return a detached copy of a loss or metric in float64, for exact sums; on MPS, which lacks it, in float32."""
    if value.dtype is torch.float32 and value.device.type == "cpu":
        return value.detach().double()  # a single call, since this runs in each step
    dtype = torch.float32 if value.device.type == "mps" else torch.float64
    return value.detach().to(torch.promote_types(value.dtype, dtype), copy=True)


def addend(loss: Tensor) -> Tensor | float:
    """Return a loss in float64: as a number where reading it waits for no device, since Python adds faster than torch."""
    is_here = loss.dtype is torch.float32 and loss.device.type == "cpu" and not loss.dim()
    return loss.item() if is_here else widened(loss)


def logged_value(name: str, value: Any) -> Tensor | float:
    """Convert a logged value to a form that can be added up."""
    if isinstance(value, Tensor):
        return widened(value)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise BadInput(f"'{name}' is logged and is {type(value).__name__}: give one number") from None


# neutral elements of the reductions; for sums -0.0, since 0.0 + -0.0 would change the sign
START = {"mean": -0.0, "sum": -0.0, "min": float("inf"), "max": float("-inf")}
_REDUCE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda one, other: one + other,
    "min": lambda one, other: torch.minimum(torch.as_tensor(one), torch.as_tensor(other)),
    "max": lambda one, other: torch.maximum(torch.as_tensor(one), torch.as_tensor(other)),
}


_REDUCE_ALL: dict[str, Callable[[Tensor], Tensor]] = {"min": torch.amin, "max": torch.amax}


def _not_distributed() -> bool:
    return False


def _computed(name: str, metric: Any) -> float:
    # each process measures its own batches alone, even if process groups exist
    if hasattr(metric, "distributed_available_fn"):
        # `sync_on_compute` takes effect only at the metric's next `forward`
        metric.distributed_available_fn = _not_distributed
    return _number(name, metric.compute())


def _number(name: str, value: Any) -> float:
    if isinstance(value, Mapping) or (isinstance(value, Tensor) and value.numel() != 1):
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else "several values"
        raise BadInput(f"'{name}' is logged or returned as a metric and is {what}: give one number")
    return float(value)
