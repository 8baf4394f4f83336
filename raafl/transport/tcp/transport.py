"""Transport for clients on other machines that come and go: a `Listener` on the server, `connect` on the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch

from raafl.errors import BadInput
from raafl.transport.connection import Connection
from raafl.transport.tcp.listener import Listener, connect, encrypts
from raafl.transport.tcp.rate_limit import TokenBucket
from raafl.transport.transport import Admit, ConnectOptions, Transport


class TcpTransport(Transport):
    """Transport over TCP: callers authenticate before they are told anything, and connect at a limited rate."""

    comes_and_goes = True

    def __init__(self, meeting: ConnectOptions) -> None:
        if meeting.secret is None:
            raise BadInput("there is no secret: a client proves one before it is let in")
        self._meeting, self._secret, self.client = meeting, meeting.secret, meeting.client
        self._encrypt = encrypts(meeting.address, meeting.encrypt)

    def __enter__(self) -> Self:
        """Bind the port; until `listen` the system refuses whoever calls."""
        self._listener = Listener(
            self._meeting.address, self._secret,
            lambda pair, client, peer: self._admit(client, peer, lambda: pair), lambda reason: self._refused(reason),
            encrypt=self._encrypt, timeout_s=self._meeting.piece_s, turns=TokenBucket(),
        )  # fmt: skip
        self.address = self._listener.address + (", encrypted" if self._encrypt else "")
        return self

    def listen(self, admit: Admit, refused: Callable[[str], None], device: torch.device | str = "cpu") -> None:
        """Admit authenticated callers, whose connection exists already; see `Transport.listen`."""
        self._admit, self._refused = admit, refused
        self._listener.start()

    def __exit__(self, *_: object) -> None:
        """Close the port; see `Transport.__exit__`."""
        self._listener.close()

    def connect(self, device: torch.device | str = "cpu") -> Connection:
        """Connect to the server; see `raafl.transport.tcp.listener.connect`."""
        meeting, key = self._meeting, self._secret.for_client(self.client)
        assert isinstance(meeting.address, str)
        return connect(
            meeting.address,
            key,
            timeout_s=meeting.wait_s,
            demand_encryption=self._encrypt,
            pair_timeout_s=meeting.piece_s,
        )
