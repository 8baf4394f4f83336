"""Two ends that exchange messages: the interface, and what goes wrong."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from raafl.transport.codec import Expect, Message

DRAIN_BYTES = 1 << 30
"""Longest refused payload that is read to its end; a longer one closes the pair."""


class PeerLost(ConnectionError):
    """The other end is gone, or this end was closed; the pair is closed now.

    Attributes:
        reason: connection-closed, connection-reset, connection-broken, connection-refused, or closed-here.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class PeerTimeout(TimeoutError):
    """The other end did nothing until the deadline; the pair is closed now."""


class Connection(ABC):
    """One session with one peer. At most one thread sends and one receives at a time; any thread may close.

    Attributes:
        received_bytes: bytes on the wire of the last message received, refused ones included.
        closed: whether the pair has ended; every error but some `Refused` ends it.
    """

    received_bytes: int = 0
    closed: bool = False

    @abstractmethod
    def send(self, message: Message, timeout_s: float | None = None) -> int:
        """Send a message and return its bytes on the wire; the tensors may be changed once it has returned.

        A long message is waited for until the peer receives it. ``timeout_s`` is how long the peer may take to
        accept the next piece; the pair's own if None. Raises `PeerLost`, `PeerTimeout`; ValueError, and nothing
        was sent, when the message cannot be encoded.
        """

    @abstractmethod
    def recv(self, expect: Expect, timeout_s: float, *, finite: bool = False) -> Message:
        """Wait up to ``timeout_s`` for the next message and receive it.

        ``expect(kind, assignment, meta)`` is called in this thread after header and JSON were checked and before any
        long payload is received; it returns where the payload goes (None: there is none) or raises `Refused`. Until
        this returns, what it returned must not be used. Each further piece must come within the pair's own timeout.
        With ``finite``, a NaN or an infinity among the tensors is refused as non-finite.

        Raises:
            Refused: the message may not be used and was read to its end; the buffer's content is undefined, the next
                message can be received. Only when the message's end cannot be known, or is too far away, is the pair
                `closed` with it.
            PeerLost: at once when the peer is gone. PeerTimeout: at the deadline. The pair is closed with both.
        """

    def check(self) -> None:
        """Raise `PeerLost` if the peer is known to be gone; asks nothing of it, for an end that neither sends nor waits."""
        return

    @abstractmethod
    def close(self) -> None:
        """End the session and release its threads and sockets; a waiting thread is woken by `PeerLost`. Idempotent."""

    def __enter__(self) -> Self:
        """Return the pair, to be closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
