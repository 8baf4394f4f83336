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

import hmac
import socket
import ssl
import struct
from collections.abc import Callable
from dataclasses import dataclass

from raafl.certs.files import Holder, holder_of
from raafl.sanitize import sanitize_text
from raafl.transport.codec import Refused
from raafl.transport.connection import PeerLost
from raafl.transport.tcp.credentials import ALPN, TOKEN_BYTES, LocalToken
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
    holder: Holder | None
    serial: int  # serial number of the client's certificate; 0 without one
    address: str  # ``HOST:PORT`` from which the client connects


def opening_stream(sock: socket.socket, timeout_s: float) -> SocketStream:
    """Return a stream over a plain or TLS socket, used only until the client is admitted.

    It takes from the socket only the bytes that are asked for, so that later bytes are left for the connection.
    """
    budget = TimeBudget(timeout_s)
    return TlsStream(sock, budget, 0) if isinstance(sock, ssl.SSLSocket) else SocketStream(sock, budget, 0)


def server_opening(
    stream: SocketStream, expected: LocalToken | str, address: str, authorize: Callable[[Peer], None]
) -> Peer:
    """Run the server's side of the authentication; return the authenticated client.

    Raises:
        Refused: the client was refused.
        PeerLost: the client closed the connection.
        PeerTimeout: the client was too slow.
    """
    certificate = _certified(stream, server=False) if isinstance(expected, str) else None
    hello = bytearray(_HELLO.size)
    stream.read_into(memoryview(hello)[:4])
    if hello[:4] != MAGIC:
        raise Refused("bad-magic", f"{bytes(hello[:4])!r} is no raafl client")
    stream.read_into(memoryview(hello)[4:])
    _, version, _, client, token = _HELLO.unpack(hello)
    try:
        if version != VERSION:
            raise Refused("bad-version", f"the client speaks version {version} of the protocol, this server {VERSION}")
        if isinstance(expected, LocalToken):
            if not hmac.compare_digest(token, expected.token):
                raise Refused("wrong-token", "the server was started by another command")
            peer = Peer(client, None, 0, address)
        else:
            assert certificate is not None
            peer = Peer(client, _site_of(certificate, expected), certificate.serial, address)
        authorize(peer)
    except Refused as refused:
        stream.write([_answer(f"{refused.reason}: {refused.detail}")])
        raise
    stream.write([_answer("")])
    return peer


def _site_of(certificate: _Certificate, federation: str) -> Holder:
    """Return the site that a client's certificate names; raise `Refused` if it is not valid for a client of ``federation``."""
    holder = certificate.holder
    if holder is None or holder.site is None:
        raise Refused("bad-certificate", "it names no site: it needs the URI raafl://FEDERATION/site/SITE")
    if holder.federation != federation:
        raise Refused("bad-certificate", f"it is of federation '{holder.federation}', this server of '{federation}'")
    if not certificate.is_for_its_role:
        raise Refused("bad-certificate", "it is for no client: it needs the extended key usage clientAuth")
    return holder


def client_opening(
    stream: SocketStream, client: int, credentials: LocalToken | str, revoked: Callable[[], frozenset[int]] = frozenset
) -> None:
    """Run the client's side of the authentication; return once the server has admitted this client.

    Raises:
        Refused: the server does not belong to this federation, or does not admit this client.
        PeerLost: the server closed the connection, or has no room now.
        PeerTimeout: the server was too slow.
    """
    token = bytes(TOKEN_BYTES)
    if isinstance(credentials, LocalToken):
        token = credentials.token
    else:
        certificate = _certified(stream, server=True)
        if certificate.holder != Holder(credentials):
            raise Refused("bad-certificate", f"the server's certificate is not of the server of '{credentials}'")
        if not certificate.is_for_its_role:
            raise Refused("bad-certificate", "the server's certificate has no extended key usage serverAuth")
        if certificate.serial in revoked():
            raise Refused("revoked", "the server's certificate was revoked")
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


@dataclass(frozen=True, slots=True)
class _Certificate:
    """The other end's certificate: holder, serial number, and whether its extended key usage is that of a client or server."""

    holder: Holder | None
    serial: int
    is_for_its_role: bool


def _certified(stream: SocketStream, *, server: bool) -> _Certificate:
    """Do the TLS handshake; return the certificate of the other end. ``server``: whether that must be a server's."""
    from cryptography import x509

    from raafl.certs.authority import is_for, uris_of

    assert isinstance(stream, TlsStream) and isinstance(stream.sock, ssl.SSLSocket)
    stream.handshake()
    if stream.sock.selected_alpn_protocol() != ALPN:
        raise Refused("bad-magic", "the other end speaks TLS, but is not raafl's")
    try:
        # OpenSSL accepts a certificate without any extended key usage for every purpose
        found = x509.load_der_x509_certificate(stream.sock.getpeercert(binary_form=True) or b"")
        return _Certificate(holder_of(uris_of(found)), found.serial_number, is_for(found, server=server))
    except (ValueError, x509.InvalidVersion):
        raise Refused("bad-certificate", "it cannot be read") from None


def _answer(text: str) -> bytes:
    data = text.encode()[:MAX_TEXT_BYTES]
    return _ANSWER.pack(MAGIC, VERSION, len(data)) + data
