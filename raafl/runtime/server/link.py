"""Define what sessions and the run's loop tell each other: events, broken and resumed connections, and the queues for both.

A session whose client has a task waits for ``Timeouts.resume_s``: the client is *away*. What has arrived of its answer stays in
the session's own storage, one update at most. The client says RESUME on a new connection, whose session asks the run's loop
to hand the connection over (`Resumption`); the answer is a WELCOME with the first missing chunk. The coordinator does not hear
of it.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass, field

from raafl.core.types import Event
from raafl.transport.tcp.connection import TcpConnection
from raafl.transport.tcp.loop import Mailbox
from raafl.transport.tcp.resumable import Position


@dataclass(frozen=True, slots=True)
class Away:
    """Event that the connection of a working client broke, and that its session waits for the client to connect again."""

    client: int  # id of the client
    incarnation: int  # number of times that the client had joined
    assignment: int  # id of the client's task
    reason: str  # text of the error
    wait_s: float  # seconds for which the session waits


@dataclass(frozen=True, slots=True)
class Back:
    """Event that a client has connected again."""

    client: int  # id of the client
    incarnation: int  # number of times that the client had joined
    assignment: int | None  # id of the client's task; None = it ended while the client was away
    num_chunks: int  # chunks of the client's update that arrived before the break
    away_s: float  # seconds without connection


@dataclass(frozen=True, slots=True)
class Resumption:
    """Request to continue a client's session on a new connection; sent to the main loop by the new connection's session."""

    client: int  # id of the client
    # number of times that the client has joined, if this connection begins a new session
    incarnation: int
    wanted: int  # number of times that the client had joined when the session to be continued began
    pair: TcpConnection  # the new connection
    position: Position  # messages and chunks that the client has received in that session
    # gets the answer whether that session continues on this connection
    is_taken: Mailbox[bool] = field(default_factory=Mailbox)


@dataclass(frozen=True, slots=True)
class Unassigned:
    """Question of a session whose connection broke while its client had no task: whether the client has one by now.

    The answer comes after everything that the session has reported, such as an update whose next task is on its way.
    """

    client: int  # id of the client
    incarnation: int  # number of times that the client has joined
    assignment: Mailbox[int | None] = field(default_factory=Mailbox)  # for the answer: the task's id; None = no task


LinkStep = Away | Back | Resumption | Unassigned


class HandedOver(Exception):
    """Raised in the session of a new connection, because an earlier session of the client continues on it."""


class ForExtension:
    """Base class of what a session tells an extension in the loop; the coordinator does not hear of it."""

    __slots__ = ()


Item = Event | ForExtension | LinkStep
"""Message from a session to the run's loop: an event for the coordinator, or a step that only the loop handles."""


class Inbox:
    """Queue of events from the clients' sessions to the server's main loop; every wait has a deadline.

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
