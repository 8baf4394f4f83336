"""Transfer bytes over a connected socket, with deadlines that a slow peer cannot extend and a close that wakes every waiter."""

from __future__ import annotations

import errno
import math
import mmap
import select
import socket
import time
from collections.abc import Sequence
from typing import Protocol

from raafl.transport.codec import Refused
from raafl.transport.connection import PeerLost, PeerTimeout

AHEAD_BYTES = 64 << 10
"""How much is read ahead, so that a short message costs one system call."""

UNSENT_BYTES = 512 << 10
"""How much of a message the kernel may hold unsent, so that a send ends only when the peer takes the message."""

_MAX_PARTS = 64  # of one sendmsg; far below every system's IOV_MAX
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class TimeBudget:
    """Time for which a peer may keep this end waiting. Only waiting is charged, so a slow local end is not charged to the peer.

    The budget starts at ``timeout_s``. Each transferred byte earns 1 / ``min_bytes_per_s`` back, up to the initial value. So a
    silent peer is cut off after ``timeout_s``, and one that sends less than ``min_bytes_per_s`` soon afterwards.
    """

    def __init__(self, timeout_s: float, min_bytes_per_s: float = math.inf) -> None:
        """Start full. With an infinite rate bytes earn nothing, so that ``timeout_s`` bounds the sum of all waits."""
        self.timeout_s, self.min_bytes_per_s, self.left_s, self._silent_s = timeout_s, min_bytes_per_s, timeout_s, 0.0

    def waited(self, seconds: float) -> None:
        """Charge the seconds of a wait to the budget."""
        self.left_s -= seconds
        self._silent_s += seconds

    def moved(self, num_bytes: int) -> None:
        """Credit the budget for transferred bytes."""
        self.left_s = min(self.timeout_s, self.left_s + num_bytes / self.min_bytes_per_s)
        self._silent_s = 0.0

    def spent(self) -> PeerTimeout | Refused:
        """Return the error of a spent budget: a timeout for a silent peer, or a refusal named slow."""
        if self._silent_s >= 0.99 * self.timeout_s or self.min_bytes_per_s == math.inf:
            return PeerTimeout(f"nothing from the peer within {self.timeout_s:g} s")
        return Refused("slow", f"less than {self.min_bytes_per_s:g} bytes/s for {self.timeout_s:g} s")


class Stream(Protocol):
    """Interface of a byte stream that carries messages."""

    @property
    def num_read(self) -> int:
        """Number of bytes read from the wire so far."""
        ...

    @property
    def num_written(self) -> int:
        """Number of bytes written to the wire so far."""
        ...

    @property
    def pending(self) -> bool:
        """Whether bytes that were taken from the layer below wait to be read."""
        ...

    def read_into(self, view: memoryview) -> None:
        """Fill ``view``; raise `PeerLost`, `PeerTimeout`, or `Refused` if the rest of the stream cannot be used."""
        ...

    def write(self, parts: Sequence[memoryview | bytes]) -> None:
        """Write all parts; they may be changed afterwards. Raise `PeerLost`, `PeerTimeout` or `Refused`."""
        ...


