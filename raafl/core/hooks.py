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
        error: exception that caused the failure of this observer or of the run.
    """

    failure: str | None = None
    error: Exception | None = None

    def begin(self, run: Any, saved: object = None) -> None:
        """Prepare for a run; called before its first evaluation and before anything is written.

        Args:
            run: a `raafl.runtime.run.Run`; untyped, since this package may not import it.
            saved: the `raafl.runtime.lifecycle.resume.SavedRun` that the run resumes; None = a new run.
        """

    def on_settled(self, settled: Settled, now: float) -> None:
        """Record the end of an assignment: merged, refused, lost or unused, at ``now`` seconds of the run's clock."""

    def on_measured(self, version: int, now: float, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics to record for ``version``, given the measured ones.

        Args:
            version: global version that was measured.
            now: time in seconds of the run's clock.
            metrics: measured metrics by name.
        """
        return metrics

    def on_values(self, version: int, metrics: Mapping[str, float], values: FlatTensors) -> None:
        """Use the values of the global model of a version that was just measured.

        Calls come one at a time, on the thread that measured; in a wall-clock run that is not the coordinator's thread.

        Args:
            version: global version that was measured.
            metrics: metrics of that version by name.
            values: the global model's values; valid until this call returns.
        """

    def on_evaluate(self, version: int, now: float, metrics: dict[str, float]) -> None:
        """Observe the metrics of ``version`` once they are written to the run folder.

        Args:
            version: global version that was measured.
            now: time in seconds of the run's clock.
            metrics: metrics by name, as written.
        """

    def on_event(self, event: Event, coordinator: Coordinator, now: float) -> None:
        """Observe an event after the coordinator has handled it.

        Args:
            event: event that was handled.
            coordinator: the coordinator after the event; read only.
            now: time in seconds of the run's clock.
        """

    def on_merged(self, version: int, now: float, seconds: float) -> None:
        """Observe that ``version`` was made; called before the end of each of its updates is.

        Args:
            version: version of the global model.
            now: time in seconds of the run's clock.
            seconds: real time that handling the event took, of which the merge is a part.
        """

    def stop_asked(self) -> str | None:
        """Return a reason to end the run now, or None; called each time that the runtime's loop turns."""
        return None

    def checkpoint_due(self) -> bool:
        """Check whether this observer wants a checkpoint now, in addition to the regular ones; called after each event."""
        return False

    def on_checkpoint(self, coordinator: Coordinator, version: int, clock: dict[str, Any]) -> None:
        """Save the run's state before returning, since it may change afterwards.

        Args:
            coordinator: coordinator whose state is to be saved.
            version: version of the global model.
            clock: the runtime's own state; an observer may add entries, which a resumed run gets back.
        """

    def end(self, summary: dict[str, Any]) -> None:
        """Read the run's summary before it is written; it must not be changed."""


class HookList(RunHooks):
    """List of observers, called one after the other, in order."""

    def __init__(self, *hooks: RunHooks) -> None:
        """Call ``hooks``."""
        self._hooks = hooks

    def on_settled(self, settled: Settled, now: float) -> None:
        """Call each observer; see `RunHooks.on_settled`."""
        for hooks in self._hooks:
            hooks.on_settled(settled, now)

    def on_measured(self, version: int, now: float, metrics: dict[str, float]) -> dict[str, float]:
        """Call each observer with the metrics that the one before it returned; see `RunHooks.on_measured`."""
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

    def on_merged(self, version: int, now: float, seconds: float) -> None:
        """Call each observer; see `RunHooks.on_merged`."""
        for hooks in self._hooks:
            hooks.on_merged(version, now, seconds)

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
