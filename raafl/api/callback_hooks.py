"""Call the user's callbacks during a run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raafl.api.callbacks import Callback, MergedUpdate, RunView
from raafl.core.coordinator import Coordinator
from raafl.core.hooks import RunHooks
from raafl.core.types import Event, Joined, Lost, Settled
from raafl.errors import USER_ERRORS, BadInput, RunFailed
from raafl.runfolder.schema import METRIC_COLUMNS

if TYPE_CHECKING:
    from torch import nn

    from raafl.runtime.run import Run


class CallbackHooks(RunHooks):
    """Observer of a run that calls the user's callbacks in the given order; an exception in a callback ends the run."""

    def __init__(self, callbacks: Sequence[Callback], unwrap: Callable[[nn.Module], nn.Module]) -> None:
        """Store the callbacks; ``unwrap`` returns the user's module from raafl's wrapper, for `RunView.module`."""
        self._callbacks, self.unwrap = list(callbacks), unwrap
        self.run: Run | None = None
        self.error: BaseException | None = None
        self._broken: Callback | None = None
        self._view: RunView | None = None
        self._stop: str | None = None
        self._version = 0  # last version reported to callbacks
        self._there: dict[int, int] = {}  # connected clients as reported to callbacks, id -> incarnation

    def stop(self, reason: str) -> None:
        """Request the end of the run; only the first ``reason`` is used. Callable from any thread."""
        self._stop = self._stop or f"stopped: {' '.join(reason.split()) or 'asked to'}"
        if self._view is not None:
            self._view.should_stop = True

    # ---- events from the run ----

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
        # some clients were dismissed or suspended without an event
        if len(self._there) > len(coordinator.roster.clients):
            for client in sorted(client for client in self._there if coordinator.roster.find(client) is None):
                self._gone(client, "unfit")
        self._announce(coordinator.state.version, now)

    def stop_asked(self) -> str | None:
        """Return the reason for which a callback or the user wants the run to end; None = no reason."""
        return self.failure or self._stop

    def on_checkpoint(self, coordinator: Coordinator, version: int, clock: dict[str, Any]) -> None:
        """Add the state of the callbacks to a checkpoint that is being written."""
        # copied, since a thread writes the checkpoint while callbacks continue
        states = [copy.deepcopy(self._call(callback, "state_dict", even_so=True)) for callback in self._callbacks]
        clock["callbacks"] = {"states": states, "clients": {str(c): life for c, life in self._there.items()}}

    def end(self, summary: dict[str, Any]) -> None:
        """Pass the run's summary to the callbacks."""
        self._announce(summary["versions"], summary["time_s"])
        self._seen().metrics = dict(summary["final"])
        for callback in self._callbacks:
            if callback is not self._broken:
                self._call(callback, "on_end", self._seen(), dict(summary), even_so=True)

    # ---- calls of callbacks ----

    def _seen(self) -> RunView:
        assert self._view is not None, "the run has not started"
        return self._view

    def _announce(self, version: int, now: float) -> None:
        """Report every version up to this one."""
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
        """Call a callback's method ``occasion``; after a failure of any callback only if ``even_so`` is set."""
        if self.failure is not None and not even_so:
            return None
        try:
            return getattr(callback, occasion)(*what)
        except KeyboardInterrupt:  # handled like a Ctrl-C at any other time
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
        """Raise a callback's exception, if there is one; for failures before the run starts."""
        if self.failure is not None:
            raise RunFailed(self.failure.removeprefix("failed: ")) from self.error

    def _numbers(self, callback: Callback, metrics: Mapping[str, Any], known: Mapping[str, float]) -> dict[str, float]:
        """Convert a callback's metrics to floats; the run fails if a value is not a number or a name is already used."""
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
