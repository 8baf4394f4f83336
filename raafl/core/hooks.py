"""Observe a run: the occasions at which either runtime calls, on the thread that drives the coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raafl.core.coordinator import Coordinator
from raafl.core.types import Event, Settled
from raafl.submodel import FlatTensors


class RunHooks:
    """An observer of a run; every method does nothing until it is overridden.

    Methods run on the runtime's own thread and must not wait.

    Attributes:
        failure: set to a reason, it ends the run as failed; None = the run goes on.
        error: the exception behind a failure, of this observer or of the run.
    """

    failure: str | None = None
    error: Exception | None = None

    def begin(self, run: Any, saved: object = None) -> None:
        """Prepare for a run; called before its first evaluation and before anything is written.

        Args:
            run: a `raafl.runtime.run.Run`, a layer above this one.
            saved: the `raafl.runtime.lifecycle.resume.SavedRun` that it resumes; None = a new run.
        """

    def on_settled(self, settled: Settled, now: float) -> None:
        """Record the end of an assignment: merged, refused, lost or unused, at ``now`` seconds of the run's clock."""

    def on_measured(self, version: int, now: float, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics to record for ``version``, given those that were measured.

        Args:
            version: that was measured.
            now: seconds on the run's clock.
            metrics: as measured.
        """
        return metrics

    def on_values(self, version: int, metrics: Mapping[str, float], values: FlatTensors) -> None:
        """Use the values of a version that was just measured.

        Called one at a time on the thread that measured, which is not the coordinator's on the wall clock.

        Args:
            version: of the global model.
            metrics: measured on it.
            values: the global model; valid until this call returns.
        """

    def on_evaluate(self, version: int, now: float, metrics: dict[str, float]) -> None:
        """Record the metrics of ``version``, which are in the run folder by now.

        Args:
            version: that was measured.
            now: seconds on the run's clock.
            metrics: as recorded.
        """

    def on_event(self, event: Event, coordinator: Coordinator, now: float) -> None:
        """Observe the coordinator after it has handled an event.

        Args:
            event: that was handled.
            coordinator: read only.
            now: seconds on the run's clock.
        """

    def stop_asked(self) -> str | None:
        """Return the reason to end the run now, or None; asked after each event."""
        return None

    def checkpoint_due(self) -> bool:
        """Check whether this observer wants a checkpoint now, beside the regular ones; asked after each event."""
        return False

    def on_checkpoint(self, coordinator: Coordinator, version: int, clock: dict[str, Any]) -> None:
        """Save the run's state, which may change as soon as this returns.

        Args:
            coordinator: whose state to save.
            version: of the global model.
            clock: the runtime's own state; an observer may add entries, which a resumed run finds again.
        """

    def end(self, summary: dict[str, Any]) -> None:
        """Read the summary before it is written; it must not be changed."""


class HookList(RunHooks):
    """Observers that are called one after the other, in their order."""

    def __init__(self, *hooks: RunHooks) -> None:
        """Call ``hooks``."""
        self._hooks = hooks

    def on_settled(self, settled: Settled, now: float) -> None:
        """Call each observer; see `RunHooks.on_settled`."""
        for hooks in self._hooks:
            hooks.on_settled(settled, now)

    def on_measured(self, version: int, now: float, metrics: dict[str, float]) -> dict[str, float]:
        """Give each observer the metrics that the one before it returned; see `RunHooks.on_measured`."""
        for hooks in self._hooks:
            metrics = hooks.on_measured(version, now, metrics)
        return metrics

    def on_values(self, version: int, metrics: Mapping[str, float], values: FlatTensors) -> None:
        """Call each observer; see `RunHooks.on_values`."""
        for hooks in self._hooks:
            hooks.on_values(version, metrics, values)

    def on_evaluate(self, version: int, now: float, metrics: dict[str, float]) -> None:
        """Call each observer; see `RunHooks.on_evaluate`."""
        for hooks in self._hooks:
            hooks.on_evaluate(version, now, metrics)

    def on_event(self, event: Event, coordinator: Coordinator, now: float) -> None:
        """Call each observer; see `RunHooks.on_event`."""
        for hooks in self._hooks:
            hooks.on_event(event, coordinator, now)

    def stop_asked(self) -> str | None:
        """Return the first observer's reason to end the run, or None."""
        return next((reason for hooks in self._hooks if (reason := hooks.stop_asked()) is not None), None)

    def checkpoint_due(self) -> bool:
        """Check whether any observer wants a checkpoint."""
        return any(hooks.checkpoint_due() for hooks in self._hooks)

    def on_checkpoint(self, coordinator: Coordinator, version: int, clock: dict[str, Any]) -> None:
        """Call each observer; see `RunHooks.on_checkpoint`."""
        for hooks in self._hooks:
            hooks.on_checkpoint(coordinator, version, clock)
