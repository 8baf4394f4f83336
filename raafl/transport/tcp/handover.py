"""Hand accepted sockets from the process that listens to the process of the run that a client asks for.

A client of a server for many runs sends, before TLS, 40 bytes that name a run by a digest. The process that listens reads just
these, and passes the socket to the run's process, with which the client then does the TLS handshake: nothing is proxied, and a
connection does not hang on the process that accepted it. The client repeats the digest within TLS, so that nobody on the way can
lead it to another run.

====== ==== ============================
offset size field
====== ==== ============================
0      4    magic ``RAFR``
4      2    version
6      2    zero
8      32   SHA-256 of the run's name
====== ==== ============================
"""

from __future__ import annotations

import hashlib
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from raafl.transport.codec import Refused
from raafl.transport.tcp.stream import SocketStream, Wait, Waits

MAGIC, VERSION = b"RAFR", 1
_PREAMBLE = struct.Struct("<4sHH32s")


def digest_of(run: str) -> bytes:
    """Return the 32 bytes by which a client names a run."""
    return hashlib.sha256(b"raafl run\0" + run.encode()).digest()


def preamble(run: str) -> bytes:
    """Return the bytes that a client sends before TLS, which name the run that it asks for."""
    return _PREAMBLE.pack(MAGIC, VERSION, 0, digest_of(run))


PassOn = Callable[[socket.socket, bytes], bool]
"""Function that passes a connection to the process of the run with a digest.

It returns False if that process is not there at the moment, raises `BlockingIOError` if too many connections wait there already,
and `Refused` if the run is not offered. It is called on the thread of the sockets.
"""

RUN_ENDED, RUN_FAILED = "run-ended", "run-failed"
"""Reason codes by which a client learns that the run it asks for is over, so that it does not try again."""

PASSED = Refused("passed")
"""Result of `passing` for a connection that another process has."""

_PATIENCE_S, _BREATH_S = 2.0, 0.01


def passing(stream: SocketStream, pass_on: PassOn) -> Waits[Refused | None]:
    """Pass a caller on to the run that it asks for, if it asks for one.

    Returns:
        None for a caller that asks for no run, `PASSED`, or why it has to be refused once it has authenticated.

    Raises:
        Refused: the caller speaks another version.
        PeerLost: the caller closed the connection.
        PeerTimeout: the caller was too slow.
    """
    digest = yield from asked_run(stream)
    if digest is None:
        return None
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            if pass_on(stream.sock, digest):
                return PASSED
            return Refused("stopped", "the run has no process at the moment: try again soon")
        except Refused as refused:
            return refused
        except BlockingIOError:
            if time.monotonic() > until:
                return Refused("busy", "too many clients connect to this run at once: try again later")
        yield Wait(None, False, _BREATH_S)


def asked_run(stream: SocketStream) -> Waits[bytes | None]:
    """Read which run a caller asks for, and not a byte more; return its digest, None for a caller that begins with TLS.

    Raises:
        Refused: the caller speaks another version.
        PeerLost: the caller closed the connection.
        PeerTimeout: the caller was too slow.
    """
    yield from stream.awaiting_first(stream.reading.timeout_s)
    try:
        first = stream.sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        first = b""
    if first != MAGIC[:1]:  # a TLS handshake begins with 0x16, and fails by itself for any other byte
        return None
    head = bytearray(_PREAMBLE.size)
    yield from stream.reading_into(memoryview(head))
    magic, version, _, digest = _PREAMBLE.unpack(head)
    if magic != MAGIC or version != VERSION:
        raise Refused("bad-version", f"the client asks for a run by version {version}, this server knows {VERSION}")
    return bytes(digest)


class PassedSockets(socket.socket):
    """Unix datagram socket on which another process passes accepted connections; it takes the place of a listening socket."""

    def listen(self, backlog: int = 0) -> None:
        """Do nothing: the other process listens."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection and its peer's address; raises as `socket.accept`."""
        _, descriptors, _, _ = socket.recv_fds(self, 1, 1)
        if not descriptors:
            raise ConnectionAbortedError("no socket was passed")
        connection = socket.socket(fileno=descriptors[0])
        try:
            return connection, connection.getpeername()
        except OSError:
            connection.close()
            raise ConnectionAbortedError("the caller has gone") from None


def inherited_socket(descriptor: int) -> socket.socket:
    """Return the inherited socket with a descriptor: one that listens, or one on which connections are passed.

    Raises:
        OSError: it is neither.
    """
    found = socket.socket(fileno=descriptor)
    if found.family == socket.AF_UNIX and found.type == socket.SOCK_DGRAM:
        return PassedSockets(fileno=found.detach())
    if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise OSError("the socket does not listen")
    return found
