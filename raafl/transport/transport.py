"""Define a transport, which opens the connections between a server and its clients.

The server enters its transport, builds the run, listens, and leaves it at the end. A client connects, and reconnects where
clients may come back. What the two ends then send is the same on every transport.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from raafl.transport.connection import Connection

if TYPE_CHECKING:
    from raafl.transport.tcp.credentials import Credentials
    from raafl.transport.tcp.listener import Peer
    from raafl.transport.tcp.loop import SocketLoop

Admit = Callable[[int, str, Callable[[], Connection]], None]
"""Function that admits a connection, given the client's id, its address and what makes the connection; raises
`Refused` to reject it."""


@dataclass(frozen=True)
class ConnectOptions:
    """Options of a transport; each transport uses those it needs.

    Attributes:
        num_clients: number of clients N; they are numbered 1 to N.
        wait_s: seconds to wait for the other side.
        piece_s: seconds for each piece of a message.
        address: ``HOST:PORT`` of the server, or a listening socket; empty = taken from the environment.
        credentials: certificates, or a token of this machine; None = every caller that reaches the address is trusted.
        authorize: server's function that raises `Refused` if a client may not join.
        proxy: URL of the HTTP proxy of a client; "none" = no proxy; None = the environment's.
        client: id of the client that connects; 0 = the server, or the id that the environment names.
        nccl: whether to transfer tensors between GPUs by NCCL where possible.
    """

    num_clients: int = 1
    wait_s: float = 10.0
    piece_s: float = 30.0
    address: str | socket.socket = ""
    credentials: Credentials | None = None
    authorize: Callable[[Peer], None] = lambda peer: None
    proxy: str | None = None
    client: int = 0
    nccl: bool = False


class Transport(ABC):
    """One side of the connections of a run: it opens a `Connection` between the server and each client.

    All transports raise the same errors: `BadInput` for a wrong address, credential or environment; `Refused` if the
    other side does not accept this one, so that another attempt is unlikely to succeed; `PeerLost` and `PeerTimeout` if
    the other side is gone or absent.

    Attributes:
        client: id of this client; 0 = this is the server.
        comes_and_goes: whether clients may join, leave and come back at any time; else all are there from the start.
        address: address of the server for display; empty = clients know it.
        certified: whether both ends have certificates of an authority.
        loop: server's thread that reads and writes all connections; None = each is used by threads of its own.
    """

    client: int = 0
    comes_and_goes: bool = False
    address: str = ""
    certified: bool = False
    loop: SocketLoop | None = None

    def __enter__(self) -> Self:
        """On the server, bind the address and announce it to clients, which are admitted only after `listen`."""
        return self

    @abstractmethod
    def listen(self, admit: Admit, refused: Callable[[str], None], device: torch.device | str = "cpu") -> None:
        """On the server, start to admit clients; return soon.

        Args:
            admit: function called for each new client, on any thread; it should return soon. It gets the client's id,
                its address, and a function that makes the connection. That function is to be called once, on a thread
                that may wait for the client.
            refused: function called on any thread with the reason for each refused client.
            device: device of this side's tensors.
        """

    def __exit__(self, *_: object) -> None:
        """On the server, stop admitting clients and end the threads of the transport; connections stay open."""
        return

    def announce(self, client: int | None, reason: str) -> None:
        """On the server, store the reason why a client must stop, in case its connection breaks first.

        Args:
            client: id of the client; None = every client.
            reason: text of the reason.
        """
        return

    @abstractmethod
    def connect(self, device: torch.device | str = "cpu") -> Connection:
        """On a client, wait for the server and connect to it; ``device`` is the device of this side's tensors."""

    def let_go(self) -> str | None:
        """On a client, return the reason to stop that the server stored by `announce`; None = none."""
        return None
