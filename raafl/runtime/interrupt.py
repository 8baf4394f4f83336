"""Ctrl-C and SIGTERM: a run ends between two events, with its state whole and its summary written."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAME_S = 2.0  # torchrun passes on the Ctrl-C that its ranks have had already


class Interrupt:
    """While entered, the first signal only sets ``asked``; one that comes seconds later raises `KeyboardInterrupt`.

    Outside the main thread, where signals cannot be handled, it never sets ``asked``.
    """

    def __init__(self) -> None:
        self.asked = False
        self._at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._take) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            if time.monotonic() - self._at > _SAME_S:
                raise KeyboardInterrupt
            return
        self.asked, self._at = True, time.monotonic()
        if number == signal.SIGINT and sys.stderr is not None and sys.stderr.isatty():
            os.write(2, b"\nraafl: ending after the present task; Ctrl-C once more ends at once\n")
