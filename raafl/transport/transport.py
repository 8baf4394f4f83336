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
        num_clients: N; clients are numbered 1 to N.
        wait_s: seconds to wait for the other end.
        piece_s: seconds that each piece of a message may take.
        address: ``HOST:PORT``, or a listening socket; empty = the environment says where.
        credentials: files of mutual TLS, or a token of this machine; None = whoever reaches the address is trusted.
        authorize: server: raises `Refused` for a peer that may not come in.
        proxy: client: URL of an HTTP proxy; "none" = no proxy; None = the environment's.
        client: id of the client that connects; 0 = the server, or the one that the environment names.
        nccl: transfer between GPUs by NCCL where possible.
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

    Errors are the same on every transport: `BadInput` for a wrong address, secret or environment; `Refused` where the other end
    exists and does not accept this one, so that a retry is of little use; `PeerLost` and `PeerTimeout` where it is gone or absent.

    Attributes:
        client: id of the client whose end this is; 0 = the server's.
        comes_and_goes: whether clients come at any time, go and come back; otherwise each is present once, from the start.
        address: where clients find the server, for display; empty = they know.
    """

    client: int = 0
    comes_and_goes: bool = False
    address: str = ""

    def __enter__(self) -> Self:
        """Server: take the address, and let clients know that somebody is there; none is let in yet."""
        return self

    @abstractmethod
    def listen(self, admit: Admit, refused: Callable[[str], None], device: torch.device | str = "cpu") -> None:
        """Server: admit clients from now on; returns soon.

        Args:
            admit: called for each client on any thread, and should return soon. It gets a function that makes the connection,
                which is called once, on a thread that may wait for the client.
            refused: called with the reason of each refused caller, on any thread.
            device: where this end's tensors lie.
        """

    def __exit__(self, *_: object) -> None:
        """Server: let nobody in any more, and end the transport's threads; pairs live on until they are closed."""
        return

    def announce(self, client: int | None, reason: str) -> None:
        """Server: leave the reason for which ``client`` (None = every client) is dismissed, in case its connection breaks first."""
        return

    @abstractmethod
    def connect(self, device: torch.device | str = "cpu") -> Connection:
        """Client: wait for the server and connect to it; ``device`` is where this end's tensors lie."""

    def let_go(self) -> str | None:
        """Client: return the reason that `announce` left, or None."""
        return None
