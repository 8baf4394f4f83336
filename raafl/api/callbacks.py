"""Observe, extend or end a run with callbacks, as in Lightning; they are called on the server only."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Callable as _Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from raafl.api.modules import in_eval_mode
from raafl.config.targets import direction
from raafl.core.coordinator import Coordinator
from raafl.core.hooks import RunHooks
from raafl.core.types import Event, Joined, Lost, Settled
from raafl.errors import USER_ERRORS, BadInput, RunFailed, at_least, briefly, nearest
from raafl.runfolder.schema import METRIC_COLUMNS
from raafl.submodel.cut.layers import copy_structure
from raafl.units import quantity

if TYPE_CHECKING:
    from torch import nn

    from raafl.config.experiment import Experiment
    from raafl.runtime.run import Run


class Callback:
    """Base class of callbacks. Its methods do nothing; override those that you need.

    The run waits while a method works, so keep methods short in a run on the wall clock. An exception in a method ends
    the run as failed, with its summary written.
    """

    def on_start(self, run: RunView) -> None:
        """Called at the start, before the first evaluation: everything is built, but the run folder does not exist yet.

        It is also called when a run is resumed.
        """

    def on_client_joined(self, run: RunView, client: int) -> None:
        """Called when a client connects, for the first time or again; ``client`` is its id, 1 to N."""

    def on_client_lost(self, run: RunView, client: int, reason: str) -> None:
        """Called when a client has left the run.

        Args:
            run: the run as it is now.
            client: id of the client, 1 to N.
            reason: reason for leaving: unavailable, disconnected, replaced by its own newer connection, or unfit for
                work.
        """

    def on_update_merged(self, run: RunView, update: MergedUpdate) -> None:
        """Called when an update was merged into the global model."""

    def on_version(self, run: RunView, version: int) -> None:
        """Called when a merge has made a new version of the global model, after `on_update_merged` for each update in it."""

    def on_evaluate(self, run: RunView, metrics: dict[str, float]) -> Mapping[str, float] | None:
        """Called when the global model was evaluated, first at version 0.

        Metrics that the method returns, or adds to ``metrics``, are recorded like raafl's own: they appear in
        metrics.csv and in loggers.
        """
        return None

    def on_end(self, run: RunView, summary: Mapping[str, Any]) -> None:
        """Called when the run has ended; ``summary["finished"]`` is the reason. Not called if there is no summary."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the callback for checkpoints: numbers, text, tensors, and lists and dicts of these."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from the result of `state_dict`; called before `on_start` when a run is resumed."""


def callbacks_of(given: Any) -> list[Callback]:
    """Convert one callback, several, or None to a list of callbacks.

    Raises:
        BadInput: an item is not a callback, or has a method that is never called.
    """
    if given is None:
        return []
    several = list(given) if isinstance(given, Iterable) and not isinstance(given, (Callback, type, str)) else [given]
    for one in several:
        if isinstance(one, Callback):
            _check_names(one)
            continue
        if isinstance(one, type) and issubclass(one, Callback):
            raise BadInput(f"callbacks has {briefly(one)}: give an object, {one.__name__}()")
        name = type(one).__name__
        own = f", such as raafl.{name}" if name in _SHIPPED else ""
        raise BadInput(
            f"callbacks has {briefly(one)}: give objects of raafl.Callback{own}; callbacks of Lightning's Trainer "
            "do not work here"
        )
    return several


def _check_names(callback: Callback) -> None:
    """Raise `BadInput` if a callback has a method ``on_...`` that neither raafl nor another base class calls."""
    others = [base for base in type(callback).__mro__ if not issubclass(base, Callback)]
    for name in dir(callback):
        is_unknown = name.startswith("on_") and name not in OCCASIONS and callable(getattr(callback, name))
        if is_unknown and not any(hasattr(base, name) for base in others):
            kind = type(callback).__name__
            raise BadInput(
                f"callbacks: {kind} has the method {name}, which raafl never calls: {nearest(name, OCCASIONS)}; name one that "
                "only your own code calls without on_"
            )


_SHIPPED = ("EarlyStopping", "LambdaCallback", "Printing")
OCCASIONS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class LambdaCallback(Callback):
    """Callback made from functions: ``LambdaCallback(on_version=lambda run, version: ...)``."""

    def __init__(self, **functions: _Callable[..., Any]) -> None:
        """Make a callback of functions; each keyword is the callback method that the function implements.

        Raises:
            BadInput: there is no such method, or a function is not callable.
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
    """Callback that ends a run when a metric has not improved over several evaluations.

    Attributes:
        best: best value of the metric so far; None = none yet.
        num_bad: number of evaluations since the best one.
    """

    def __init__(
        self,
        metric: str = "accuracy",
        patience: int = 5,
        mode: Literal["max", "min"] | None = None,
        min_delta: float = 0.0,
    ) -> None:
        """Monitor ``metric``.

        Args:
            metric: one from `validation_step` or an earlier callback.
            patience: evaluations without improvement after which the run ends.
            mode: max or min; None = as the metric's name says, such as min for val_loss or rmse and max for accuracy.
            min_delta: least improvement that counts.

        Raises:
            BadInput: a value is out of range.
        """
        at_least("EarlyStopping: patience", patience, 1)
        if mode not in ("max", "min", None):
            raise BadInput(f"EarlyStopping: mode is '{mode}': give max or min")
        if not 0 <= min_delta < math.inf:
            raise BadInput(f"EarlyStopping: min_delta is {min_delta}: give 0 or more")
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self.mode = mode or direction(metric)
        self.best: float | None = None
        self.num_bad = 0

    def on_start(self, run: RunView) -> None:
        """Forget the best value of the metric, in case the callback was used in an earlier run."""
        if not run.resumed:
            self.best, self.num_bad = None, 0

    def on_evaluate(self, run: RunView, metrics: dict[str, float]) -> None:
        """Compare the metric with its best value; end the run if it has not improved for too long."""
        if self.metric not in metrics:
            raise BadInput(f"EarlyStopping: there is no metric '{self.metric}': {nearest(self.metric, metrics)}")
        if self.mode is None:
            raise BadInput(
                f"EarlyStopping: mode is None, and the name '{self.metric}' does not say which values are better: give max or min"
            )
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
        """Return, for a checkpoint, the best value of the metric and the number of evaluations since then."""
        return {"best": self.best, "num_bad": self.num_bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best value of the metric and the number of evaluations since then."""
        self.best, self.num_bad = state["best"], state["num_bad"]

    def __repr__(self) -> str:
        return (
            f"EarlyStopping(metric={self.metric!r}, patience={self.patience}, mode={self.mode!r}, "
            f"min_delta={self.min_delta:g})"
        )


class Printing(Callback):
    """Callback that prints a line for each evaluation and for the end of the run, for notebooks and logs.

    Use it with `progress="quiet"`.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        """Store the stream to print to; None = whatever sys.stdout is when something is printed."""
        self._file = file

    def on_evaluate(self, run: RunView, metrics: dict[str, float]) -> None:
        """Print the metrics of an evaluation."""
        shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self._line(f"{run.time_s:9.1f} s  version {run.version}  {quantity(run.num_updates, 'update')}  {shown}")

    def on_end(self, run: RunView, summary: Mapping[str, Any]) -> None:
        """Print the reason why the run ended."""
        self._line(f"finished: {summary['finished']}, {quantity(summary['updates_merged'], 'update')}, {run.folder}")

    def _line(self, text: str) -> None:
        file = self._file or sys.stdout
        file.write(f"{text}\n")
        file.flush()

    def __repr__(self) -> str:
        return "Printing()"


@dataclass(frozen=True, slots=True)
class MergedUpdate:
    """A merged update, as callbacks see it."""

    client: int  # id of the client, 1 to N
    version: int  # version of the global model that the merge made
    staleness: int  # number of versions that were made after the task began
    spec: str  # submodel that was trained, in words
    num_samples: int  # number of training samples of the client
    num_steps: int  # number of optimizer steps of the task
    train_s: float  # seconds from the assignment until the update arrived
    bytes_down: int  # bytes sent to the client
    bytes_up: int  # bytes received from the client
    # what the client measured: loss, values logged by training_step, and test/... on its own test data
    metrics: Mapping[str, float]


class RunView:
    """A run, as presented to callbacks.

    `experiment`: settings of the run; do not change them.
    `version`: version of the global model; in `on_evaluate` that of the evaluated model, which may be an earlier one.
    `time_s`: seconds since the run began, virtual or real; in `on_evaluate` the time of the evaluated version.
    `metrics`: metrics of the last evaluation, with those that callbacks added.
    `resumed`: whether the run continues an earlier one.
    `should_stop`: whether somebody has requested the end of the run.
    """

    def __init__(self, run: Run, unwrap: Callable[[nn.Module], nn.Module], ask: Callable[[str], None]) -> None:
        """Store the run; ``unwrap`` takes raafl's wrapper off the user's module, and ``ask`` requests the end of the run."""
        self._run, self._unwrap, self._ask = run, unwrap, ask
        self.experiment: Experiment = run.parts.experiment
        self.version, self.time_s = run.parts.coordinator.state.version, 0.0
        self.metrics: dict[str, float] = {}
        self.resumed = self.should_stop = False

    @property
    def folder(self) -> Path:
        """Folder of the run; None until the first evaluation is recorded."""
        return self._run.folder

    @property
    def num_updates(self) -> int:
        """Number of updates merged so far."""
        return self._run.parts.coordinator.merged

    @property
    def num_clients(self) -> int:
        """Number of connected clients."""
        return len(self._run.parts.coordinator.roster.clients)

    def module(self) -> nn.Module:
        """Return a copy of the model with the present global values, in eval mode."""
        return in_eval_mode(self._unwrap(current_module(self._run, anew=True)))

    def stop(self, reason: str = "asked to") -> None:
        """End the run early, after the present event, and record ``reason`` in its summary."""
        self._ask(reason)

    def note(self, text: str) -> None:
        """Print a line of text in the display of the run's progress."""
        self._run.progress.note(text)


def current_module(run: Run, *, anew: bool) -> nn.Module:
    """Return a copy of a run's module with the present values of the global model."""
    parts = run.parts
    module = copy_structure(parts.module, {})
    for part in module.modules():
        # the user now owns this copy, so remove raafl's stand-in for the Trainer
        if "_trainer" in vars(part):
            part.__dict__["_trainer"] = None
    with run.norms.filled(parts.coordinator.state.values, anew=anew):
        parts.submodels.load_(module, parts.coordinator.state.values)
    return module


class CallbackHooks(RunHooks):
    """Observer of a run that calls the user's callbacks in the given order; an exception in a callback ends the run."""

    def __init__(self, callbacks: Sequence[Callback], unwrap: Callable[[nn.Module], nn.Module]) -> None:
        """Store the callbacks; ``unwrap`` takes raafl's wrapper off the user's module, for `RunView.module`."""
        self._callbacks, self.unwrap = list(callbacks), unwrap
        self.run: Run | None = None
        self.error: BaseException | None = None
        self._broken: Callback | None = None
        self._view: RunView | None = None
        self._stop: str | None = None
        self._version = 0  # latest version for which `on_version` was called
        self._there: dict[int, int] = {}  # incarnation by id of the clients that callbacks believe to be connected

    def stop(self, reason: str) -> None:
        """Request the end of the run; only the first ``reason`` is used. Callable from any thread."""
        self._stop = self._stop or f"stopped: {' '.join(reason.split()) or 'asked to'}"
        if self._view is not None:
            self._view.should_stop = True

    # ---- called by the run ----

    def begin(self, run: Run, saved: Any = None) -> None:
        """Start the callbacks; if the run is resumed, they first get their state from the checkpoint ``saved``."""
        self.run = run
        view = self._view = RunView(run, self.unwrap, self.stop)
        if saved is not None:
            view.resumed, view.metrics = True, dict(saved.section["record"]["metrics"])
            self._version = view.version = saved.section["coordinator"]["version"]
            view.time_s = saved.section["clock"]["now"]
            there = saved.section["clock"].get("callbacks", {})
            self._there = {int(client): life for client, life in there.get("clients", {}).items()}
            for callback, state in zip(self._callbacks, there.get("states", []), strict=False):
                if state is not None:
                    self._call(callback, "load_state_dict", state)
        for callback in self._callbacks:
            self._call(callback, "on_start", view)
        self._raise()

    def on_measured(self, version: int, now: float, metrics: dict[str, float]) -> dict[str, float]:
        """Pass the metrics of an evaluated version to the callbacks; return them together with those that callbacks add."""
        view = self._seen()
        self._announce(version, now)
        earlier, view.version, view.time_s = (view.version, view.time_s), version, now
        for callback in self._callbacks:
            mine = dict(metrics)
            returned = self._call(callback, "on_evaluate", view, mine)
            if returned is not None and not isinstance(returned, Mapping):
                wrong = BadInput(f"returns {returned!r:.60}: return metrics by name, or nothing")
                self._fail(callback, "on_evaluate", wrong)
                returned = None
            metrics = {**metrics, **self._numbers(callback, {**mine, **(returned or {})}, metrics)}
            view.metrics = metrics
        if version > 0:
            view.version, view.time_s = earlier
        if version == 0:
            self._raise()
        return metrics

    def on_settled(self, settled: Settled, now: float) -> None:
        """Call the callbacks' ``on_update_merged`` if the update was merged; do nothing if it was refused or lost."""
        update, assignment = settled.update, settled.assignment
        if settled.outcome != "merged" or update is None or assignment is None or not self._callbacks:
            return
        self._seen().time_s = now
        merged = MergedUpdate(
            settled.client,
            settled.version,
            settled.staleness,
            str(assignment.spec),
            update.num_samples,
            update.num_steps,
            update.train_s,
            update.bytes_down,
            update.bytes_up,
            dict(update.metrics),
        )
        self._tell("on_update_merged", merged)

    def on_event(self, event: Event, coordinator: Coordinator, now: float) -> None:
        """Call the callbacks if the event has made a client join or leave, or has made a new version of the model."""
        self._seen().time_s = now
        if isinstance(event, Joined):
            client = event.client.id
            if client in self._there:
                self._gone(client, "replaced")
            if coordinator.roster.find(client) is not None:
                self._there[client] = event.client.incarnation
                self._tell("on_client_joined", client)
        elif isinstance(event, Lost) and coordinator.roster.find(event.client) is None:
            self._gone(event.client, event.reason)
        # a client that was dismissed or suspended leaves without an event
        if len(self._there) > len(coordinator.roster.clients):
            for client in sorted(client for client in self._there if coordinator.roster.find(client) is None):
                self._gone(client, "unfit")
        self._announce(coordinator.state.version, now)

    def stop_asked(self) -> str | None:
        """Return the reason for which a callback or the user wants the run to end; None = no reason."""
        return self.failure or self._stop

    def on_checkpoint(self, coordinator: Coordinator, version: int, clock: dict[str, Any]) -> None:
        """Add the state of the callbacks to a checkpoint that is being written."""
        # copy: another thread writes the checkpoint while callbacks go on
        states = [copy.deepcopy(self._call(callback, "state_dict", even_so=True)) for callback in self._callbacks]
        clock["callbacks"] = {"states": states, "clients": {str(c): life for c, life in self._there.items()}}

    def end(self, summary: dict[str, Any]) -> None:
        """Pass the run's summary to the callbacks."""
        self._announce(summary["versions"], summary["time_s"])
        self._seen().metrics = dict(summary["final"])
        for callback in self._callbacks:
            if callback is not self._broken:
                self._call(callback, "on_end", self._seen(), dict(summary), even_so=True)

    # ---- call the user's callbacks ----

    def _seen(self) -> RunView:
        assert self._view is not None, "the run has not started"
        return self._view

    def _announce(self, version: int, now: float) -> None:
        """Call `on_version` for each version that has been made since the last call."""
        view = self._seen()
        while self._version < version:
            self._version += 1
            view.version, view.time_s = self._version, now
            self._tell("on_version", self._version)

    def _gone(self, client: int, reason: str) -> None:
        if self._there.pop(client, None) is not None:
            self._tell("on_client_lost", client, reason)

    def _tell(self, occasion: str, *what: object) -> None:
        for callback in self._callbacks:
            self._call(callback, occasion, self._seen(), *what)

    def _call(self, callback: Callback, occasion: str, *what: object, even_so: bool = False) -> object:
        """Call a callback's method ``occasion``; once any callback has failed, only calls with ``even_so`` are made."""
        if self.failure is not None and not even_so:
            return None
        try:
            return getattr(callback, occasion)(*what)
        except KeyboardInterrupt:  # same as a Ctrl-C at any other time
            self._stop = "interrupted"
        except USER_ERRORS as error:
            self._fail(callback, occasion, error)
        return None

    def _fail(self, callback: Callback, occasion: str, error: BaseException) -> None:
        if self.failure is None:
            kind = "" if isinstance(error, BadInput) else f"{type(error).__name__}: "
            said = " ".join(str(error).split())[:400]
            self.failure = f"failed: callback {type(callback).__name__}.{occasion}: {kind}{said}"
            self.error, self._broken = error, callback

    def _raise(self) -> None:
        """Raise `RunFailed` if a callback has failed before the run started."""
        if self.failure is not None:
            raise RunFailed(self.failure.removeprefix("failed: ")) from self.error

    def _numbers(self, callback: Callback, metrics: Mapping[str, Any], known: Mapping[str, float]) -> dict[str, float]:
        """Convert the metrics that a callback returns to floats; fail the run for a value that is no number, or a name in use."""
        found = {}
        for name, value in metrics.items():
            if name in known and value is known[name]:
                continue
            try:
                if name in METRIC_COLUMNS or not isinstance(name, str):
                    raise BadInput(f"it returns a metric '{name}', a name that raafl uses already: choose another name")
                found[name] = float(value)
            except BadInput as error:
                self._fail(callback, "on_evaluate", error)
            except (TypeError, ValueError):
                self._fail(callback, "on_evaluate", BadInput(f"gives '{name}' as {value!r:.60}: give a number"))
        return found
