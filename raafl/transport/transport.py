"""How a server and its clients come to have a `Connection` each: what every transport promises.

A transport is one end of one run. The server enters it, builds its run, listens, and leaves it at the end. A client
connects, and again where clients may come back. What the ends then say is the pair's concern, and the same everywhere.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch

from raafl.transport.connection import Connection
from raafl.transport.tcp.handshake import Secret

Admit = Callable[[int, str, Callable[[], Connection]], None]
"""Takes a client's id, where it calls from, and what makes its pair; raises `Refused` to turn it away."""


@dataclass(frozen=True)
class ConnectOptions:
    """What an end is told of the other; a transport takes of it what it needs.

    Attributes:
        num_clients: of the run; they are 1 to N.
        wait_s: how long to wait for the other end to be there.
        piece_s: how long each piece of a message may take.
        address: ``HOST:PORT``, or a socket that listens; empty = the environment says where.
        secret: what clients prove; None = whoever gets to the address is trusted.
        client: who connects; 0 = the server, or whom the environment says.
        nccl: send between GPUs by NCCL where it can.
        encrypt: encrypt, or refuse a server that does not; None = unless the address is of this machine alone.
    """

    num_clients: int = 1
    wait_s: float = 10.0
    piece_s: float = 30.0
    address: str | socket.socket = ""
    secret: Secret | None = None
    client: int = 0
    encrypt: bool | None = None
    nccl: bool = False


class Transport(ABC):
    """One end of a run's connections, made of a `ConnectOptions`.

    All fail alike: by `BadInput` where what the user has named (address, secret, environment) is wrong; by `Refused` where
    the other end is there and will not have this one, so that asking again is of little use; by `PeerLost` and
    `PeerTimeout` where it is gone, or does not come.

    Attributes:
        client: whose end this is; 0 = the server's.
        comes_and_goes: clients come at any time, go, and come back; if not, each is there from the start, once.
        address: where clients find the server, for the user to read; empty = they know.
    """

    client: int = 0
    comes_and_goes: bool = False
    address: str = ""

    def __enter__(self) -> Self:
        """Server: take the address, and let clients know that somebody is there; none is let in yet."""
        return self

    @abstractmethod
    def listen(self, admit: Admit, refused: Callable[[str], None], device: torch.device | str = "cpu") -> None:
        """Server: let clients in, from now on or all at once; returns soon.

        ``admit`` is called for each, in any thread, and should return soon; what makes the pair is to be called once, in a
        thread that may wait for the client. ``refused`` is told why a caller was turned away, in any thread. ``device``
        is where this end's tensors lie.
        """

    def __exit__(self, *_: object) -> None:
        """Server: let nobody in any more, and end the transport's threads; pairs live on until they are closed."""
        return

    def announce(self, client: int | None, reason: str) -> None:
        """Server: leave word why ``client`` (None = everybody) is let go, for one whose pair breaks before it hears so."""
        return

    @abstractmethod
    def connect(self, device: torch.device | str = "cpu") -> Connection:
        """Client: wait for the server and make a pair with it; ``device`` is where this end's tensors lie."""

    def let_go(self) -> str | None:
        """Client: return the word that `announce` has left; None = there is none."""
        return None
