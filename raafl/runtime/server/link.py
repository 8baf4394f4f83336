"""Keep a client's session while its connection is broken, and continue it on the client's next connection.

A session whose client has a task waits for ``Timeouts.resume_s``: the client is *away*. What has arrived of its answer stays in
the session's own storage, one update at most. The client says RESUME on a new connection, whose thread (`Session`) asks the loop
to hand the connection over (`Resumption`); the answer is a WELCOME with the first missing chunk. The coordinator does not hear
of it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from raafl.core.types import Event
from raafl.runtime.protocol import Resume
from raafl.transport import Connection, Kind, Message, PeerLost, PeerTimeout
from raafl.transport.tcp.connection import TcpConnection
from raafl.transport.tcp.resumable import LINK, SUCCEEDED, Position, ResumableConnection

_LOOK_S = 0.25  # seconds between two checks of a waiting session whether the run has ended


@dataclass(frozen=True, slots=True)
class Away:
    """Event that the connection of a working client broke, and that its session waits for the client to connect again."""

    client: int  # id of the client
    incarnation: int  # number of times that the client has joined
    assignment: int  # id of the client's task
    reason: str  # text of the error that broke the connection
    wait_s: float  # seconds for which the session waits for the client


@dataclass(frozen=True, slots=True)
class Back:
    """Event that a client has connected again."""

    client: int  # id of the client
    incarnation: int  # number of times that the client has joined
    assignment: int | None  # id of the client's task; None = the task has ended meanwhile
    num_chunks: int  # number of chunks of the client's update that had arrived before
    away_s: float  # seconds without a connection


@dataclass(frozen=True, slots=True)
class Resumption:
    """Request to continue a client's session on a new connection; sent to the main loop by the new connection's thread."""

    client: int  # id of the client
    # number of times that the client has joined, if the new connection counts as a join; unused if the earlier session
    # continues
    incarnation: int
    wanted: int  # number of times that the client had joined when the session to be continued began
    pair: TcpConnection  # new connection of the client
    position: Position  # messages and chunks of the session that the client has received
    # queue for the answer: whether the session continues on the connection
    is_taken: queue.SimpleQueue[bool] = field(default_factory=queue.SimpleQueue)


LinkStep = Away | Back | Resumption


class HandedOver(Exception):
    """Raised in the thread of a new connection, because an earlier session of the client continues on it."""


class SessionLink:
    """Connection of a session to its client that can be replaced: if it breaks, the session continues on the client's next one.

    `renew` runs on the session's thread, `offer` in the main loop.
    """

    def __init__(
        self,
        client: int,
        incarnation: int,
        put: Callable[[LinkStep], None],
        resume_s: float,
        task: Callable[[], int | None],
        stopping: Callable[[], bool],
    ) -> None:
        """Prepare; ``task`` returns the id of the client's task, None if it has none."""
        self.client, self.incarnation, self._put = client, incarnation, put
        self._resume_s, self._task, self._stopping = resume_s, task, stopping
        self._next: queue.SimpleQueue[tuple[TcpConnection, Position]] = queue.SimpleQueue()
        self._pair: ResumableConnection | None = None
        self._left_s, self._before = resume_s, (Position(), Position())
        # the lock orders the session's end and new connections: each is either taken, or told that no session exists
        self._lock, self._has_ended = threading.Lock(), False

    def over(self, pair: Connection) -> Connection:
        """Return the connection that the session uses: ``pair``, made resumable if its transport supports that."""
        if not self._resume_s or not isinstance(pair, TcpConnection) or not pair.resumes:
            return pair
        self._pair = ResumableConnection(pair, self.renew)
        return self._pair

    def hand_over(self, message: Message) -> bool:
        """Let the client's earlier session continue on this new connection; return whether it does.

        Raises:
            Refused: the message has invalid numbers.
        """
        position = Resume.from_meta(message.meta).position
        if self._pair is None:
            return False
        step = Resumption(self.client, self.incarnation, message.incarnation, self._pair.pair, position)
        self._put(step)
        while not self._stopping() and not self._pair.closed:  # otherwise the run's loop may have ended
            with suppress(queue.Empty):
                return step.is_taken.get(timeout=_LOOK_S)
        return False

    def confirm(self, assignment: int) -> None:
        """Tell the client that its answer has arrived, so that the client may discard the answer."""
        if self._pair is not None and not self._pair.closed:
            with suppress(PeerLost, PeerTimeout):  # the session's thread will notice the lost connection
                self._pair.send(Message(Kind.KEEPALIVE, 0, self.incarnation, {"confirms": assignment}))

    def offer(self, pair: TcpConnection, position: Position) -> bool:
        """Offer the client's next connection to the session; return whether the session continues on it.

        The session may not have noticed yet that its present connection is dead.
        """
        with self._lock:
            if self._has_ended or self._pair is None or self._pair.closed:
                return False
            self._next.put((pair, position))
            self._pair.pair.cut(SUCCEEDED, "the client has come back by another connection")
            return True

    def end(self) -> None:
        """Accept no further connection, and close connections that are waiting to be accepted."""
        with self._lock:
            self._has_ended = True
        while not self._next.empty():
            self._next.get()[0].close()

    def renew(self, here: Position, error: Exception) -> tuple[TcpConnection, Position]:
        """Wait until the client connects again.

        Returns:
            The new connection, and the numbers of messages and chunks that the client has received.
        """
        number, since = self._task(), time.monotonic()
        if number is None and self._next.empty():
            raise error
        if number is not None:
            self._put(Away(self.client, self.incarnation, number, str(error), self._left_s))
        while not self._stopping():
            left_s = self._left_s - (time.monotonic() - since)
            try:
                pair, theirs = self._next.get(timeout=max(min(left_s, _LOOK_S), 0.0))
            except queue.Empty:
                if self._pair is not None and (why := self._pair.pair.why_closed).reason not in LINK:
                    raise why from None  # the client's site was removed meanwhile
                if left_s <= 0 or self._pair is None or self._pair.closed:
                    break
                continue
            try:
                pair.send(Message(Kind.WELCOME, 0, self.incarnation, Resume(here).to_meta()))
            except (PeerLost, PeerTimeout):
                continue
            away_s = time.monotonic() - since
            self._put(Back(self.client, self.incarnation, number, here.num_chunks, away_s))
            self._charge(away_s, here, theirs)
            return pair, theirs
        raise error

    def _charge(self, away_s: float, here: Position, theirs: Position) -> None:
        """Subtract the time without a connection from the client's allowance, which is restored once any data has arrived.

        So a client that reconnects repeatedly without progress has ``resume_s`` in all. While the client trains,
        nothing is transferred; then only the task's deadline (``Timeouts.task_s``) counts.
        """
        assert self._pair is not None
        is_training = self._pair.pair.partial is None and theirs.num_messages == self._pair.num_sent
        has_moved = (here, theirs) != self._before
        self._left_s = self._resume_s if is_training or has_moved else self._left_s - away_s
        self._before = (here, theirs)


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
