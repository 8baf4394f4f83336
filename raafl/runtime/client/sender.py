"""Send a client's updates on a thread of their own, so that the next task is trained meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable

from raafl.submodel import FlatTensors


class Sender:
    """Sender of a client's updates, one at a time, in the background.

    Only the training thread calls these methods. Each update is sent by a thread of its own.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        """Prepare."""
        self._on_error = on_error
        self._thread: threading.Thread | None = None
        self._storage: FlatTensors | None = None

    @property
    def is_busy(self) -> bool:
        """Whether an update is being sent."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the last update has been sent, or ``timeout_s`` seconds have passed; None = no limit."""
        if self._thread is not None:
            self._thread.join(timeout=timeout_s)

    def copy(self, tensors: FlatTensors) -> FlatTensors:
        """Copy an update to storage that does not change while the next task is trained; call it only after `wait`."""
        if self._storage is None or self._storage.layout != tensors.layout:
            self._storage = None  # the old update goes before the new one comes
            self._storage = FlatTensors.empty(tensors.layout, tensors.device)
        return self._storage.copy_(tensors)

    def start(self, send: Callable[[], None]) -> None:
        """Call ``send`` on a new thread, and return at once; call it only after `wait`."""
        self._thread = threading.Thread(target=self._send, args=(send,), name="sender", daemon=True)
        self._thread.start()

    def _send(self, send: Callable[[], None]) -> None:
        try:
            send()
        except Exception as error:
            self._on_error(error)
