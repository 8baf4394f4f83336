"""Exchange messages over a connected TCP or TLS socket, with clients on other machines that come and go.

`Listener` and `connect` run the TLS handshake and the opening before they make a connection.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress

from raafl.transport import codec
from raafl.transport.codec import Expect, Message, Refused
from raafl.transport.connection import Connection, PeerLost, PeerTimeout
from raafl.transport.frames import PIECE_BYTES, Frames, Partial
from raafl.transport.tcp.stream import PAUSE, SocketStream, TimeBudget, Wait, Waits, block, hang_up, shut

MIN_BYTES_PER_S = 1000.0
"""Slower than this, a peer in the middle of a message is cut off as ``slow``."""


class TcpConnection(Connection):
    """Connection over a TCP or TLS socket. CUDA tensors pass through a pinned buffer of 24 MiB for each direction.

    `send` returns once the peer has acknowledged nearly all of the message. A peer must transfer at least
    ``min_bytes_per_s`` during a message: a slower incoming message is `Refused` as ``slow``, and a send to a slower
    reader raises `PeerTimeout`. A TLS record that was altered, lost or repeated is `Refused` as ``bad-record``. Each of
    these errors closes the connection.

    Attributes:
        is_encrypted: whether the socket uses TLS.
        why_closed: error that a later use of the connection raises, once this side has closed it.
        on_close: called whenever this side closes the connection, even one that was closed before; None = nobody is.
    """

    def __init__(self, sock: socket.socket, timeout_s: float, *, min_bytes_per_s: float = MIN_BYTES_PER_S) -> None:
        """Create a connection over a connected socket.

        Args:
            sock: connected; an `ssl.SSLSocket` after its handshake; none of the peer's messages has been read.
            timeout_s: seconds in which the peer must send or accept each piece of a message.
            min_bytes_per_s: least average rate on the wire.
        """
        self.timeout_s, self.min_bytes_per_s = timeout_s, min_bytes_per_s
        self.is_encrypted = self.resumes = hasattr(sock, "getpeercert")
        self._socket = _stream(sock, TimeBudget(timeout_s))
        self._stream = self._socket
        self.why_closed = PeerLost("closed-here")
        self.on_close: Callable[[], None] | None = None
        self._frames = Frames(self._stream)
        # One thread may send while another receives, since the two directions share nothing. The lock only guards the
        # number of threads that use the connection, so that closing never waits for the peer.
        self._lock, self._num_inside, self._open = threading.Lock(), 0, True
        self._has_unread = False

    @property
    def sent_bytes(self) -> int:
        """Number of bytes sent so far."""
        return self._stream.num_written

    @property
    def has_unsent(self) -> bool:
        """Whether the peer has not acknowledged all bytes that were sent to it; False if the system does not say."""
        return self._socket.num_queued() > 0

    @property
    def in_step(self) -> bool:
        """Whether the next byte to read is the first of a message."""
        return self._frames.in_step

    @property
    def partial(self) -> Partial | None:
        """Message that was received in part, which the next connection with this peer can continue; None = none."""
        return self._frames.partial

    @partial.setter
    def partial(self, partial: Partial | None) -> None:
        self._frames.partial = partial

    def send(self, message: Message, timeout_s: float | None = None, *, first_chunk: int = 0) -> int:
        """Send a message; see `Connection.send`.

        Args:
            message: message to send.
            timeout_s: seconds in which the peer must accept each piece; None = the default of the connection.
            first_chunk: index of the first chunk of the payload to send; the peer has all earlier chunks.
        """
        return block(self.sending(message, timeout_s, first_chunk))

    def sending(self, message: Message, timeout_s: float | None = None, first_chunk: int = 0) -> Waits[int]:
        """Send a message, yielding what to wait for; see `send`."""
        head = codec.encode_head(message)
        with self._inside():
            self._socket.writing = TimeBudget(self.timeout_s if timeout_s is None else timeout_s, self.min_bytes_per_s)
            before = self._stream.num_written
            try:
                yield from self._writing(head, message, first_chunk)
            except Refused as refused:
                raise PeerTimeout(f"the peer accepts the message too slowly: {refused.detail}") from None
            return self._stream.num_written - before

    def _writing(self, head: bytes, message: Message, first_chunk: int) -> Waits[None]:
        for number, parts in enumerate(self._frames.sending(head, message.tensors, first_chunk)):
            if number:
                yield PAUSE
            yield from self._stream.writing_all(parts)

    def recv(self, expect: Expect, timeout_s: float, *, finite: bool = False) -> Message:
        """Receive a message; see `Connection.recv`."""
        return block(self.receiving(expect, timeout_s, finite))

    def receiving(self, expect: Expect, timeout_s: float, finite: bool = False) -> Waits[Message]:
        """Receive a message, yielding what to wait for; see `Connection.recv`."""
        self.received_bytes, self._has_unread = 0, False
        with self._inside():
            before = self._stream.num_read
            self._socket.reading = TimeBudget(self.timeout_s, self.min_bytes_per_s)
            try:
                if not self._stream.pending:
                    yield from self._socket.awaiting_first(timeout_s)
                return (yield from self._reading(self._frames.receiving(expect, finite)))
            finally:
                self.received_bytes = self._stream.num_read - before

    def _reading(self, steps: Generator[memoryview, None, Message]) -> Waits[Message]:
        num_read = 0
        try:
            while True:
                view = next(steps)
                yield from self._stream.reading_into(view)
                # counted over small pieces, too: a refused payload is read in such, and may come without a gap
                if (num_read := num_read + len(view)) >= PIECE_BYTES:
                    num_read = 0
                    yield PAUSE
        except StopIteration as end:
            message: Message = end.value
            return message
        finally:
            steps.close()

    def watching(self, timeout_s: float) -> Waits[None]:
        """Wait while the connection is idle; raise `PeerLost` once the peer has closed it."""
        with self._inside():
            if self._has_unread or self._stream.pending:
                yield Wait(None, False, timeout_s)
            elif (yield Wait(self._socket, False, timeout_s)):
                self._has_unread = self._socket.check()

    def check(self) -> None:
        """Raise `PeerLost` if the peer has closed the connection; see `Connection.check`."""
        with self._inside():
            self._socket.check()

    def close(self) -> None:
        """End the connection; see `Connection.close`."""
        with self._lock:
            self.closed = True
            if self._open and self._num_inside == 0:
                self._open = False
                hang_up(self._socket.sock)
            elif self._open:
                # another thread still polls this descriptor: wake it, so that the last thread to leave closes the
                # descriptor
                with suppress(OSError):  # the peer may have closed the connection already
                    shut(self._socket.sock, socket.SHUT_RDWR)
        if self.on_close is not None:
            self.on_close()

    def cut(self, reason: str, detail: str) -> None:
        """Close the connection for a reason; threads that use it get a `PeerLost` with this reason."""
        self.why_closed = PeerLost(reason, detail)
        self.close()

    def _has_ended(self) -> bool:
        return self.closed

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Count the threads in the ``with`` block, and close the connection after an error within a message."""
        with self._lock:
            if self._has_ended():
                raise self.why_closed
            self._num_inside += 1
        try:
            yield
        except BaseException as error:
            was_closed = self._has_ended()
            if not (isinstance(error, Refused) and self._frames.in_step):
                self.close()
            if was_closed and isinstance(error, PeerLost | PeerTimeout):
                raise self.why_closed from None
            raise
        finally:
            with self._lock:
                self._num_inside -= 1
                if self._has_ended() and self._num_inside == 0 and self._open:
                    self._open = False
                    hang_up(self._socket.sock)


def _stream(sock: socket.socket, budget: TimeBudget) -> SocketStream:
    if not hasattr(sock, "getpeercert"):
        return SocketStream(sock, budget)
    from raafl.transport.tcp.tls import (
        TlsStream,  # local workers and ranks of torchrun need no TLS
    )

    return TlsStream(sock, budget)  # type: ignore[arg-type]
