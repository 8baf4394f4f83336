"""Define a transport: one end of a run, which opens a `Connection` between the server and each client.

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
    from raafl.transport.tcp.credentials import LocalToken, TlsFiles
    from raafl.transport.tcp.opening import Peer

Admit = Callable[[int, str, Callable[[], Connection]], None]
"""Takes a client's id, where it calls from, and what makes its pair; raises `Refused` to turn it away."""


@dataclass(frozen=True)
class ConnectOptions:
    """Options from which a transport is made; each transport uses those it needs.

    Attributes:
        num_clients: number of clients N; they are numbered 1 to N.
        wait_s: seconds to wait for the other end.
        piece_s: seconds that each piece of a message may take.
        address: ``HOST:PORT``, or a listening socket; empty = the environment has the address.
        credentials: files of mutual TLS, or a token of this machine; None = every caller that reaches the address is
            trusted.
        authorize: function of the server that raises `Refused` for a peer that may not join.
        proxy: URL of the HTTP proxy of a client; "none" = no proxy; None = the environment's.
        client: id of the client that connects; 0 = the server, or the one that the environment names.
        nccl: whether to transfer tensors between GPUs by NCCL where possible.
    """

    num_clients: int = 1
    wait_s: float = 10.0
    piece_s: float = 30.0
    address: str | socket.socket = ""
    credentials: TlsFiles | LocalToken | None = None
    authorize: Callable[[Peer], None] = lambda peer: None
    proxy: str | None = None
    client: int = 0
    nccl: bool = False


class Transport(ABC):
    """One end of a run's connections, made from `ConnectOptions`.

    Errors are the same on every transport: `BadInput` for a wrong address, credential or environment; `Refused` if the
    other end exists and does not accept this one, so that a retry is of little use; `PeerLost` and `PeerTimeout` if it
    is gone or absent.

    Attributes:
        client: id of the client whose end this is; 0 = the server's end.
        comes_and_goes: whether clients may join, leave and come back at any time; else each is present once, from the
            start.
        address: address at which clients find the server, for display; empty = they know it.
    """

    client: int = 0
    comes_and_goes: bool = False
    address: str = ""

    def __enter__(self) -> Self:
        """Server: take the address, and let clients know that somebody is there; none is let in yet."""
        return self

    @abstractmethod
    def listen(self, admit: Admit, refused: Callable[[str], None], device: torch.device | str = "cpu") -> None:
        """On the server, admit clients from now on; return soon.

        Args:
            admit: function called for each client, on any thread, which should return soon. It gets a function that
                makes the connection, which is called once, on a thread that may wait for the client.
            refused: function called with the reason for each refused caller, on any thread.
            device: device of this end's tensors.
        """

    def __exit__(self, *_: object) -> None:
        """Server: let nobody in any more, and end the transport's threads; pairs live on until they are closed."""
        return

    def announce(self, client: int | None, reason: str) -> None:
        """On the server, store why ``client`` (None = every client) is dismissed, in case its connection breaks first."""
        return

    @abstractmethod
    def connect(self, device: torch.device | str = "cpu") -> Connection:
        """On a client, wait for the server and connect to it; this end's tensors are on ``device``."""

    def let_go(self) -> str | None:
        """On a client, return the reason that `announce` stored, or None."""
        return None
