"""Authenticate both sides of a new connection: by TLS or a token, the client's id, and the server's answer in words.

========= ====== =======================================================================================================
message   from   content; numbers are little-endian
========= ====== =======================================================================================================
HELLO     client magic (4), version (2), zero (2), client id (4), token (32; zeros where TLS has proven the site)
ANSWER    server magic (4), version (2), length (2), text: empty = let in, else REASON: DETAIL
========= ====== =======================================================================================================

Over TLS both messages are encrypted, and a peer without a certificate gets nothing but a TLS alert. A token is sent in the
clear: it is of one run on one machine, to a socket that its parent process has bound before.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Callable
from dataclasses import dataclass

from raafl.sanitize import sanitize_text
from raafl.transport.codec import Refused
from raafl.transport.connection import PeerLost
from raafl.transport.tcp.credentials import TOKEN_BYTES, ClientLogin, ServerLogin
from raafl.transport.tcp.stream import SocketStream, TimeBudget
from raafl.transport.tcp.tls import TlsStream

MAGIC, VERSION = b"RAJN", 2
MAX_TEXT_BYTES = 1000
_HELLO = struct.Struct(f"<4sHHI{TOKEN_BYTES}s")
_ANSWER = struct.Struct("<4sHH")
_FOR_NOW = ("busy", "too-often", "stopped", "failed")
"""Reasons for which a client should try again later."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A client that wants to connect, with what the server knows about it so far."""

    client: int  # id that the client asks for
    # site named in the client's certificate; None = a process of the same command, which has the token
    site: str | None
    serial: int  # serial number of the client's certificate; 0 without one
    address: str  # ``HOST:PORT`` from which the client connects


def opening_stream(sock: socket.socket, timeout_s: float) -> SocketStream:
    """Return a stream over a plain or TLS socket, used only until the client is admitted.

    It takes from the socket only the bytes that are asked for, so that later bytes are left for the connection.
    """
    budget = TimeBudget(timeout_s)
    return TlsStream(sock, budget, 0) if isinstance(sock, ssl.SSLSocket) else SocketStream(sock, budget, 0)


def server_opening(stream: SocketStream, login: ServerLogin, address: str, authorize: Callable[[Peer], None]) -> Peer:
    """Run the server's side of the authentication; return the authenticated client.

    Raises:
        Refused: the client was refused.
        PeerLost: the client closed the connection.
        PeerTimeout: the client was too slow.
    """
    proof = login.begin(stream)
    hello = bytearray(_HELLO.size)
    stream.read_into(memoryview(hello)[:4])
    if hello[:4] != MAGIC:
        raise Refused("bad-magic", f"{bytes(hello[:4])!r} is no raafl client")
    stream.read_into(memoryview(hello)[4:])
    _, version, _, client, token = _HELLO.unpack(hello)
    try:
        if version != VERSION:
            raise Refused("bad-version", f"the client speaks version {version} of the protocol, this server {VERSION}")
        site, serial = proof(token)
        peer = Peer(client, site, serial, address)
        authorize(peer)
    except Refused as refused:
        stream.write([_answer(f"{refused.reason}: {refused.detail}")])
        raise
    stream.write([_answer("")])
    return peer


def client_opening(stream: SocketStream, client: int, login: ClientLogin) -> None:
    """Run the client's side of the authentication; return once the server has admitted this client.

    Raises:
        Refused: the server does not belong to this federation, or does not admit this client.
        PeerLost: the server closed the connection, or has no room now.
        PeerTimeout: the server was too slow.
    """
    token = login.begin(stream)
    stream.write([_HELLO.pack(MAGIC, VERSION, 0, client, token)])
    head = bytearray(_ANSWER.size)
    stream.read_into(memoryview(head)[:4])
    if head[:4] != MAGIC:
        raise Refused("bad-magic", f"what answers is no raafl server, or expects a certificate ({bytes(head[:4])!r})")
    stream.read_into(memoryview(head)[4:])
    _, version, length = _ANSWER.unpack(head)
    if length > MAX_TEXT_BYTES:
        raise Refused("bad-length", f"an answer of {length} bytes")
    text = bytearray(length)
    stream.read_into(memoryview(text))
    if text:
        reason, _, detail = sanitize_text(text.decode(errors="replace"), MAX_TEXT_BYTES).partition(": ")
        if reason in _FOR_NOW:
            raise PeerLost("connection-refused", f"{reason}: {detail}")
        raise Refused(reason, detail)
    if version != VERSION:
        raise Refused("bad-version", f"the server speaks version {version} of the protocol, this client {VERSION}")


def _answer(text: str) -> bytes:
    data = text.encode()[:MAX_TEXT_BYTES]
    return _ANSWER.pack(MAGIC, VERSION, len(data)) + data
