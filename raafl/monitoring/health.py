"""Report whether the main loop of a run is still running, for health checks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Literal

from raafl.core.coordinator import Coordinator
from raafl.core.hooks import RunHooks
from raafl.core.types import Event
from raafl.monitoring.endpoint import Reply


class Health(RunHooks):
    """Observer that records each iteration of the run's main loop, for a health check.

    `state`: "starting" before the first iteration, then "running", and "ending" once the run has finished its work.
    """

    def __init__(self, stall_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin as starting."""
        self._stall_s, self._clock = stall_s, clock
        self._version, self._turned_at = 0, clock()
        self.state: Literal["starting", "running", "ending"] = "starting"

    def stop_asked(self) -> str | None:
        """Record an iteration of the run's main loop, which calls this method each time; return None, so that the loop goes on."""
        self._turned_at = self._clock()
        if self.state == "starting":
            self.state = "running"
        return None

    def on_event(self, event: Event, coordinator: Coordinator, now: float) -> None:
        """Record the model's version, and whether the run has finished its work; see `RunHooks.on_event`."""
        self._version = coordinator.state.version
        if coordinator.finished is not None:
            self.state = "ending"

    @property
    def idle_s(self) -> float:
        """Seconds since the last iteration of the run's main loop."""
        return self._clock() - self._turned_at

    def report(self) -> Reply:
        """Return the reply to a health check: status 503 if the main loop has made no iteration for too long, else 200.

        It can be called on any thread.
        """
        idle_s = self.idle_s
        stalled = self.state == "running" and idle_s > self._stall_s
        body = {"status": "stalled" if stalled else self.state, "version": self._version, "idle_s": round(idle_s, 3)}
        status = HTTPStatus.SERVICE_UNAVAILABLE if stalled else HTTPStatus.OK
        return Reply(status, json.dumps(body).encode() + b"\n", "application/json")
