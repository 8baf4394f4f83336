"""Define a connection between two processes that exchange messages, and its errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from raafl.transport.codec import Expect, Message

DRAIN_BYTES = 1 << 30
"""Longest refused payload that is read to its end; a longer one closes the pair."""


class PeerLost(ConnectionError):
    """Raised if the peer is gone or this end was closed; the connection is closed then.

    Attributes:
        reason: reason code: connection-closed, connection-reset, connection-broken, connection-refused, or
            closed-here.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class PeerTimeout(TimeoutError):
    """Raised if the peer did nothing until the deadline; the connection is closed then."""


class Connection(ABC):
    """One session with one peer, over which messages are sent and received.

    Threads: at most one sends and at most one receives at a time; any thread may close.

    Attributes:
        received_bytes: size on the wire of the last received message, refused ones included.
        closed: whether the session has ended; every error ends it, except `Refused` for a message that was read to its end.
        resumes: whether a session that breaks may be continued on the peer's next connection: between machines.
    """

    received_bytes: int = 0
    closed: bool = False
    resumes: bool = False

    @abstractmethod
    def send(self, message: Message, timeout_s: float | None = None) -> int:
        """Send a message; return its bytes on the wire. The tensors may be changed afterwards.

        A long message returns only once the peer has received it.

        Args:
            message: message to send.
            timeout_s: seconds in which the peer must accept each piece; None = the connection's own.

        Raises:
            PeerLost: the peer is gone.
            PeerTimeout: the peer accepted nothing in time.
            ValueError: the message cannot be encoded; nothing was sent.
        """

    @abstractmethod
    def recv(self, expect: Expect, timeout_s: float, *, finite: bool = False) -> Message:
        """Wait for the next message and receive it.

        Args:
            expect: called on this thread after header and JSON were checked and before a long payload is received; returns the
                storage for the payload (None = no payload), or raises `Refused`. The storage must not be used until this returns.
            timeout_s: seconds until the message begins; each further piece has the connection's own timeout.
            finite: whether to refuse tensors with NaN or infinity, as non-finite.

        Raises:
            Refused: the message must not be used; the storage's content is undefined. The next message can be received,
                unless the end of this one is unknown or too far away; then the connection is `closed`.
            PeerLost: the peer is gone; raised at once.
            PeerTimeout: the deadline has passed.
        """

    def check(self) -> None:
        """Raise `PeerLost` if the peer is known to be gone, without sending anything; used while this end is idle."""
        return

    @abstractmethod
    def close(self) -> None:
        """End the session and release threads and sockets; a waiting thread gets `PeerLost`. Further calls do nothing."""

    def __enter__(self) -> Self:
        """Return the pair, to be closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
