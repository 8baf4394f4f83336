"""Collect the log lines that a site's policy allows to be sent to the server, until the next answer is sent."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from raafl.config.site_policy import SiteLogs
from raafl.runtime.fields import MAX_LOG_LINES, MAX_LOG_TEXT, LogLine, level_of
from raafl.sanitize import sanitize_text


class LogBuffer(logging.Handler):
    """Logging handler that collects the last lines of the loggers that a policy names.

    Records whose attribute `private` is true are not collected: they explain refusals, which only the site may see.
    """

    def __init__(self, allowed: SiteLogs) -> None:
        """Keep the log lines that ``allowed`` permits; `listening` adds this handler to the loggers."""
        super().__init__(logging.getLevelNamesMapping()[allowed.level.upper()])
        self._names = allowed.loggers
        self._lines: deque[LogLine] = deque(maxlen=MAX_LOG_LINES - 1)
        self._num_left_out, self._changing = 0, threading.Lock()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Return a context in which log lines are collected."""
        loggers = [logging.getLogger(name) for name in self._names]
        for logger in loggers:
            logger.addHandler(self)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Collect a log line; print it if no other handler would, as `logging` does by default."""
        last = logging.lastResort
        if last is not None and record.levelno >= last.level and self._is_alone(record.name):
            last.handle(record)
        if getattr(record, "private", False):
            return
        line = LogLine(level_of(record.levelno), sanitize_text(record.getMessage(), MAX_LOG_TEXT))
        with self._changing:
            self._num_left_out += len(self._lines) == self._lines.maxlen
            self._lines.append(line)

    def take(self) -> tuple[LogLine, ...]:
        """Return the lines collected since the last call; a first line tells if some were dropped."""
        with self._changing:
            left_out, self._num_left_out = self._num_left_out, 0
            lines = tuple(self._lines)
            self._lines.clear()
        return (LogLine("warning", f"{left_out} earlier lines are left out"), *lines) if left_out else lines

    def _is_alone(self, name: str) -> bool:
        """Return whether a logger's records reach no other handler."""
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return False
            logger = logger.parent if logger.propagate else None
        return True
