"""Tell whether a run's loop still turns."""

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
    """Observer that notes each turn of the runtime's loop; `report` may be called on any thread.

    Attributes:
        state: "starting" until the loop turns first, "running", and "ending" once the coordinator has finished.
    """

    def __init__(self, stall_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin as starting.

        Args:
            stall_s: seconds without a turn after which a run counts as stalled.
            clock: seconds, monotonic.
        """
        self._stall_s, self._clock = stall_s, clock
        self._version, self._turned_at = 0, clock()
        self.state: Literal["starting", "running", "ending"] = "starting"

    def stop_asked(self) -> str | None:
        """Note a turn."""
        self._turned_at = self._clock()
        if self.state == "starting":
            self.state = "running"
        return None

    def on_event(self, event: Event, coordinator: Coordinator, now: float) -> None:
        """Note the version, and whether the run winds up, which may take its time; see `RunHooks.on_event`."""
        self._version = coordinator.state.version
        if coordinator.finished is not None:
            self.state = "ending"

    @property
    def idle_s(self) -> float:
        """Seconds since the loop turned last."""
        return self._clock() - self._turned_at

    def report(self) -> Reply:
        """Return 503 for a run whose loop has not turned for too long, else 200."""
        idle_s = self.idle_s
        stalled = self.state == "running" and idle_s > self._stall_s
        body = {"status": "stalled" if stalled else self.state, "version": self._version, "idle_s": round(idle_s, 3)}
        status = HTTPStatus.SERVICE_UNAVAILABLE if stalled else HTTPStatus.OK
        return Reply(status, json.dumps(body).encode() + b"\n", "application/json")
