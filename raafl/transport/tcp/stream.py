"""Transfer bytes over a socket, with deadlines that a slow peer cannot extend; closing wakes all threads that wait.

Reading and writing are generators that yield what to wait for (`Wait`), so that one code serves two drivers: `block` waits on
the calling thread, and the loop of a server's sessions waits for thousands of sockets at a time.
"""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import select
import socket
import struct
import termios
import time
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from raafl.transport.codec import Refused
from raafl.transport.connection import PeerLost, PeerTimeout

AHEAD_BYTES = 64 << 10
"""Bytes that are read ahead, so that a short message costs one system call."""

UNSENT_BYTES = 512 << 10
"""Unsent bytes that the kernel may buffer: few, so that a send ends only when the peer takes the message."""

_MAX_PARTS = 64  # buffers per call of sendmsg, far below IOV_MAX of any system
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


T = TypeVar("T")


class Wait(NamedTuple):
    """Request to wait; the result is whether the socket is ready, False after the time."""

    stream: SocketStream | None  # None = only the time is waited for
    writes: bool  # whether to wait for writing; False = for reading
    timeout_s: float  # seconds to wait at most


Waits = Generator[Wait, bool, T]
"""Steps of a transfer that yield what to wait for; T is their result."""

PAUSE = Wait(None, False, 0.0)
"""Yielded between the pieces of a long transfer, so that a loop can see to other connections."""


def block(steps: Waits[T]) -> T:
    """Perform the steps of a transfer, waiting on this thread; return their result."""
    is_ready: Any = None
    try:
        while True:
            wait = steps.send(is_ready)
            is_ready = wait.stream is not None and wait.stream.poll(wait.writes, wait.timeout_s)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


class TimeBudget:
    """Limit on the time that this side waits for a peer. Only waiting counts, so a slow local side is not charged to the peer.

    The budget starts at ``timeout_s``. Each transferred byte adds 1 / ``min_bytes_per_s`` seconds, up to the initial
    value. So a silent peer is cut off after ``timeout_s``, and a peer slower than ``min_bytes_per_s`` is cut off a little
    later.
    """

    def __init__(self, timeout_s: float, min_bytes_per_s: float = math.inf) -> None:
        """Create a budget of ``timeout_s`` seconds of waiting, which grows with each byte unless the rate is infinite."""
        self.timeout_s, self.min_bytes_per_s, self.left_s, self._silent_s = timeout_s, min_bytes_per_s, timeout_s, 0.0

    def waited(self, seconds: float) -> None:
        """Subtract the duration of a wait from the budget."""
        self.left_s -= seconds
        self._silent_s += seconds

    def moved(self, num_bytes: int) -> None:
        """Extend the budget for transferred bytes, each by 1 / ``min_bytes_per_s`` seconds, up to the initial value."""
        self.left_s = min(self.timeout_s, self.left_s + num_bytes / self.min_bytes_per_s)
        self._silent_s = 0.0

    def spent(self) -> PeerTimeout | Refused:
        """Return the error for an exhausted budget: `PeerTimeout` if the peer was silent, `Refused` if it was slow."""
        if self._silent_s >= 0.99 * self.timeout_s or self.min_bytes_per_s == math.inf:
            return PeerTimeout(f"nothing from the peer within {self.timeout_s:g} s")
        return Refused("slow", f"less than {self.min_bytes_per_s:g} bytes/s for {self.timeout_s:g} s")


class Stream(Protocol):
    """Interface of a byte stream that transports messages."""

    @property
    def num_read(self) -> int:
        """Number of bytes received so far."""
        ...

    @property
    def num_written(self) -> int:
        """Number of bytes sent so far."""
        ...

    @property
    def pending(self) -> bool:
        """Whether bytes were already taken from the socket and can be read without waiting."""
        ...

    def read_into(self, view: memoryview) -> None:
        """Read bytes until ``view`` is full.

        Raise `PeerLost`, `PeerTimeout`, or `Refused` if the stream is invalid from here on.
        """
        ...

    def write(self, parts: Sequence[memoryview | bytes]) -> None:
        """Write all parts; afterwards the caller may change them. Raise `PeerLost`, `PeerTimeout` or `Refused`."""
        ...


