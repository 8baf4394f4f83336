"""Observe a run: the occasions at which either runtime calls, on the thread that drives the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from raafl.core.coordinator import Coordinator
from raafl.core.state import GlobalState
from raafl.core.types import Event, Settled
from raafl.submodel import FlatTensors


class RunHooks:
    """Observer of a run. Its methods do nothing until a subclass overrides them.

    The thread that drives the run calls them, so they must return quickly.
    """

    failure: str | None = None  # reason for which this observer ends the run as failed; None = it goes on
    error: BaseException | None = None  # exception that made this observer or the run fail

    def begin(self, run: Any, saved: object = None) -> None:
        """Prepare for a run; called before its first evaluation and before anything is written.

        `saved`: the `raafl.runtime.lifecycle.resume.SavedRun` that the run resumes; None = a new run.
        """

    def opened(self) -> None:
        """Prepare what needs the run folder, which exists from now on; nothing has been trained yet."""

    def start(self) -> None:
        """Observe that the run's clock starts."""

    def on_settled(self, settled: Settled, now: float) -> None:
        """Observe the end of an assignment (merged, refused, lost or unused) at ``now`` seconds of the run's clock."""

    def on_measured(self, version: int, now: float, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics to record for ``version``; an observer may add to the measured ones or change them."""
        return metrics

    def on_values(self, version: int, metrics: Mapping[str, float], values: FlatTensors) -> None:
        """Receive the values of a version of the global model that was just measured.

        Calls never overlap. They come on the thread that measured, which in a wall-clock run is not the coordinator's
        thread.
        """

    def on_evaluate(self, version: int, now: float, metrics: dict[str, float]) -> None:
        """Observe the metrics of ``version`` after they were written to the run folder."""

    def figures(self, state: GlobalState) -> dict[str, float]:
        """Return numbers about a new version of the global model, which become columns of metrics.csv."""
        return {}

    def on_event(self, event: Event, coordinator: Coordinator, now: float) -> None:
        """Observe an event after the coordinator has handled it."""

    def on_merged(self, version: int, now: float, seconds: float) -> None:
        """Observe that a merge has made ``version``; called before `on_settled` of the updates in it."""

    def stop_asked(self) -> str | None:
        """Return a reason to end the run now, or None; called in each turn of the runtime's loop."""
        return None

    def checkpoint_due(self) -> bool:
        """Check whether to save a checkpoint now, in addition to the regular ones; called after each event."""
        return False

    def on_checkpoint(self, coordinator: Coordinator, version: int, clock: dict[str, Any]) -> None:
        """Save the run's state, or copy it for saving later: the state may change as soon as this method returns."""

    def saved(self) -> None:
        """Observe that a checkpoint was written; called on the thread that writes, unlike all other methods."""

    def end(self, summary: dict[str, Any]) -> None:
        """Observe the run's summary, or add an entry of this observer; a `failure` that it finds now still counts."""

    def publish(self, summary: dict[str, Any]) -> None:
        """Send the results elsewhere, once the run's outcome, ``finished``, is decided; add what came of it."""

    def written(self) -> None:
        """Observe that the summary, the last file of the run folder, was written."""

    def close(self) -> None:
        """Release files, ports and threads; called whether or not the run failed, or has begun at all."""


class HookList(RunHooks):
    """Observer that passes each call on to a list of observers, in order. Answers of several become one."""

    def __init__(self, *hooks: RunHooks) -> None:
        """Create a hook that calls all ``hooks`` in order."""
        self._hooks = hooks

    def on_measured(self, version: int, now: float, metrics: dict[str, float]) -> dict[str, float]:
        """Pass the metrics through all observers, each of which may change them; see `RunHooks.on_measured`."""
        for hooks in self._hooks:
            metrics = hooks.on_measured(version, now, metrics)
        return metrics

    def figures(self, state: GlobalState) -> dict[str, float]:
        """Return the numbers of all observers; see `RunHooks.figures`."""
        return {name: number for hooks in self._hooks for name, number in hooks.figures(state).items()}

    def stop_asked(self) -> str | None:
        """Return the first reason to end the run that an observer gives, or None."""
        return next((reason for hooks in self._hooks if (reason := hooks.stop_asked()) is not None), None)

    def checkpoint_due(self) -> bool:
        """Check whether any observer wants a checkpoint now."""
        return any(hooks.checkpoint_due() for hooks in self._hooks)

    def close(self) -> None:
        """Close all observers, even if one of them raises; see `RunHooks.close`."""
        with ExitStack() as ending:
            for hooks in reversed(self._hooks):
                ending.callback(hooks.close)


def _to_each(name: str) -> Callable[..., None]:
    def call(self: HookList, *args: Any, **kwargs: Any) -> None:
        for hooks in self._hooks:
            getattr(hooks, name)(*args, **kwargs)

    return call


# a hook that is added to `RunHooks` is passed on, too, without a line here
for _name, _value in vars(RunHooks).items():
    if callable(_value) and not _name.startswith("_") and _name not in vars(HookList):
        setattr(HookList, _name, _to_each(_name))
