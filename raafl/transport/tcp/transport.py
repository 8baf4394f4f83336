"""Transport for clients on other machines that come and go: a `Listener` on the server, `connect` on the client."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable
from typing import Self
from weakref import WeakKeyDictionary

import torch

from raafl.errors import BadInput, parse_address
from raafl.transport.codec import Refused
from raafl.transport.connection import Connection
from raafl.transport.tcp.connection import TcpConnection
from raafl.transport.tcp.listener import Listener, Peer, TokenBucket, connect
from raafl.transport.tcp.loop import SocketLoop
from raafl.transport.transport import Admit, ConnectOptions, Transport


class TcpTransport(Transport):
    """Transport over TLS, or over plain TCP within one machine; clients must authenticate before anything is sent to them."""

    comes_and_goes = True

    def __init__(self, meeting: ConnectOptions) -> None:
        if meeting.credentials is None:
            raise BadInput(
                "credentials are missing, so peers cannot authenticate: give --certs, or --tls_ca, --tls_cert, "
                "--tls_key"
            )
        credentials = meeting.credentials
        self._meeting, self.client, self.certified = meeting, meeting.client, credentials.certified
        if not credentials.certified and not is_loopback(meeting.address):
            raise BadInput(
                f"address is '{meeting.address}', which other machines can reach, but an access token is only for "
                "this machine: use certificates (`raafl certs`)"
            )
        self._credentials = credentials
        self._login = credentials.client_login() if meeting.client else None
        self._lock = threading.Lock()
        self._admitted: WeakKeyDictionary[TcpConnection, Peer] = WeakKeyDictionary()

    def __enter__(self) -> Self:
        """Bind the port and start the thread of the sockets; connections are refused until `listen` is called."""
        self.loop = SocketLoop()
        self._listener = Listener(
            self._meeting.address,
            self._credentials,
            self._let_in,
            lambda reason: self._refused(reason),
            authorize=self._meeting.authorize,
            timeout_s=self._meeting.piece_s,
            turns=TokenBucket(),
            loop=self.loop,
        )
        self.address = self._listener.address + (", TLS 1.3" if self.certified else "")
        return self

    def listen(self, admit: Admit, refused: Callable[[str], None], device: torch.device | str = "cpu") -> None:
        """Start to admit clients that authenticate. See `Transport.listen`.

        A client authenticates on the connection that is used afterwards, so the function passed to ``admit`` returns
        this connection without waiting.
        """
        self._admit, self._refused = admit, refused
        assert self.loop is not None
        self.loop.start()
        self._listener.start()

    def _let_in(self, connection: TcpConnection, peer: Peer) -> None:
        with self._lock:
            self._admitted[connection] = peer
        self._admit(peer.client, peer.address, lambda: connection)
        self._recheck(connection, peer)  # the certificate may have been revoked since the handshake

    def recheck(self) -> None:
        """Close each connection whose client `ConnectOptions.authorize` would refuse now; called after the rules have changed.

        This includes broken connections, whose sessions may be waiting for the client to come back.
        """
        with self._lock:
            admitted = list(self._admitted.items())
        for connection, peer in admitted:
            self._recheck(connection, peer)

    def _recheck(self, connection: TcpConnection, peer: Peer) -> None:
        try:
            self._meeting.authorize(peer)
        except Refused as refused:
            connection.cut(refused.reason, refused.detail)

    def __exit__(self, *_: object) -> None:
        """Close the port and end the thread of the sockets; see `Transport.__exit__`."""
        self._listener.close()
        if self.loop is not None:
            self.loop.close()

    def connect(self, device: torch.device | str = "cpu") -> Connection:
        """Connect to the server; see `raafl.transport.tcp.listener.connect`."""
        meeting = self._meeting
        assert isinstance(meeting.address, str) and self._login is not None
        return connect(
            meeting.address,
            self.client,
            self._login,
            timeout_s=meeting.wait_s,
            pair_timeout_s=meeting.piece_s,
            proxy=meeting.proxy,
        )


def is_loopback(address: str | socket.socket) -> bool:
    """Check whether an address (``HOST:PORT`` or a listening socket) can be reached only from this machine.

    Raises:
        BadInput: the address is malformed.
    """
    host = parse_address(address)[0] if isinstance(address, str) else str(address.getsockname()[0])
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
