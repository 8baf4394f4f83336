"""One server and its clients over each transport, in this process, for the suite that all transports pass."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist

from raafl.errors import parse_address
from raafl.transport import Connection, ConnectOptions, Transport
from raafl.transport.gloo import GlooConnection
from raafl.transport.tcp.transport import TcpTransport
from raafl.transport.torchrun import TorchrunTransport
from tests.helpers.certificates import TOKEN, federation

HOST = "127.0.0.1"
WAIT_S = 60.0
NUM_CLIENTS = 300  # each test takes ids that none before it has had: a rank comes once
SERVER, SITE = federation().server, federation().site()  # made here: processes that are forked later know them, too


def ranks(place: int, client: int, tls: bool, wait_s: float) -> Transport:
    """One end among ranks that meet at the store of port ``place``."""
    store = dist.TCPStore(HOST, place, None, False, timeout=timedelta(seconds=WAIT_S), wait_for_workers=False)
    return TorchrunTransport(client, NUM_CLIENTS, store, wait_s, local=True)


def tcp(place: str, client: int, tls: bool, wait_s: float) -> Transport:
    """One end of sockets at the address ``place``."""
    credentials = TOKEN if not tls else SITE if client else SERVER
    return TcpTransport(ConnectOptions(NUM_CLIENTS, wait_s, WAIT_S, place, credentials, client=client))


ENDS = {"ranks": ranks, "tcp": tcp}
"""For each transport what makes one end of it; the suite fails while one that is in the table lacks a line here."""

KINDS = {
    "ranks": ("ranks", False, False),
    "ranks, staged": ("ranks", True, False),
    "tcp": ("tcp", False, False),
    "tcp, staged": ("tcp", True, False),
    "tcp, TLS": ("tcp", False, True),
}
"""Name, whether all tensors pass through staging memory as those of GPUs do, and whether it is TLS."""


def started(num_threads: int) -> ThreadPoolExecutor:
    """A pool all of whose threads are there: none is started in the middle of a test, which would have left it behind."""
    pool, meet = ThreadPoolExecutor(num_threads), threading.Barrier(num_threads)
    list(pool.map(lambda _: meet.wait(), range(num_threads)))
    return pool


class Hub:
    """A server that listens, and whoever it lets in."""

    def __init__(
        self, kind: str, admit: Callable[[int], None] = lambda client: None, *, listening: bool = True
    ) -> None:
        """Enter; with ``listening`` listen at once. ``admit`` may refuse a client."""
        self.name, self._staged, self._tls = KINDS[kind]
        self._admit, self._next, self._awaited = admit, 0, 0
        self._quiet: socket.socket | None = None
        self.refused: queue.Queue[str] = queue.Queue()
        self._connects: dict[int, queue.Queue[Callable[[], Connection]]] = {
            n + 1: queue.Queue() for n in range(NUM_CLIENTS)
        }
        self._pairs: list[Connection] = []
        self.pool = started(12)
        self.store, self.place = None, f"{HOST}:0"
        if self.name == "ranks":
            self.store = dist.TCPStore(HOST, 0, None, True, timeout=timedelta(seconds=WAIT_S), wait_for_workers=False)
            self.place = self.store.port
        self.server = self._end(0).__enter__()
        if self.server.address:
            self.place = self.server.address.partition(",")[0]
        if listening:
            self.listen()

    def _end(self, client: int, wait_s: float = WAIT_S) -> Transport:
        return ENDS[self.name](self.place, client, self._tls, wait_s)

    def listen(self) -> None:
        """Let clients in."""
        self.server.listen(self._take, self.refused.put)

    def _take(self, client: int, peer: str, connect: Callable[[], Connection]) -> None:
        self._admit(client)
        self._connects.setdefault(client, queue.Queue()).put(connect)

    def new_client(self) -> int:
        """An id that has not been used."""
        self._next += 1
        return self._next

    def client(self, client: int, wait_s: float = WAIT_S) -> Transport:
        """A client's end."""
        return self._end(client, wait_s)

    def accepted(self, client: int) -> Connection:
        """The server's end of a client's next connection."""
        return self._kept(self._connects[client].get(timeout=WAIT_S)())

    def ends(self, client: int | None = None) -> tuple[Connection, Connection]:
        """The server's and the client's end of a new connection."""
        client = client or self.new_client()
        theirs = self.pool.submit(self.client(client).connect)
        server = self.accepted(client)
        return server, self._kept(theirs.result(WAIT_S))

    def _kept(self, pair: Connection) -> Connection:
        self._pairs.append(pair)
        if self._staged:
            staging(pair).are_needed = lambda tensors: True
        return pair

    def silent(self) -> None:
        """Have a client come as far as it can without a word: a rank that is awaited, a caller that does not speak."""
        if self.name == "ranks":
            self._awaited = self.new_client()
            self.pool.submit(self.accepted, self._awaited)
        else:
            self._quiet = socket.create_connection(parse_address(self.place))

    def close(self) -> None:
        """Leave, and close what was made."""
        if self._awaited:
            self._pairs.append(self.client(self._awaited).connect())
        self.server.__exit__(None, None, None)
        self.pool.shutdown()
        for pair in self._pairs:
            pair.close()
        if self._quiet is not None:
            self._quiet.close()

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def staging(pair: Connection):
    """A pair's staging memory."""
    return pair.staging if isinstance(pair, GlooConnection) else pair._frames.staging


def limit_drained(pair: Connection, num_bytes: int) -> None:
    """Have a pair read no refused payload longer than this to its end."""
    (pair if isinstance(pair, GlooConnection) else pair._frames).drain_bytes = num_bytes


def write_raw(pair: Connection, data: bytes) -> None:
    """Send bytes that are no message."""
    if isinstance(pair, GlooConnection):
        pair._out_memory[: len(data)] = data
        pair._send_first(len(data), 5)
    else:
        pair._stream.write([data])
