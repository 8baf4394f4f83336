"""End a command in order that gets SIGTERM while it starts, before its run handles signals (`raafl.runtime.lifecycle.signals`)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_asked = False  # whether SIGTERM has come


class Terminated(KeyboardInterrupt):
    """Raised by SIGTERM while a command starts."""


@contextmanager
def starting() -> Iterator[None]:
    """Return a context in which SIGTERM raises `Terminated`, as Ctrl-C raises `KeyboardInterrupt`, while no run handles both.

    A command takes seconds to import torch and to build its model. Ranks of torchrun are left alone: they wait for one another
    in C++, where a handler of Python's is not called.
    """
    global _asked
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL or "RANK" in os.environ:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except Exception as error:
        # a module whose import was broken off may make another error of it
        if _asked:
            raise Terminated from error
        raise
    finally:
        _asked = False
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(number: int, frame: FrameType | None) -> None:
    global _asked
    _asked = True
    raise Terminated


def _after_fork() -> None:
    if signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_after_fork)
