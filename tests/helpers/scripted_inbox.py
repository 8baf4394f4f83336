"""Deliver events in the order of a script."""

from __future__ import annotations

from collections.abc import Sequence

from raafl.core.types import Arrived, Event, Joined, Lost, Sending
from raafl.runtime.server.link import Inbox

Key = tuple[str, int]


def key_of(event: Event) -> Key | None:
    """Return an event's name in a script: ("arrived" or "sending", assignment), ("joined" or "lost", client), or None."""
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
    """Hands events out in a given order, holding back those that come early; unnamed kinds pass at once."""

    def __init__(self, order: Sequence[Key]) -> None:
        """Follow ``order``; once it is used up, events pass as they come."""
        super().__init__()
        self._order = list(reversed(order))
        self._early: dict[Key, Event] = {}

    def get(self, timeout_s: float) -> Event | None:
        """Return the event whose turn it is, or None if it has not come within ``timeout_s``."""
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
