"""Where a run can be listened to, whichever runtime drives it."""

from __future__ import annotations

from typing import Any

from raafl.core.coordinator import Coordinator
from raafl.core.types import Settled


class Hooks:
    """Does nothing at every occasion; override what you need. Called in the runtime's own thread, which must not wait."""

    def on_settled(self, settled: Settled, now: float) -> None:
        """An assignment has met its end: merged, refused, lost or unused."""

    def on_evaluate(self, version: int, now: float, metrics: dict[str, float]) -> None:
        """The global model of ``version`` has been measured."""

    def checkpoint_due(self) -> bool:
        """Return whether a checkpoint is wanted now, whatever the coordinator says; asked after each event."""
        return False

    def on_checkpoint(self, coordinator: Coordinator, version: int, clock: dict[str, Any]) -> None:
        """The state is to be saved; it may change as soon as this returns. ``clock`` is the runtime's own state."""


class Several(Hooks):
    """Passes each occasion on to several, in order."""

    def __init__(self, *hooks: Hooks) -> None:
        """Pass on to ``hooks``."""
        self._hooks = hooks

    def on_settled(self, settled: Settled, now: float) -> None:
        """Pass it on."""
        for hooks in self._hooks:
            hooks.on_settled(settled, now)

    def on_evaluate(self, version: int, now: float, metrics: dict[str, float]) -> None:
        """Pass it on."""
        for hooks in self._hooks:
            hooks.on_evaluate(version, now, metrics)

    def checkpoint_due(self) -> bool:
        """Return whether any of them wants one."""
        return any(hooks.checkpoint_due() for hooks in self._hooks)

    def on_checkpoint(self, coordinator: Coordinator, version: int, clock: dict[str, Any]) -> None:
        """Pass it on."""
        for hooks in self._hooks:
            hooks.on_checkpoint(coordinator, version, clock)
