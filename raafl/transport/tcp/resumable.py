"""Continue a session on a new connection after the old one broke; chunks that have arrived are not sent again.

Both ends count the messages of tasks that they have sent and received; each keeps the last it has sent until the other is known to
have it. When a connection breaks, an end waits for the next one or makes it (`Renew`), and the two tell each other how far they
have received: how many messages, and how many chunks of the one that broke off. The sender goes on from there. Messages that belong
to no assignment (heartbeats, stop) are not repeated.

A session has at most one message of a task on its way in each direction: a task is sent, then answered, and each message that comes
shows that the one before it has arrived. Where tasks and transfers overlap, the next task travels beside the answer to the last:
then an answer shows that its own task has arrived, and a heartbeat names the answer that has (`_confirms`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from raafl.transport import codec
from raafl.transport.codec import Expect, Kind, Message, Refused
from raafl.transport.connection import Connection, PeerLost, PeerTimeout
from raafl.transport.frames import Partial, count_chunks
from raafl.transport.tcp.connection import TcpConnection

SUCCEEDED = "connection-replaced"
"""Reason of `PeerLost` on a connection that a new one of the same client has replaced."""

# reasons of `PeerLost` after which the client may reconnect; "closed-here" is one, since a thread that notices a
# failure closes the connection, which other threads then see
LINK = frozenset({"connection-closed", "connection-reset", "connection-broken", "closed-here", SUCCEEDED})
_LOOK_S = 0.05  # seconds between two checks by a thread that waits


@dataclass(frozen=True, slots=True)
class Position:
    """Number of messages and chunks that one side of a session has received."""

    num_messages: int = 0  # number of task messages that were received completely
    num_chunks: int = 0  # number of chunks of the next message that were received


Renew = Callable[[Position, Exception], tuple[TcpConnection, Position]]
"""Function that returns the next connection and the peer's position, given this end's position and the error."""


class Progress:
    """Record of the messages that one end has sent and received, and of the part of the last one that the other may lack.

    `num_sent`, `num_received`: number of task messages.
    `last`: last task message sent; None = it has arrived.
    `first`: chunk from which to send that message on this connection; None = nothing needs to be sent.
    """

    def __init__(self) -> None:
        self.num_sent = self.num_received = 0
        self.last: Message | None = None
        self.first: int | None = None

    def begin(self, message: Message) -> None:
        """Note a task message that is about to be sent."""
        self.last, self.first, self.num_sent = message, 0, self.num_sent + 1

    def take(self, message: Message) -> None:
        """Note a message that was received; it may show that the last one sent has arrived."""
        self.num_received += message.assignment != 0
        if self.last is not None and _confirms(message, self.last):
            self.last = None

    def refuse(self, refused: Refused) -> None:
        """Note a message that was received and refused."""
        self.num_received += refused.message is not None and refused.message.assignment != 0

    def here(self, partial: Partial | None) -> Position:
        """Return the position of this end; ``partial``: the message that broke off."""
        return Position(self.num_received, 0 if partial is None else partial.num_chunks)

    def go_on(self, theirs: Position) -> None:
        """Go on from the other end's position on a new connection; raises `Refused` (wrong-position) for an impossible one."""
        self.first = self._first_missing(theirs)
        if self.first is None:
            self.last = None

    def _first_missing(self, theirs: Position) -> int | None:
        """Return the first chunk of the last sent message that the peer lacks; None if the peer has all."""
        num_missing, last = self.num_sent - theirs.num_messages, self.last
        if num_missing == 0 and theirs.num_chunks == 0:
            return None
        most = 0 if last is None else count_chunks(codec.declared(last.tensors))
        if num_missing != 1 or last is None or theirs.num_chunks > most:
            raise Refused(
                "wrong-position",
                f"the other end has {theirs.num_messages} messages and {theirs.num_chunks} chunks, of {self.num_sent} messages "
                f"and {most} chunks",
            )
        return theirs.num_chunks


