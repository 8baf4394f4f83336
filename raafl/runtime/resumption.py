"""Message by which a client comes back to its session after its connection broke, and the answer to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from raafl.runtime.fields import Meta, count_of
from raafl.transport.tcp.resumable import Position


class ToldToStop(Exception):
    """Raised where a client that comes back to its session is told that the run, or its part in it, has ended.

    Attributes:
        reason: reason that the server gives.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Resume:
    """Message that says how much of a session its sender has received: RESUME, and the WELCOME that answers it.

    Attributes:
        position: part that has been received; ``num_chunks`` is the index of the first missing chunk.
    """

    position: Position

    def to_meta(self) -> dict[str, Any]:
        """Return the message's fields."""
        return {"received": self.position.num_messages, "chunks": self.position.num_chunks}

    @classmethod
    def from_meta(cls, meta: Meta) -> Self:
        """Read a message; raises `Refused` for what are no counts. Whether they can be is for the session to say."""
        return cls(Position(count_of(meta, "received"), count_of(meta, "chunks")))
