"""Count the bytes of a connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raafl.submodel import FlatTensors
from raafl.transport import Connection, Kind, Message
from raafl.transport.codec import Expect


class MeteredConnection(Connection):
    """Connection that reports the number of bytes of each message sent or received."""

    def __init__(
        self, inner: Connection, moved: Callable[[int], None], check: Callable[[int], None] = lambda num: None
    ) -> None:
        """Wrap a connection."""
        self._inner, self._moved, self._check = inner, moved, check

    @property
    def received_bytes(self) -> int:  # type: ignore[override]
        """Size in bytes of the last received message."""
        return self._inner.received_bytes

    @property
    def closed(self) -> bool:  # type: ignore[override]
        """Whether the connection has ended."""
        return self._inner.closed

    def send(self, message: Message, timeout_s: float | None = None) -> int:
        """Send a message; see `Connection.send`."""
        # count the tensors before sending them, since messages received meanwhile are checked against the same limit
        announced = 0 if message.tensors is None else message.tensors.num_bytes
        self._moved(announced)
        sent = self._inner.send(message, timeout_s)
        self._moved(sent - announced)
        return sent

    def recv(self, expect: Expect, timeout_s: float, *, finite: bool = False) -> Message:
        """Receive a message; see `Connection.recv`."""

        def expect_within(kind: Kind, assignment: int, meta: dict[str, Any]) -> FlatTensors | None:
            target = expect(kind, assignment, meta)
            if target is not None:
                self._check(target.layout.num_bytes)
            return target

        try:
            return self._inner.recv(expect_within, timeout_s, finite=finite)
        finally:
            self._moved(self._inner.received_bytes)

    def settle(self, stopped: Callable[[], bool]) -> None:
        """Wait until the caller may change the tensors of the last message; see `Connection.settle`."""
        self._inner.settle(stopped)

    def check(self) -> None:
        """Raise `PeerLost` if the peer is gone; see `Connection.check`."""
        self._inner.check()

    def close(self) -> None:
        """End the connection; see `Connection.close`."""
        self._inner.close()
