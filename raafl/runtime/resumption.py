"""Define the message by which a client continues its session after its connection broke, and the server's answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from raafl.runtime.fields import Meta, count_of
from raafl.transport.tcp.resumable import Position


class ToldToStop(Exception):
    """Raised if a client asks for a config or wants to continue its session, and is told that the run has ended or it must stop.

    `reason`: reason given by the server.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Resume:
    """Message by which a session continues on a new connection: it says which messages its sender has received.

    The client sends this message first, and the server answers with one of its own.

    Attributes:
        position: number of messages that the sender has received, and of chunks of the message that broke off.
    """

    position: Position

    def to_meta(self) -> dict[str, Any]:
        """Convert the message to its JSON fields."""
        return {"received": self.position.num_messages, "chunks": self.position.num_chunks}

    @classmethod
    def from_meta(cls, meta: Meta) -> Self:
        """Read the message from its JSON fields; raise `Refused` if a field is not a whole number of at least 0."""
        return cls(Position(count_of(meta, "received"), count_of(meta, "chunks")))