class SocketStream:
    """A connected stream socket; one thread may read while another writes.

    Attributes:
        reading: time budget of the reads of one message; replaced for each message.
        writing: time budget of the writes of one message.
        num_read, num_written: number of bytes read and written so far.
    """

    def __init__(self, sock: socket.socket, budget: TimeBudget, ahead_bytes: int = AHEAD_BYTES) -> None:
        """Wrap a socket; with ``ahead_bytes`` up to so many bytes are read ahead, otherwise only what is requested."""
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            _tune(sock)
        self.sock, self.reading, self.writing = sock, budget, budget
        self.num_read = self.num_written = 0
        self._ahead = pages(ahead_bytes)
        self._start = self._end = 0
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)

    @property
    def pending(self) -> bool:
        """Whether bytes that were read ahead wait to be read."""
        return self._start < self._end

    def await_first(self, timeout_s: float) -> None:
        """Wait until bytes arrive or the stream ends; raise `PeerTimeout` if neither happens in time."""
        if not self.pending and not self._readable.poll(_milliseconds(timeout_s)):
            raise PeerTimeout(f"nothing from the peer within {timeout_s:g} s")

    def check(self) -> None:
        """Raise `PeerLost` if the peer closed the connection and all it sent was read; do not wait."""
        try:
            gone = self._readable.poll(0) and not self.sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise connection_lost(error) from None
        if gone:
            raise connection_ended()

    def read_into(self, view: memoryview) -> None:
        """Fill ``view``; see `Stream.read_into`."""
        filled = 0
        while filled < len(view):
            if self._start < self._end:
                got = min(self._end - self._start, len(view) - filled)
                view[filled : filled + got] = self._ahead[self._start : self._start + got]
                self._start += got
            elif len(view) - filled >= len(self._ahead):
                got = self._receive(view[filled:])
            else:
                got, self._start, self._end = 0, 0, 0
                self._end = self._receive(self._ahead)
            filled += got
            self.num_read += got

    def write(self, parts: Sequence[memoryview | bytes]) -> None:
        """Write all parts; see `Stream.write`. A peer that does not read, or reads too slowly, raises `PeerTimeout`."""
        views = [memoryview(part) for part in parts if len(part)]
        first = 0
        while first < len(views):
            try:
                sent = self.sock.sendmsg(views[first : first + _MAX_PARTS])
            except (BlockingIOError, InterruptedError):
                self._wait(self._writable, self.writing)
                continue
            except OSError as error:
                raise connection_lost(error) from None
            self.writing.moved(sent)
            self.num_written += sent
            while sent:
                step = min(sent, len(views[first]))
                views[first] = views[first][step:]
                sent -= step
                first += not len(views[first])

    def _receive(self, view: memoryview) -> int:
        while True:
            try:
                got = self.sock.recv_into(view)
            except (BlockingIOError, InterruptedError):
                self._wait(self._readable, self.reading)
                continue
            except OSError as error:
                raise connection_lost(error) from None
            if got == 0:
                raise connection_ended()
            self.reading.moved(got)
            return got

    def _wait(self, poll: select.poll, budget: TimeBudget) -> None:
        # After the last wait the caller tries once more, since what came while this process slept is not late.
        if budget.left_s <= 0:
            raise budget.spent()
        start = time.monotonic()
        poll.poll(_milliseconds(budget.left_s))
        budget.waited(time.monotonic() - start)


def pages(num_bytes: int) -> memoryview:
    """Return zeroed memory in pages of its own, which are allocated at first use and returned to the system when freed.

    Buffers of this size from malloc would stay with the process, one per thread.
    """
    if not num_bytes:
        return memoryview(b"")
    return memoryview(mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def hang_up(sock: socket.socket, *, abruptly: bool = False) -> None:
    """Close a socket and wake every thread that waits on it.

    With ``abruptly``, reset the connection instead of ending it in order.
    """
    try:
        if abruptly:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        else:
            shut(sock, socket.SHUT_RDWR)
    except OSError:
        pass  # not connected any more
    sock.close()


def shut(sock: socket.socket, how: int) -> None:
    """Shut down a socket; a TLS socket is shut down below TLS.

    `ssl.SSLSocket.shutdown` drops the TLS state, after which another thread's read would return ciphertext as if it were data.
    """
    socket.socket.shutdown(sock, how)


def drain(sock: socket.socket, timeout_s: float, most_bytes: int) -> None:
    """Read and discard what a peer sends until it hangs up: bytes left unread would reset the connection before the peer has read.

    Args:
        sock: socket that is connected.
        timeout_s: seconds for the whole call.
        most_bytes: number of bytes after which the call gives up.
    """
    until, scratch = time.monotonic() + timeout_s, bytearray(4096)
    readable = select.poll()
    readable.register(sock, select.POLLIN)
    while most_bytes > 0 and readable.poll(_milliseconds(until - time.monotonic())):
        try:
            got = socket.socket.recv_into(sock, scratch)
        except OSError:
            return
        if not got:
            return
        most_bytes -= got


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {**_KEEPALIVE, "TCP_NOTSENT_LOWAT": UNSENT_BYTES}
    for name, value in options.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _milliseconds(seconds: float) -> int:
    return min(max(0, math.ceil(seconds * 1000)), 2**31 - 1)


def connection_ended() -> PeerLost:
    """Return the error of a peer that ended the connection."""
    return PeerLost("connection-closed", "the peer ended the connection")


def connection_lost(error: OSError) -> PeerLost:
    """Return the error for a connection that a system error broke."""
    reasons = {errno.ECONNRESET: "connection-reset", errno.EPIPE: "connection-closed"}
    return PeerLost(reasons.get(error.errno or 0, "connection-broken"), error.strerror or str(error))
