"""Store the log lines that clients send: in a file of the run folder, and in `logging`."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from raafl.runfolder.append_file import AppendFile
from raafl.runfolder.schema import CLIENT_LOGS
from raafl.runtime.fields import LogLine
from raafl.transport.tcp.rate_limit import TokenBucket

LINES_AT_ONCE: Final = 100
LINE_EVERY_S: Final = 1.0
"""Each client may have so many lines written at once, and one more each second; others are counted and dropped."""

MAX_FILE_BYTES: Final = 64 << 20
_log = logging.getLogger(__name__)


class ClientLogs:
    """Log lines of all clients of a run; callable from any thread. The file is created with the first line."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        """Write into ``folder``; ``warn`` is called once if that fails or the file is full."""
        self._path, self._warn = folder / CLIENT_LOGS, warn
        self._bucket = TokenBucket(LINES_AT_ONCE, LINE_EVERY_S)
        self._dropped: Counter[int] = Counter()
        self._file: AppendFile[dict[str, Any]] | None = None
        self._left_bytes: int | None = None  # None = the file is not open yet
        self._lock, self._is_closed = threading.Lock(), False

    def add(self, client: int, lines: Sequence[LogLine]) -> None:
        """Store log lines of a client; if it sends more than the rate limit allows, lines are dropped."""
        for line in lines:
            with self._lock:
                if not self._bucket.take(client):
                    self._dropped[client] += 1
                    continue
                self._write(client, line)
            _log.log(
                logging.getLevelNamesMapping()[line.level.upper()],
                f"client {client} logs: {line.text}",
                extra={"client": client},
            )

    def _write(self, client: int, line: LogLine) -> None:
        if self._is_closed or (self._left_bytes is not None and self._left_bytes <= 0):
            return
        try:
            file = self._opened()
        except OSError as error:
            self._is_closed = True
            self._warn(f"{self._path} cannot be written: {error.strerror}; clients' log lines are only in this log")
            return
        row: dict[str, Any] = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "client": client}
        row |= {"level": line.level, "text": line.text}
        if (dropped := self._dropped.pop(client, 0)) > 0:
            row["dropped_before"] = dropped
        file.add(row)
        assert self._left_bytes is not None
        self._left_bytes -= len(_encode(row))
        if self._left_bytes <= 0:
            self._warn(
                f"{self._path} has reached {MAX_FILE_BYTES >> 20} MiB: further lines of clients are only in this log"
            )

    def _opened(self) -> AppendFile[dict[str, Any]]:
        if self._file is None:
            self._file = AppendFile(self._path, _encode, self._warn, new=False)
            self._left_bytes = MAX_FILE_BYTES - self._path.stat().st_size
        return self._file

    def close(self) -> None:
        """Close the file of the clients' log lines; later lines go to `logging` only."""
        with self._lock:
            self._is_closed = True
            if self._file is not None:
                self._file.close()


def _encode(row: dict[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"