class SocketStream:
    """Byte stream over a connected socket; one thread may read while another writes.

    `reading`: time budget for receiving one message; replaced for each message.
    `writing`: time budget for sending one message.
    `num_read`, `num_written`: number of bytes received and sent so far.
    """

    def __init__(self, sock: socket.socket, budget: TimeBudget, ahead_bytes: int = AHEAD_BYTES) -> None:
        """Create a stream on a socket; it may read up to ``ahead_bytes`` more than is asked for."""
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            _tune(sock)
        self.sock, self.reading, self.writing = sock, budget, budget
        self.num_read = self.num_written = 0
        self._ahead, self._ahead_bytes = _NOTHING, ahead_bytes
        self._start = self._end = 0
        self._polls: dict[bool, select.poll] = {}

    @property
    def pending(self) -> bool:
        """Whether bytes were read ahead and wait in memory."""
        return self._start < self._end

    def poll(self, writes: bool, timeout_s: float) -> bool:
        """Wait on this thread until the socket takes bytes (``writes``) or has some; return whether it does."""
        if (poll := self._polls.get(writes)) is None:
            poll = self._polls[writes] = select.poll()
            poll.register(self.sock, select.POLLOUT if writes else select.POLLIN)
        return bool(poll.poll(_milliseconds(timeout_s)))

    def num_queued(self) -> int:
        """Return the number of sent bytes that the peer has not acknowledged; 0 if the system does not tell."""
        try:
            return int(struct.unpack("i", fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(4)))[0])
        except (OSError, ValueError):  # another thread may have closed the socket, whose descriptor is then -1
            return 0

    def awaiting_first(self, timeout_s: float) -> Waits[None]:
        """Wait until bytes arrive or the stream ends; raise `PeerTimeout` if neither happens in time."""
        if not self.pending and not (yield Wait(self, False, timeout_s)):
            raise PeerTimeout(f"nothing from the peer within {timeout_s:g} s")

    def check(self) -> bool:
        """Raise `PeerLost` if the peer has closed the connection and everything that it sent was read; return at once.

        The result is whether bytes of the peer wait to be read.
        """
        try:
            if not self.poll(False, 0):
                return self.pending
            gone = not self.sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return self.pending
        except OSError as error:
            raise connection_lost(error) from None
        if gone:
            raise connection_ended()
        return True

    def read_into(self, view: memoryview) -> None:
        """Read bytes until ``view`` is full; see `Stream.read_into`."""
        block(self.reading_into(view))

    def reading_into(self, view: memoryview) -> Waits[None]:
        """Read bytes until ``view`` is full; see `Stream.read_into`."""
        filled = 0
        while filled < len(view):
            if self._start < self._end:
                got = min(self._end - self._start, len(view) - filled)
                view[filled : filled + got] = self._ahead[self._start : self._start + got]
                self._start += got
                if self._start == self._end:
                    self._give_back()
            elif len(view) - filled >= self._ahead_bytes:
                got = yield from self._receiving(view[filled:])
            else:
                got = 0
                yield from self._reading_ahead()
            filled += got
            self.num_read += got

    def _reading_ahead(self) -> Waits[None]:
        """Read into a buffer that exists only while it has unread bytes, since most connections are idle."""
        memory = _take_memory(self._ahead_bytes)
        try:
            end = yield from self._receiving(memory)
        except BaseException:
            _give_memory(memory)
            raise
        self._ahead, self._start, self._end = memory, 0, end

    def _give_back(self) -> None:
        memory, self._ahead, self._start, self._end = self._ahead, _NOTHING, 0, 0
        _give_memory(memory)

    def write(self, parts: Sequence[memoryview | bytes]) -> None:
        """Write all parts; see `Stream.write`. A peer that does not read, or reads too slowly, raises `PeerTimeout`."""
        block(self.writing_all(parts))

    def writing_all(self, parts: Sequence[memoryview | bytes]) -> Waits[None]:
        """Write all parts; see `write`."""
        views = [memoryview(part) for part in parts if len(part)]
        first = 0
        while first < len(views):
            try:
                sent = self.sock.sendmsg(views[first : first + _MAX_PARTS])
            except (BlockingIOError, InterruptedError):
                yield from self._waiting(True, self.writing)
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

    def _receiving(self, view: memoryview) -> Waits[int]:
        while True:
            try:
                got = self.sock.recv_into(view)
            except (BlockingIOError, InterruptedError):
                yield from self._waiting(False, self.reading)
                continue
            except OSError as error:
                raise connection_lost(error) from None
            if got == 0:
                raise connection_ended()
            self.reading.moved(got)
            return got

    def _waiting(self, writes: bool, budget: TimeBudget) -> Waits[None]:
        # data that arrives during the last wait is in time, so the caller tries once more before this raises
        if budget.left_s <= 0:
            raise budget.spent()
        start = time.monotonic()
        yield Wait(self, writes, budget.left_s)
        budget.waited(time.monotonic() - start)


_NOTHING = memoryview(b"")
_MAX_SPARE = 16
_spare: list[memoryview] = []
"""Memory of `AHEAD_BYTES` that no stream reads into; taken and given back by single operations, which are atomic."""


def _take_memory(num_bytes: int) -> memoryview:
    """Return memory for reading, mapped outside of malloc, which would keep blocks of this size for each thread."""
    try:
        return _spare.pop() if num_bytes == AHEAD_BYTES else _mapped(num_bytes)
    except IndexError:
        return _mapped(num_bytes)


def _mapped(num_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _give_memory(memory: memoryview) -> None:
    if len(memory) == AHEAD_BYTES and len(_spare) < _MAX_SPARE:
        _spare.append(memory)


def hang_up(sock: socket.socket, *, abruptly: bool = False) -> None:
    """Close a socket and wake every thread that waits on it.

    With ``abruptly``, the connection is reset instead of closed in order.
    """
    try:
        if abruptly:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        else:
            shut(sock, socket.SHUT_RDWR)
    except OSError:
        pass  # the socket is no longer connected
    sock.close()


def shut(sock: socket.socket, how: int) -> None:
    """Shut down a socket; for a TLS socket, only the TCP connection below TLS.

    After `ssl.SSLSocket.shutdown` another thread's read would return encrypted bytes as if they were data.
    """
    socket.socket.shutdown(sock, how)


def draining(sock: socket.socket, timeout_s: float, most_bytes: int) -> Waits[None]:
    """Read and discard what a peer still sends, so that unread bytes do not reset the connection before the peer has read ours."""
    stream, until, scratch = SocketStream(sock, TimeBudget(timeout_s), 0), time.monotonic() + timeout_s, bytearray(4096)
    while most_bytes > 0 and (yield Wait(stream, False, max(until - time.monotonic(), 0.0))):
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
    """Return the error for a peer that has closed the connection."""
    return PeerLost("connection-closed", "the peer ended the connection")


def connection_lost(error: OSError) -> PeerLost:
    """Convert a system error that broke the connection to a `PeerLost`."""
    reasons = {errno.ECONNRESET: "connection-reset", errno.EPIPE: "connection-closed"}
    return PeerLost(reasons.get(error.errno or 0, "connection-broken"), error.strerror or str(error))
