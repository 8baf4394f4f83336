"""Evaluate batches of the test set for another process, as partial sums that it adds in the order of batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from raafl.local.evaluate import Evaluator, LivingMetrics, begin, step
from raafl.local.record import Recorder, logged_value, reduction_of
from raafl.module_hooks import overrides
from raafl.rng import generators, same_generators


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
        *,
        reduce_fx: str | Callable[..., Any] = "mean",
        batch_size: int | None = None,
        **kwargs: object,
    ) -> None:
        """Record one logged value; see `Recorder.log`."""
        super().log(name, value, reduce_fx=reduce_fx, batch_size=batch_size)
        if not callable(getattr(value, "compute", None)):
            how = reduction_of(reduce_fx)
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
    """Format a number as text, since JSON has no infinity and NaN."""
    if isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex()):
        raise NotMergeable("a logged value is not a single number: log one number")
    return repr(float(value))


def may_share(evaluator: Evaluator) -> bool:
    """Check whether other processes may evaluate some of the batches.

    They may not if an evaluation has drawn random numbers or changed a buffer, or the module has a hook that runs before
    the first or after the last batch.
    """
    ends = ("start", "epoch_start", "epoch_end", "end")
    return not (evaluator.is_alone or any(overrides(evaluator.module, f"on_validation_{end}") for end in ends))


def partials(evaluator: Evaluator, start: int, stop: int) -> dict[str, Any]:
    """Evaluate some batches for another process; return partial sums, as plain data, for that process to `add`.

    Raises:
        NotMergeable: the result of a batch may depend on the batches before it.
    """
    recorder, drawn = PartialRecorder(), generators(evaluator.device)
    recorder.attach(evaluator.module)
    begin(evaluator.module, recorder)
    counts, versions = _counts(evaluator.metrics), evaluator.buffer_versions()
    try:
        step(evaluator.module, recorder, evaluator.numbered(start, stop), evaluator.device)
        if not same_generators(drawn, generators(evaluator.device)):
            raise NotMergeable(
                "validation_step draws random numbers: compute metrics without them, so that several processes can "
                "share the evaluation"
            )
        if versions != evaluator.buffer_versions():
            raise NotMergeable(
                "validation_step changes a buffer: leave buffers unchanged, so that several processes can share the "
                "evaluation"
            )
        if changed := evaluator.state.changed(metrics=False):
            raise NotMergeable(
                f"validation_step changes the attribute {changed[0]}: leave it unchanged, so that several processes can share "
                "the evaluation"
            )
        if updated := _updated(evaluator.metrics, counts, recorder.metrics):
            raise NotMergeable(
                f"validation_step updates the metric {updated[0]} and does not log it as an object: log the metric itself, so "
                "that several processes can share the evaluation"
            )
        return recorder.partials()
    finally:
        recorder.clear()


def _updated(living: LivingMetrics, counts: Mapping[str, int], logged: Mapping[str, Any]) -> list[str]:
    """Return the paths of metrics that were updated since ``counts`` was taken, and that are not logged as objects."""
    parts = {id(part) for metric in logged.values() if isinstance(metric, nn.Module) for part in metric.modules()}
    now = _counts(living)
    return [path for path, metric in living.metrics.items() if now[path] > counts[path] and id(metric) not in parts]


def _counts(living: LivingMetrics) -> dict[str, int]:
    """Map the path of each metric to its number of updates since its last reset."""
    return {path: int(getattr(metric, "_update_count", 0)) for path, metric in living.metrics.items()}