class ResumableConnection(Connection):
    """A session with one peer that survives broken connections: it continues on the peer's next connection.

    One thread may send while another receives, as in `Connection`, and both may notice that the connection is broken.
    Only a thread that holds the receiving lock replaces the connection, since the receiver might otherwise be in the
    middle of a message that the new connection is to continue.

    `pair`: the present connection of the session.
    """

    resumes = True

    def __init__(self, pair: TcpConnection, renew: Renew) -> None:
        """Create a session on the connection ``pair``; ``renew`` is called to get the next connection after a failure."""
        self.pair, self._renew = pair, renew
        self._sending, self._receiving = threading.Lock(), threading.RLock()
        self._swap = threading.Lock()  # guards the connection and the progress
        self._progress = Progress()
        self._confirmed = threading.Event()  # cleared while the last message may have to be sent again
        self._confirmed.set()
        self._num_repeated_bytes = 0
        self._is_closed = False

    @property
    def closed(self) -> bool:  # type: ignore[override]
        """Whether the session has ended."""
        return self._is_closed

    @property
    def is_unconfirmed(self) -> bool:
        """Whether the peer has not yet confirmed the last task message."""
        return self._progress.last is not None

    def send(self, message: Message, timeout_s: float | None = None) -> int:
        """Send a message, on a new connection if this one breaks; see `Connection.send`.

        The tensors of a task message must stay unchanged until the next message is received.
        """
        if not self._sending.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise PeerTimeout("another message is still being sent")
        try:
            if not message.assignment:
                return self.pair.send(message, timeout_s)
            with self._swap:
                self._progress.begin(message)
                self._confirmed.clear()
            return self._send_rest(message, timeout_s)
        finally:
            self._sending.release()

    def _send_rest(self, message: Message, timeout_s: float | None = None) -> int:
        """Send the chunks of a message that the peer lacks; the caller holds the sending lock."""
        num_bytes, self._num_repeated_bytes = self._num_repeated_bytes, 0
        while True:
            with self._swap:
                pair, first, self._progress.first = self.pair, self._progress.first, None
            if first is None:
                return num_bytes
            before = pair.sent_bytes
            try:
                pair.send(message, timeout_s, first_chunk=first)
            except (PeerLost, PeerTimeout) as error:
                self._replace(pair, error)
            finally:
                num_bytes += pair.sent_bytes - before

    def recv(self, expect: Expect, timeout_s: float, *, finite: bool = False) -> Message:
        """Receive a message, on a new connection if this one breaks; see `Connection.recv`."""
        self.received_bytes = 0
        until = time.monotonic() + timeout_s
        with self._receiving:
            while True:
                pair = self.pair
                try:
                    message = self._received(pair, expect, until - time.monotonic(), finite)
                except (PeerLost, PeerTimeout) as error:
                    lost = error
                else:
                    return message
                finally:
                    self.received_bytes += pair.received_bytes
                if isinstance(lost, PeerTimeout) and pair.in_step and pair.partial is None:
                    self.close()  # no byte of a message has arrived in time
                    raise lost
                self._replace(pair, lost)
                self._repeat()

    def _received(self, pair: TcpConnection, expect: Expect, left_s: float, finite: bool) -> Message:
        # the deadline ends with a message's first byte; each further piece has a timeout of its own
        left_s = max(left_s, 1e-3 if pair.partial is None else pair.timeout_s)
        try:
            message = pair.recv(expect, left_s, finite=finite)
        except Refused as refused:
            self._progress.refuse(refused)
            if pair.closed:
                self.close()
            raise
        with self._swap:
            self._progress.take(message)
            self._note_confirmed()
        return message

    def _note_confirmed(self) -> None:
        if self._progress.last is None:
            self._confirmed.set()

    def settle(self, stopped: Callable[[], bool]) -> None:
        """Wait until the last task message has arrived, or the session has ended; see `Connection.settle`."""
        while not self._confirmed.wait(_LOOK_S) and not stopped():
            pass

    def check(self) -> None:
        """Check whether the peer is gone; if it has connected again, continue on its new connection. See `Connection.check`."""
        pair = self.pair
        try:
            pair.check()
        except PeerLost as error:
            self._replace(pair, error)
            self._repeat()

    def close(self) -> None:
        """End the session; see `Connection.close`."""
        self._is_closed = True
        self._confirmed.set()
        self.pair.close()

    def _replace(self, pair: TcpConnection, error: PeerLost | PeerTimeout) -> None:
        """Wait until another connection has replaced ``pair``; raises ``error`` if the session ends before."""
        if isinstance(error, PeerLost) and error.reason not in LINK:
            self.close()
        # this also wakes other threads that still use the connection
        pair.cut("connection-broken", "another thread found it so")
        while self.pair is pair:
            if self._is_closed:
                raise error
            with _attempt(self._receiving) as is_mine:
                if is_mine and self.pair is pair and not self._is_closed:
                    self._take_next(pair, error)

    def _take_next(self, old: TcpConnection, error: PeerLost | PeerTimeout) -> None:
        """Get a new connection and continue the session on it; the caller holds the receiving lock."""
        partial = old.partial
        try:
            pair, theirs = self._renew(self._progress.here(partial), error)
            pair.partial = partial
            # change both under the lock, so that a message sent meanwhile is compared here or goes over the new
            # connection
            with self._swap:
                self.pair = pair
                self._progress.go_on(theirs)
                self._note_confirmed()
        except BaseException:
            self.close()
            raise
        if self._is_closed:
            pair.close()
            raise error

    def _repeat(self) -> None:
        """Send the chunks that the peer lacks, unless another thread is sending them."""
        progress = self._progress
        while progress.first is not None and not self._is_closed:
            with _attempt(self._sending) as is_free:
                if is_free and progress.last is not None and progress.first is not None:
                    self._num_repeated_bytes += self._send_rest(progress.last)


def _confirms(message: Message, last: Message) -> bool:
    """Check whether a peer's message proves that the peer has received ``last``, this end's latest message."""
    # a task that is sent ahead says nothing: the answer before it may still be on its way
    if message.kind is Kind.ASSIGN:
        return message.meta.get("ahead") is not True
    number: object = message.meta.get("confirms", message.assignment or last.assignment)
    return number == last.assignment


@contextmanager
def _attempt(lock: Any) -> Iterator[bool]:
    """Try to acquire a lock for `_LOOK_S` seconds; yield whether that succeeded."""
    is_held = lock.acquire(timeout=_LOOK_S)
    try:
        yield is_held
    finally:
        if is_held:
            lock.release()
