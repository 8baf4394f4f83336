# mypy: implicit-reexport
# ruff: noqa: F401
"""The wire: frames, pairs that carry them, and transports that make pairs. Nothing received is executed or evaluated.

A new transport is a subclass of `Transport` with a line in `TRANSPORTS`, by whose name commands find it.
"""

from __future__ import annotations

from collections.abc import Callable

from raafl.runtime.transport.base import Admit, Meeting, Transport
from raafl.runtime.transport.codec import GIVEN_UP, Expect, Kind, Message, Refused
from raafl.runtime.transport.pair import Pair, PeerLost, PeerTimeout
from raafl.runtime.transport.ranks import Ranks
from raafl.runtime.transport.sockets import Sockets

TRANSPORTS: dict[str, Callable[[Meeting], Transport]] = {"ranks": Ranks.from_environment, "tcp": Sockets}
