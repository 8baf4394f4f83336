"""Read a value from files, and read it again when the files change.

An editor may empty a file and then write it, and a file may vanish while it is replaced. So a change counts once the files
have been the same at two looks and during the reading between them, and what cannot be read has no effect.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from raafl.transport.tcp.credentials import stamp_of

# a file may become readable without a change of its own, when its folder does or file descriptors are free again
_RETRY_S = 5.0

_log = logging.getLogger(__name__)

T = TypeVar("T")


class WatchedFiles(Generic[T]):
    """Value read from files that may change.

    `value`: latest value that could be read.
    """

    def __init__(self, what: str, paths: tuple[Path, ...], read: Callable[[], T]) -> None:
        """Read the value for the first time; errors of ``read`` are raised."""
        self._what, self._paths, self._read = what, paths, read
        self._stamps = self._seen = self._look()
        self._failed: list[tuple[int, ...]] | None = None
        self._warned, self._retry_at = "", 0.0
        self.value = read()

    def reread(self) -> bool:
        """Read the value again if the files have changed and are at rest; return whether the value is new.

        Call this at intervals: a change counts at the second call that finds the files the same.
        If the files cannot be read, the value stays, a warning is logged once, and later calls try again.
        """
        before, self._seen = self._seen, self._look()
        if self._seen == self._stamps or self._seen != before:
            return False
        if self._seen == self._failed and time.monotonic() < self._retry_at:
            return False
        value, problem = self.value, ""
        try:
            value = self._read()
        except Exception as error:  # whatever the error is, keep watching: the next change may be a revocation
            problem = str(error) or type(error).__name__
        if self._look() != before:
            return False
        if problem:
            self._failed, self._retry_at = before, time.monotonic() + _RETRY_S
            self._warn(problem)
            return False
        self._stamps, self._warned = before, ""
        changed, self.value = value != self.value, value
        return changed

    def _warn(self, problem: str) -> None:
        if problem != self._warned:
            _log.warning("the earlier %s stays in force: %s", self._what, problem)
        self._warned = problem

    def _look(self) -> list[tuple[int, ...]]:
        return [stamp_of(path) for path in self._paths]
