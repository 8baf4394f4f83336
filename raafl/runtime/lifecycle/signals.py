"""Handle Ctrl-C and SIGTERM: the first ends a run in order, with its summary written; the second ends the process at once.

Either signal asks and either insists. On the command line (`ends_process`) insisting ends the process with exit code
130, whatever the main thread is doing; in a program that uses raafl as a library it raises `KeyboardInterrupt`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self

from raafl.atomic_file import drop_unfinished

EXIT_CODE = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ECHO_S = 5.0  # seconds in which torchrun may forward a signal that its ranks already got
_CLEAN_UP_S = 2.0
_WAKE = b"\0"  # byte that only wakes the thread, since no signal has the number 0

_ends_process = False
_running: _Signals | None = None


@contextmanager
def ends_process() -> Iterator[None]:
    """Return a context in which a second SIGINT or SIGTERM ends the process at once."""
    global _ends_process
    before, _ends_process = _ends_process, True
    try:
        yield
    finally:
        _ends_process = before


class Interrupt:
    """Context in which the first SIGINT or SIGTERM only sets ``asked``, so that the run can end in order.

    Nested contexts act as one; the outermost restores the previous signal handlers. Outside the main thread, where
    signals cannot be handled, ``asked`` stays false.
    """

    def __init__(self, on_insist: Callable[[], None] = lambda: None) -> None:
        self._on_insist = on_insist
        self._signals: _Signals | None = None
        self._outermost = False

    @property
    def asked(self) -> bool:
        """Whether a signal has asked the run to end."""
        return self._signals is not None and self._signals.asked

    @property
    def by_manager(self) -> bool:
        """Whether the signal was SIGTERM, as service managers send it, and not Ctrl-C."""
        return self._signals is not None and self._signals.first == signal.SIGTERM

    def __enter__(self) -> Self:
        global _running
        if threading.current_thread() is threading.main_thread():
            self._outermost = _running is None
            if _running is None:
                _running = _Signals(_ends_process)
            _running.on_insist.append(self._on_insist)
            self._signals = _running
        return self

    def __exit__(self, *_: object) -> None:
        global _running
        if self._outermost and _running is not None:
            _running.close()
            _running, self._outermost = None, False


class _Count:
    """Counter of signals that tells a user's second signal from torchrun's repetition of the first."""

    def __init__(self) -> None:
        self.num, self._first_s, self._echoes = 0, 0.0, int("TORCHELASTIC_RUN_ID" in os.environ)

    def insists(self) -> bool:
        """Count a signal; return whether it is a second one, which ends the process at once."""
        self.num += 1
        now = time.monotonic()
        if self.num == 1:
            self._first_s = now
            return False
        if self._echoes and now - self._first_s < _ECHO_S:
            self._echoes = 0
            return False
        return True


class _Signals:
    """Signal handlers of this process, with a thread that ends the process if its main thread hangs."""

    def __init__(self, ends_process: bool) -> None:
        self.asked, self.on_insist = False, list[Callable[[], None]]()
        self.first = 0  # number of the first signal; 0 = none came
        self._count, self._ends_process = _Count(), ends_process
        self._before: dict[signal.Signals, Any] = {n: signal.signal(n, self._take) for n in _SIGNALS}
        self._ending = threading.Lock()
        if not ends_process:
            return
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        # Python calls handlers in the main thread only, which may hang: a byte for each signal wakes another thread
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._watcher = threading.Thread(target=self._watch, name="interrupt", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """Restore the signal handlers that were installed before."""
        if self._ends_process:
            signal.set_wakeup_fd(self._wakeup_before)
            os.write(self._writer, _WAKE)
            self._watcher.join()
            os.close(self._reader)
            os.close(self._writer)
        for number, before in self._before.items():
            signal.signal(number, before)

    def let_go(self) -> None:
        """Reset the handlers in a forked process, where SIGTERM ends it and SIGINT is left to the parent."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._ends_process:
            signal.set_wakeup_fd(-1)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._count.insists():
            if self._ends_process:
                self._end_process()
            raise KeyboardInterrupt
        if not self.asked and number == signal.SIGINT and sys.stderr is not None and sys.stderr.isatty():
            _say(b"\nraafl: ending after the present task; Ctrl-C once more ends at once\n")
        self.asked, self.first = True, self.first or number

    def _watch(self) -> None:
        count = _Count()
        while (byte := os.read(self._reader, 1)) != _WAKE:
            if byte[0] in _SIGNALS and count.insists():
                self._end_process()

    def _end_process(self) -> None:
        """Kill this process and its children at once, unless another thread is doing so."""
        if not self._ending.acquire(blocking=False):
            return
        threading.Thread(target=_end_after, args=(_CLEAN_UP_S,), daemon=True).start()
        for clean in (_kill_children, drop_unfinished, *self.on_insist):
            with suppress(Exception):
                clean()
        _say(b"raafl: stopped at once, without a summary; --resume RUN goes on from the last checkpoint\n")
        os._exit(EXIT_CODE)


def _end_after(wait_s: float) -> None:
    time.sleep(wait_s)
    os._exit(EXIT_CODE)


def _kill_children() -> None:
    multiprocessing = sys.modules.get("multiprocessing")  # without this module the process has started no children
    for process in multiprocessing.active_children() if multiprocessing is not None else ():
        process.kill()


def _say(text: bytes) -> None:
    with suppress(OSError):
        os.write(2, text)


def _after_fork() -> None:
    global _running
    if _running is not None:
        _running.let_go()
        _running = None


os.register_at_fork(after_in_child=_after_fork)
