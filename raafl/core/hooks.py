"""Where a run can be listened to, whichever runtime drives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raafl.core.coordinator import Coordinator
from raafl.core.types import Event, Settled
from raafl.submodel import FlatTensors


class Hooks:
    """Does nothing at every occasion; override what you need. Called in the runtime's own thread, which must not wait."""

    def on_settled(self, settled: Settled, now: float) -> None:
        """An assignment has met its end: merged, refused, lost or unused."""

    def on_measured(self, version: int, now: float, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of ``version`` as they are to be recorded, of those that were measured."""
        return metrics

    def on_values(self, version: int, metrics: Mapping[str, float], values: FlatTensors) -> None:
        """The global model of ``version`` has been measured: these are its metrics and, until this returns, its values.

        Called in the thread that has measured, one call at a time.
        """

    def on_evaluate(self, version: int, now: float, metrics: dict[str, float]) -> None:
        """The global model of ``version`` has been measured, and its metrics recorded."""

    def on_event(self, event: Event, coordinator: Coordinator, now: float) -> None:
        """An event has been seen to, to its end."""

    def stop_asked(self) -> str | None:
        """Return the reason for which the run is to end now, or None; asked after each event."""
        return None

    def checkpoint_due(self) -> bool:
        """Check whether a checkpoint is wanted now, whatever the coordinator says; asked after each event."""
        return False

    def on_checkpoint(self, coordinator: Coordinator, version: int, clock: dict[str, Any]) -> None:
        """The state is to be saved; it may change as soon as this returns.

        ``clock`` is the runtime's own state; what is to be found there when the run is resumed may be added.
        """


class Watcher(Hooks):
    """Hooks that a whole run is shown to, and that may find that it has failed.

    Attributes:
        failure: why, as the reason that ends the run; None = it has not.
        error: what was raised then, here or elsewhere in the run.
    """

    failure: str | None = None
    error: Exception | None = None

    def begin(self, run: Any, saved: Any = None) -> None:
        """Look at the run, a `raafl.runtime.run.Run`, before anything is measured or written; ``saved`` is what it resumes."""

    def end(self, summary: dict[str, Any]) -> None:
        """Take note of the summary, which is not written yet; it may not be changed."""


class Several(Hooks):
    """Passes each occasion on to several, in order."""

    def __init__(self, *hooks: Hooks) -> None:
        """Pass on to ``hooks``."""
        self._hooks = hooks

    def on_settled(self, settled: Settled, now: float) -> None:
        """Pass it on."""
        for hooks in self._hooks:
            hooks.on_settled(settled, now)

    def on_measured(self, version: int, now: float, metrics: dict[str, float]) -> dict[str, float]:
        """Let each return them in turn."""
        for hooks in self._hooks:
            metrics = hooks.on_measured(version, now, metrics)
        return metrics

    def on_values(self, version: int, metrics: Mapping[str, float], values: FlatTensors) -> None:
        """Pass it on."""
        for hooks in self._hooks:
            hooks.on_values(version, metrics, values)

    def on_evaluate(self, version: int, now: float, metrics: dict[str, float]) -> None:
        """Pass it on."""
        for hooks in self._hooks:
            hooks.on_evaluate(version, now, metrics)

    def on_event(self, event: Event, coordinator: Coordinator, now: float) -> None:
        """Pass it on."""
        for hooks in self._hooks:
            hooks.on_event(event, coordinator, now)

    def stop_asked(self) -> str | None:
        """Return the first reason that one of them has."""
        return next((reason for hooks in self._hooks if (reason := hooks.stop_asked()) is not None), None)

    def checkpoint_due(self) -> bool:
        """Check whether any of them wants one."""
        return any(hooks.checkpoint_due() for hooks in self._hooks)

    def on_checkpoint(self, coordinator: Coordinator, version: int, clock: dict[str, Any]) -> None:
        """Pass it on."""
        for hooks in self._hooks:
            hooks.on_checkpoint(coordinator, version, clock)
