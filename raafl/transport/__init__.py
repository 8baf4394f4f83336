# mypy: implicit-reexport
# ruff: noqa: F401
"""The wire: frames, pairs that carry them, and transports that make pairs. Nothing received is executed or evaluated.

A new transport is a subclass of `Transport` with a line in `TRANSPORTS`, by whose name commands find it.
"""

from __future__ import annotations

from collections.abc import Callable

from raafl.transport.codec import GIVEN_UP, Expect, Kind, Message, Refused
from raafl.transport.connection import Pair, PeerLost, PeerTimeout
from raafl.transport.tcp.transport import Sockets
from raafl.transport.torchrun import Ranks
from raafl.transport.transport import Admit, Meeting, Transport

TRANSPORTS: dict[str, Callable[[Meeting], Transport]] = {"ranks": Ranks.from_environment, "tcp": Sockets}
