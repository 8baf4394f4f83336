"""Deliver events in the order of a script."""

from __future__ import annotations

from collections.abc import Sequence

from raafl.core.types import Arrived, Event, Joined, Lost, Sending
from raafl.runtime.server.link import Inbox

Key = tuple[str, int]


def key_of(event: Event) -> Key | None:
    """Return an event's key in a script: ("arrived" or "sending", assignment), ("joined" or "lost", client), or None for others."""
    match event:
        case Arrived(update):
            return ("arrived", update.assignment)
        case Sending(_, _, number):
            return ("sending", number)
        case Joined(client):
            return ("joined", client.id)
        case Lost(client, _, _):
            return ("lost", client)
        case _:
            return None


class ScriptedInbox(Inbox):
    """Inbox that returns events in a given order: events that come early wait, and events of other kinds pass at once."""

    def __init__(self, order: Sequence[Key]) -> None:
        """Follow ``order``; after its end, events pass as they come."""
        super().__init__()
        self._order = list(reversed(order))
        self._early: dict[Key, Event] = {}

    def get(self, timeout_s: float) -> Event | None:
        """Return the event whose turn it is; None if it has not come within ``timeout_s``."""
        while True:
            if self._order and self._order[-1] in self._early:
                return self._early.pop(self._order.pop())
            if not self._order and self._early:
                return self._early.pop(next(iter(self._early)))
            event = super().get(timeout_s)
            key = None if event is None else key_of(event)
            if event is None or key is None:
                return event
            self._early[key] = event
