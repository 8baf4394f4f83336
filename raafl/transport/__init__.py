# mypy: implicit-reexport
# ruff: noqa: F401
"""Carry messages between processes: frames, connections that carry them, and transports that open connections.

Nothing received is executed or evaluated. A new transport is a subclass of `Transport` with an entry in `TRANSPORTS`.
"""

from __future__ import annotations

from collections.abc import Callable

from raafl.transport.codec import GIVEN_UP, Expect, Kind, Message, Refused
from raafl.transport.connection import Connection, PeerLost, PeerTimeout
from raafl.transport.torchrun import TorchrunTransport
from raafl.transport.transport import Admit, ConnectOptions, Transport


def _tcp(meeting: ConnectOptions) -> Transport:
    # imported here, since ranks of torchrun need no TLS
    from raafl.transport.tcp.transport import TcpTransport

    return TcpTransport(meeting)


TRANSPORTS: dict[str, Callable[[ConnectOptions], Transport]] = {
    "ranks": TorchrunTransport.from_environment,
    "tcp": _tcp,
}
