"""Define a connection between two processes that exchange messages, and its errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

from raafl.transport.codec import Expect, Message

DRAIN_BYTES = 1 << 30
"""Longest refused payload that is read to its end; a longer one closes the pair."""


class PeerLost(ConnectionError):
    """Raised if the peer is gone, or this side has closed the connection; the connection cannot be used any more.

    `reason`: reason code: connection-closed, connection-reset, connection-broken, connection-refused, or closed-here.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class PeerTimeout(TimeoutError):
    """Raised if the peer did nothing until the deadline; the connection cannot be used any more."""


class Connection(ABC):
    """A connection to one peer, over which messages are sent and received.

    Threads: at most one sends and at most one receives at a time; any thread may close.

    Attributes:
        received_bytes: size in bytes of the last received message, even if it was refused.
        closed: whether the connection has ended. Every error ends it, except `Refused` for a message that was read
            completely.
        resumes: whether the session can continue on a new connection after this one breaks, as over TLS.
    """

    received_bytes: int = 0
    closed: bool = False
    resumes: bool = False

    @abstractmethod
    def send(self, message: Message, timeout_s: float | None = None) -> int:
        """Send a message; return the number of bytes sent. Afterwards the caller may change the tensors.

        For a long message, this returns only once the peer has received it.

        Args:
            message: message to send.
            timeout_s: seconds in which the peer must accept each piece; None = the default of the connection.

        Raises:
            PeerLost: the peer is gone.
            PeerTimeout: the peer accepted nothing in time.
            ValueError: the message cannot be encoded; nothing was sent.
        """

    @abstractmethod
    def recv(self, expect: Expect, timeout_s: float, *, finite: bool = False) -> Message:
        """Wait for the next message and receive it.

        Args:
            expect: function that returns the storage for the message's tensors (None = no tensors), or raises
                `Refused`. It is called on this thread once the header and JSON are valid. The storage must not be used
                until `recv` returns.
            timeout_s: seconds until the message begins; later pieces have the default timeout of the connection.
            finite: whether to refuse tensors that contain NaN or infinity.

        Raises:
            Refused: the message is invalid, and the storage's content is undefined. The next message can be received
                unless the connection is `closed`.
            PeerLost: the peer is gone; raised at once.
            PeerTimeout: the deadline has passed.
        """

    def settle(self, stopped: Callable[[], bool]) -> None:
        """Wait until the caller may change the tensors of the last sent message.

        A connection that can resume may have to send them again, so it waits until the peer confirms the message.

        Args:
            stopped: function that returns whether this side no longer receives, so that no confirmation can arrive and
                the wait ends.
        """
        return

    def check(self) -> None:
        """Raise `PeerLost` if the peer is known to be gone; nothing is sent. For use while the connection is idle."""
        return

    @abstractmethod
    def close(self) -> None:
        """End the connection and release its threads and sockets; a thread that waits in it gets `PeerLost`.

        Can be called again.
        """

    def __enter__(self) -> Self:
        """Return this connection, which the ``with`` block closes at its end."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
