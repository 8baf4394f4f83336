"""Queue events that threads receive from clients, for the server's main loop."""

from __future__ import annotations

import queue

from raafl.core.types import Event
from raafl.runtime.server.link import LinkStep


class ForExtension:
    """Base class of what a session tells an extension in the loop; the coordinator does not hear of it."""

    __slots__ = ()


Item = Event | ForExtension | LinkStep
"""What a session's thread tells the loop: an event of the run, or a step that the coordinator does not hear of."""


class Inbox:
    """Queue of events from the clients' threads to the server's main loop; every wait has a deadline.

    The order in which events are added is the order of the run; the journal records it, and a replay repeats it.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()

    def put(self, event: Item) -> None:
        """Add an event to the queue; callable from any thread."""
        self._queue.put(event)

    @property
    def num_waiting(self) -> int:
        """Approximate number of waiting events; callable from any thread."""
        return self._queue.qsize()

    def get(self, timeout_s: float) -> Item | None:
        """Return the next event; None if there is none within ``timeout_s`` seconds."""
        try:
            return self._queue.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            return None
