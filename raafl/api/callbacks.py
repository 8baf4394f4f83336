"""Callbacks in Lightning's manner: look on as a run goes, add metrics, end it. They are called on the server alone."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable as _Callable
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TextIO

from raafl.config.options import Target
from raafl.errors import BadInput, at_least, briefly, nearest

if TYPE_CHECKING:
    from raafl.api.run_view import MergedUpdate, RunView


class Callback:
    """Does nothing at every occasion; override what you need.

    Called in the thread that coordinates, which waits meanwhile: in a wall-clock run keep it short. Whatever a callback
    raises ends the run, as failed, with its summary written.
    """

    def on_start(self, run: RunView) -> None:
        """Everything is built; nothing has been measured and there is no folder yet. Also when a run is resumed."""

    def on_client_joined(self, run: RunView, client: int) -> None:
        """Client 1..N is there, for the first time or again."""

    def on_client_lost(self, run: RunView, client: int, reason: str) -> None:
        """A client has gone: unavailable, disconnected, replaced by a new connection of its own, or unfit for any work."""

    def on_update_merged(self, run: RunView, update: MergedUpdate) -> None:
        """An update is part of the global model."""

    def on_version(self, run: RunView, version: int) -> None:
        """The global model has a new version; the updates merged into it have been told of."""

    def on_evaluate(self, run: RunView, metrics: dict[str, float]) -> Mapping[str, float] | None:
        """The global model was measured, at version 0 for the first time.

        What is set in ``metrics``, or returned, is recorded with them: in metrics.csv, with loggers, for targets.
        """
        return None

    def on_end(self, run: RunView, summary: Mapping[str, Any]) -> None:
        """The run has ended, for the reason in ``summary["finished"]``; not called where an error leaves no summary."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint is to keep of this callback: numbers, texts, tensors, and lists and dicts of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned; called before `on_start` of a run that is resumed."""


def callbacks_of(given: Any) -> list[Callback]:
    """Return the callbacks that were given: one, several, or None.

    Raises:
        BadInput: something is none.
    """
    if given is None:
        return []
    several = list(given) if isinstance(given, Iterable) and not isinstance(given, (Callback, type, str)) else [given]
    for one in several:
        if isinstance(one, Callback):
            continue
        if isinstance(one, type) and issubclass(one, Callback):
            raise BadInput(f"callbacks has {briefly(one)}: give an object of it, {one.__name__}()")
        name = type(one).__name__
        own = f", such as raafl.{name}" if name in _SHIPPED else ""
        raise BadInput(f"callbacks has {briefly(one)}: give objects of raafl.Callback{own}; a Trainer's are none")
    return several


_SHIPPED = ("EarlyStopping", "LambdaCallback", "Printing")
OCCASIONS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class LambdaCallback(Callback):
    """Calls functions: ``LambdaCallback(on_version=lambda run, version: ...)``."""

    def __init__(self, **functions: _Callable[..., Any]) -> None:
        """Take functions by the name of the method that each stands for.

        Raises:
            BadInput: there is no such method, or a function cannot be called.
        """
        for name, function in functions.items():
            if name not in OCCASIONS:
                raise BadInput(f"LambdaCallback has no '{name}': {nearest(name, OCCASIONS)}")
            if not callable(function):
                raise BadInput(f"LambdaCallback: {name} is {function!r:.60}: give a function")
            setattr(self, name, function)
        self._names = tuple(functions)

    def __repr__(self) -> str:
        return f"LambdaCallback({', '.join(self._names)})"


class EarlyStopping(Callback):
    """Ends a run when a metric has not become better in so many evaluations in a row.

    Attributes:
        best: the best value so far; None = none has been seen.
        num_bad: evaluations since then.
    """

    def __init__(
        self,
        metric: str = "accuracy",
        patience: int = 5,
        mode: Literal["max", "min"] | None = None,
        min_delta: float = 0.0,
    ) -> None:
        """Watch ``metric``.

        Args:
            metric: one that `validation_step` or a callback before this one gives.
            patience: evaluations without a better value after which the run ends.
            mode: whether more or less is better; None = less of a loss, perplexity or error, more of anything else.
            min_delta: by how much a better value is better, at least.

        Raises:
            BadInput: a value is out of range.
        """
        at_least("EarlyStopping: patience", patience, 1)
        if mode not in ("max", "min", None):
            raise BadInput(f"EarlyStopping: mode is '{mode}': give max or min")
        if not 0 <= min_delta < math.inf:
            raise BadInput(f"EarlyStopping: min_delta is {min_delta}: give 0 or more")
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self.mode = mode or ("min" if Target(metric, 0.0).at_most else "max")
        self.best: float | None = None
        self.num_bad = 0

    def on_start(self, run: RunView) -> None:
        """Forget what an earlier run has shown."""
        if not run.resumed:
            self.best, self.num_bad = None, 0

    def on_evaluate(self, run: RunView, metrics: dict[str, float]) -> None:
        """Compare, and count."""
        if self.metric not in metrics:
            raise BadInput(f"EarlyStopping: there is no metric '{self.metric}': {nearest(self.metric, metrics)}")
        value = metrics[self.metric]
        if not math.isfinite(value):
            run.stop(f"{self.metric} is {value}")
            return
        if self._is_better(value):
            self.best, self.num_bad = value, 0
            return
        self.num_bad += 1
        if self.num_bad >= self.patience:
            run.stop(f"no {self.metric} better than {self.best:.6g} in {self.num_bad} evaluations")

    def _is_better(self, value: float) -> bool:
        if self.best is None:
            return True
        gain = value - self.best if self.mode == "max" else self.best - value
        return gain > self.min_delta

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the count."""
        return {"best": self.best, "num_bad": self.num_bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""
        self.best, self.num_bad = state["best"], state["num_bad"]

    def __repr__(self) -> str:
        return (
            f"EarlyStopping(metric={self.metric!r}, patience={self.patience}, mode={self.mode!r}, "
            f"min_delta={self.min_delta:g})"
        )


class Printing(Callback):
    """Writes a line for each evaluation, and for the end; for `progress="quiet"`, in a notebook or a log."""

    def __init__(self, file: TextIO | None = None) -> None:
        """Write to ``file``; None = standard output, as it is at the time."""
        self._file = file

    def on_evaluate(self, run: RunView, metrics: dict[str, float]) -> None:
        """Write the metrics."""
        shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self._line(f"{run.time_s:9.1f} s  version {run.version}  {run.num_updates} updates  {shown}")

    def on_end(self, run: RunView, summary: Mapping[str, Any]) -> None:
        """Write why it has ended."""
        self._line(f"finished: {summary['finished']}, {summary['updates_merged']} updates, {run.folder}")

    def _line(self, text: str) -> None:
        file = self._file or sys.stdout
        file.write(f"{text}\n")
        file.flush()

    def __repr__(self) -> str:
        return "Printing()"
