"""Where a run can be listened to, whichever runtime drives it."""

from __future__ import annotations

from typing import Any

from raafl.core.coordinator import Coordinator
from raafl.core.types import Settled


class Hooks:
    """Does nothing at every occasion; override what you need. Called in the runtime's own thread."""

    def on_settled(self, settled: Settled, now: float) -> None:
        """An assignment has met its end: merged, refused, lost or unused."""

    def on_evaluate(self, version: int, now: float, metrics: dict[str, float]) -> None:
        """The global model of ``version`` has been measured."""

    def on_checkpoint(self, coordinator: Coordinator, version: int, clock: dict[str, Any]) -> None:
        """The state is to be saved; it may change as soon as this returns. ``clock`` is the runtime's own state."""
