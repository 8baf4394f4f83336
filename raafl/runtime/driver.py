"""Run a coordinator on any clock: record each event, pass it to the coordinator, carry out the actions that it returns.

Two runtimes are drivers: `raafl.runtime.simulation` on a virtual clock, `raafl.runtime.server.wall_clock` on the wall clock.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from raafl.core.coordinator import Coordinator
from raafl.core.hooks import RunHooks
from raafl.core.snapshots import Snapshots
from raafl.core.types import (
    ENDS,
    Action,
    Adjusted,
    Arrived,
    Assign,
    Assignment,
    Checkpoint,
    ClientInfo,
    Dismiss,
    Evaluate,
    Event,
    Fail,
    Finish,
    Lost,
    SetTimer,
    Settled,
    Stop,
    Suspend,
    Update,
)
from raafl.errors import CodeFailed
from raafl.local.evaluate import Evaluator
from raafl.log import Notices
from raafl.runfolder.record import RunRecord
from raafl.units import duration


class Driver(ABC):
    """Base class of the runtimes, which drive a run on simulated or on real time.

    On one thread it passes events to the coordinator, and carries out the actions that the coordinator returns.

    Attributes:
        reason: reason for which the run has ended; empty while it goes on.
        error: error of the user's code that ended the run; None = there was none.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        record: RunRecord,
        evaluator: Evaluator | None,
        hooks: RunHooks | None,
        progress: Notices | None,
    ) -> None:
        """Create a driver of a coordinator; an ``evaluator`` of None = the model is never evaluated."""
        self.coordinator, self.record, self.evaluator = coordinator, record, evaluator
        self.hooks, self.progress = hooks or RunHooks(), progress
        self.reason = coordinator.finished or ""  # a resumed run may lack nothing but its end
        self.error: CodeFailed | None = None
        self._is_summing = False  # whether a secure group's updates are being handled: no checkpoint yet

    # ---- implemented by each runtime ----

    @property
    @abstractmethod
    def now(self) -> float:
        """Present time in seconds on the run's clock."""

    @abstractmethod
    def save(self) -> dict[str, Any]:
        """Return the state of the clock and all waiting events, as plain data and tensors, for a checkpoint."""

    @abstractmethod
    def _deliver(self, assignment: Assignment) -> None:
        """Send a task to its client, and record that."""

    @abstractmethod
    def _set_timer(self, id: int, at: float) -> None:
        """Schedule the coordinator's timer ``id`` at time ``at``."""

    @abstractmethod
    def _measure(self, version: int, now: float) -> None:
        """Evaluate the global model, at once or later on a copy, and pass the metrics to `_measured`."""

    def _admit(self, event: Event, now: float) -> bool:
        """Do what must precede the coordinator's handling of an event; return False if the event is dropped instead."""
        return True

    def _handled(self, event: Event, now: float, lost: ClientInfo | None) -> None:
        """Clean up after an event; ``lost``: the client that it has removed, None = none."""
        self.hooks.on_event(event, self.coordinator, now)

    def _dismiss(self, client: int, incarnation: int, reason: str) -> None:
        """Tell the user that a client was dismissed, as no work fits it."""
        self.note(f"client {client} was dismissed: {reason}")

    @abstractmethod
    def _blame(self, client: int, error: Exception) -> None:
        """Report an ``error`` that the method raised about a client, which was dismissed for that."""

    def _decide(self, event: Event, now: float) -> list[Action]:
        """Pass an event to the coordinator, and return the actions that it decides on."""
        return self.coordinator.handle(event, now)

    # ---- shared by all runtimes ----

    def tell(self, event: Event) -> None:
        """Let the coordinator know what happens now."""
        if self._admit(event, now := self.now):
            self._handle(event, now)

    def _handle(self, event: Event, now: float) -> None:
        self.record.event(event, now)  # record first, so that a replay reads the events in the order of handling
        lost = self.coordinator.roster.declared(event.client) if isinstance(event, Lost) else None
        version, since = self.coordinator.state.version, time.perf_counter()
        actions = self._decide(event, now)
        if self.coordinator.state.version != version:
            self.hooks.on_merged(self.coordinator.state.version, now, time.perf_counter() - since)
        for action in actions:
            self._do(action)
        self._handled(event, now, lost)
        wanted = any(isinstance(action, Checkpoint) for action in actions) or self.hooks.checkpoint_due()
        wanted = wanted and not self._is_summing
        # save only after the event is handled completely; a merge may end the run for a reason of its own (`ends_run`)
        if wanted and (self.coordinator.finished in (None, *ENDS) or not isinstance(event, Stop)):
            self._checkpoint()
        if self.progress is not None:
            self.progress.update()
        for action in actions:
            if isinstance(action, Fail):
                self.stop(action.reason)

    def tell_group(self, updates: Sequence[Update]) -> None:
        """Let the coordinator know of all updates of a group, refused ones first, with no other event between them."""
        ordered = sorted(updates, key=lambda update: update.group is not None)
        for left, update in zip(reversed(range(len(ordered))), ordered, strict=True):
            self._is_summing = left > 0
            if not self.reason:
                self.tell(Arrived(update))
        self._is_summing = False

    def _do(self, action: Action) -> None:
        match action:
            case Assign(assignment):
                self._deliver(assignment)
            case Settled():
                self.record.settled(action, self.now)
                self.hooks.on_settled(action, self.now)
            case SetTimer(id, at):
                self._set_timer(id, at)
            case Evaluate(version) if self.evaluator is not None:
                now = self.now
                state = self.coordinator.state
                self.record.due(version, now, {**self.hooks.figures(state), **self._figures()}, state.waiting)
                self._measure(version, now)
            case Dismiss(client, incarnation, reason, error):
                self._dismiss(client, incarnation, reason)
                if error is not None:
                    self._blame(client, error)
            case Suspend(client, until, reason):
                self.record.suspended(client)
                num = self.coordinator.admission.backoff.refused[client]
                last = f"its last {num} updates were" if num > 1 else "its last update was"
                self.note(f"client {client} is suspended for {duration(until - self.now)}: {last} refused ({reason})")
            case Adjusted():
                self.record.adjusted(action, self.now)
                self.note(
                    f"{action.setting} is {action.after:.4g} from now on, was {action.before:.4g}: {action.quantity} measured as "
                    f"{action.measured:.4g}, predicted as {action.predicted:.4g}"
                )
            case Finish(reason):
                self.reason = reason

    def _figures(self) -> dict[str, float | None]:
        """Return the numbers that the merge adds to the metrics of the new version."""
        return self.coordinator.algorithm.merge.figures(self.coordinator.state)

    def _measured(self, version: int, at_s: float, measured: dict[str, float]) -> bool:
        """Record the metrics of the model of time ``at_s``; return whether all targets are now met."""
        metrics = self.hooks.on_measured(version, at_s, measured)
        reached = self.record.evaluated(version, at_s, metrics)
        self.hooks.on_evaluate(version, at_s, metrics)
        if self.progress is not None:
            self.progress.update(evaluated=True)
        return reached

    def _checkpoint(self) -> None:
        self.hooks.on_checkpoint(self.coordinator, self.coordinator.state.version, self.save())

    def stop(self, reason: str) -> None:
        """End the run, unless it has already ended; it can be resumed from its present state.

        If a merge or the end itself was interrupted, the run can be resumed from the checkpoint before that.
        """
        if not self.reason:
            if not self.coordinator.is_merging and self.coordinator.finished is None:
                self._checkpoint()
            self.tell(Stop(reason))
            # what is left of an interrupted end is not done
            self.reason = self.reason or self.coordinator.finished or ""

    def _evaluate_again(self) -> None:
        """Evaluate the model of a resumed run if its last evaluation had failed, or was not over at the checkpoint."""
        if self.evaluator is not None and self.record.awaits(version := self.coordinator.state.version):
            self._measure(version, self.now)
        if self.reason in ENDS:
            self._checkpoint()

    def _stop_if_asked(self) -> None:
        if not self.reason and (why := self.hooks.stop_asked()) is not None:
            self.stop(why)

    def _ended(self) -> str:
        """Return the reason for the run's end, which is an error of the user's code if there was one."""
        return self.reason if self.error is None else f"failed: {self.error}"

    def note(self, text: str) -> None:
        """Show a line to the user, if there is a progress display."""
        if self.progress is not None:
            self.progress.note(text)


def snapshots_of(coordinator: Coordinator) -> Snapshots:
    """Return the copies of values that simulated clients receive, changed as the run's compression would change them."""
    if coordinator.fleet.plan is None:
        return Snapshots(coordinator)
    from raafl.compression.streams import CompressedSnapshots

    return CompressedSnapshots(coordinator)
