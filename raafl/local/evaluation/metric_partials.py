"""Record what one process logs in its share of the test batches, for another to add up in order, to the bits of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from raafl.local.evaluation.record import Recorder, logged_value


class NotMergeable(Exception):
    """Raised if several processes cannot share an evaluation; the message says why."""


class PartialRecorder(Recorder):
    """Recorder for one process's share of an evaluation; it stores every number, so that one process can sum all in order."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: list[tuple[str, Tensor | float, str, float]] = []

    def log(
        self,
        name: str,
        value: object,
        *args: object,
        reduce_fx: str | Callable[..., Any] = "mean",
        batch_size: int | None = None,
        **kwargs: object,
    ) -> None:
        """Record one logged value; see `Recorder.log`."""
        super().log(name, value, reduce_fx=reduce_fx, batch_size=batch_size)
        if not callable(getattr(value, "compute", None)):
            how = getattr(reduce_fx, "__name__", str(reduce_fx))
            weight = self.weight if batch_size is None else float(batch_size)
            self._numbers.append((name, logged_value(name, value), how, weight))

    def partials(self) -> dict[str, Any]:
        """Return all recorded numbers, and the states of metrics, as plain data.

        Raises:
            NotMergeable: the state of a metric is not a sum of integers, so that the order of additions would matter.
        """
        states = {name: _states(name, metric) for name, metric in self._metrics.items()}
        return {
            "numbers": [[name, _plain(value), how, weight] for name, value, how, weight in self._numbers],
            "states": states,
        }


def add(recorder: Recorder, partials: dict[str, Any]) -> None:
    """Log everything in ``recorder`` that a `PartialRecorder` has recorded."""
    for name, text, how, weight in partials["numbers"]:
        recorder.log(name, float(text), reduce_fx=how, batch_size=weight)
    for name, states in partials["states"].items():
        metric = recorder.metrics[name]
        for state, numbers in states.items():
            own = getattr(metric, state)
            setattr(metric, state, own + torch.tensor(numbers, dtype=own.dtype, device=own.device))


def _states(name: str, metric: object) -> dict[str, Any]:
    states = {state: getattr(metric, state) for state in getattr(metric, "_defaults", {})}
    reductions = getattr(metric, "_reductions", {})
    for state, value in states.items():
        is_sum = getattr(reductions.get(state), "__name__", "") == "dim_zero_sum"
        if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex() or not is_sum:
            raise NotMergeable(
                f"the metric '{name}' has a state '{state}' that is not a sum of integers, so several processes cannot share "
                "the evaluation: use a metric that counts"
            )
    if not states:
        raise NotMergeable(
            f"the metric '{name}' is not a torchmetrics Metric with registered states (add_state), so several processes "
            "cannot share the evaluation: give it such states, or log numbers"
        )
    return {state: value.tolist() for state, value in states.items()}


def _plain(value: Tensor | float) -> str:
    """Return a number as text, which JSON has of infinities and NaN too."""
    if isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex()):
        raise NotMergeable("a logged value is not a single number: log one number")
    return repr(float(value))
