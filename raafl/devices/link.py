"""Measure the network link between two machines: one sends requests, the other answers. Received data are discarded."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import time
from dataclasses import dataclass

from raafl.errors import BadInput, parse_address

MAGIC = b"RAAFLNK1"
MOST_BYTES = 1 << 28
DEADLINE_S = 30.0

_QUESTION = struct.Struct("!8scQ")
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Link:
    """Measured network link of a client: bytes per second in each direction, and one-way latency in seconds."""

    down_bytes_per_s: float
    up_bytes_per_s: float
    latency_s: float


class Answerer:
    """Server for measuring links; it answers one peer after another."""

    def __init__(self, address: str, deadline_s: float = DEADLINE_S) -> None:
        """Bind the address; port 0 picks a free port. Raises `BadInput` if it cannot be bound."""
        host, port = parse_address(address)
        self._deadline_s = deadline_s
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            raise BadInput(
                f"address is '{address}', on which this machine cannot listen ({error.strerror or error}): give another "
                "HOST:PORT"
            ) from error
        self.port: int = self._listener.getsockname()[1]

    def serve(self, num_peers: int | None = None) -> None:
        """Answer the measuring requests of ``num_peers`` peers, one after another; None = until `close`.

        A connection is closed when the peer sends anything but such a request.
        """
        left = math.inf if num_peers is None else num_peers
        while left > 0:
            try:
                peer, _ = self._listener.accept()
            except OSError:  # closed
                return
            with peer, contextlib.suppress(OSError):
                peer.settimeout(self._deadline_s)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while self._answer(peer):
                    pass
            left -= 1

    def _answer(self, peer: socket.socket) -> bool:
        question = _take(peer, _QUESTION.size)
        if len(question) < _QUESTION.size:
            return False
        magic, kind, size = _QUESTION.unpack(question)
        if magic != MAGIC or size > MOST_BYTES or kind not in b"pdu":
            return False
        if kind == b"d":
            _send(peer, size)
        else:
            if kind == b"u" and _drop(peer, size) < size:
                return False
            peer.sendall(kind)
        return True

    def close(self) -> None:
        """Stop listening; `serve` then returns."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in accept
        self._listener.close()


def measure_link(address: str, duration_s: float = 2.0, deadline_s: float = DEADLINE_S) -> Link:
    """Measure the network link to a machine on which `raafl plan --answer` runs.

    Latency is half of the shortest of ten round trips. For each direction, transfers of growing size are timed, and the
    last one counts.

    Raises:
        BadInput: no raafl answers at the address.
    """
    host, port = parse_address(address)
    try:
        with socket.create_connection((host, port), timeout=deadline_s) as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            round_s = min(_ask(peer, b"p", 0) for _ in range(10))
            return Link(_rate(peer, b"d", duration_s, round_s), _rate(peer, b"u", duration_s, round_s), round_s / 2)
    except OSError as error:
        raise BadInput(
            f"address is '{address}', where no `raafl plan --answer` answers ({error.strerror or error}): run "
            f"`raafl plan --answer {address}` there"
        ) from error


def _rate(peer: socket.socket, kind: bytes, duration_s: float, round_s: float) -> float:
    size = _CHUNK
    while True:
        took_s = _ask(peer, kind, size)
        if took_s >= duration_s / 4 or 2 * size > MOST_BYTES:
            return size / max(took_s - round_s, took_s / 10)  # one round trip is the question's
        size *= 2


def _ask(peer: socket.socket, kind: bytes, size: int) -> float:
    """Send a question; return the seconds until its answer is complete."""
    begin_s = time.perf_counter()
    peer.sendall(_QUESTION.pack(MAGIC, kind, size))
    if kind == b"u":
        _send(peer, size)
    wanted = size if kind == b"d" else 1
    if _drop(peer, wanted) < wanted:
        raise ConnectionError("the peer answered with another protocol")
    return time.perf_counter() - begin_s


def _send(peer: socket.socket, size: int) -> None:
    chunk = os.urandom(_CHUNK)
    for start in range(0, size, _CHUNK):
        peer.sendall(chunk[: min(_CHUNK, size - start)])


def _take(peer: socket.socket, size: int) -> bytes:
    """Receive ``size`` bytes, or fewer if the peer ends."""
    found = b""
    while len(found) < size and (piece := peer.recv(size - len(found))):
        found += piece
    return found


def _drop(peer: socket.socket, size: int) -> int:
    """Receive and discard ``size`` bytes; return how many came."""
    buffer, got = bytearray(_CHUNK), 0
    while got < size and (more := peer.recv_into(buffer, min(_CHUNK, size - got))):
        got += more
    return got
