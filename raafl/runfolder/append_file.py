"""Write files that grow by complete rows; a full disk neither ends the run nor damages the file.

A row that cannot be written (disk full, quota, read-only, folder deleted) stays in memory, up to a bound, and is written when
that works again; beyond the bound rows are dropped and counted. The first failure is reported, not raised.

Rows of a journal are connected by a hash chain, which shows later changes. The last field of each row is ``chain``: the hex
SHA-256 of the previous row's ``chain`` followed by the row as it is without that field. So the last ``chain``, the head, stands
for the whole journal: a row that is changed, removed, inserted or moved no longer fits the row before it (`raafl.runfolder.books`).
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from raafl.atomic_file import atomic_file


def to_json(value: object, indent: int | None = None) -> str:
    """Convert plain data, tensors, numpy values or dataclasses to JSON text; NaN and infinity become null."""
    try:
        return _ENCODE(value) if indent is None else json.dumps(value, indent=indent, allow_nan=False, default=plain)
    except ValueError:  # NaN or infinity, which JSON lacks; they are rare, so values are only replaced after this error
        return json.dumps(finite(value), indent=indent, separators=None if indent else (",", ":"), allow_nan=False)


def plain(value: object) -> object:
    """Convert an object to data that JSON can represent."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):  # tensors and numpy arrays; one without dimensions becomes a plain number
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} {value!r} cannot be written as JSON; convert it to plain data first")


def finite(value: object) -> Any:
    """Replace numbers that JSON cannot represent (NaN, infinity) by None in plain data; return the result."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value if value is None or isinstance(value, str | int) else finite(plain(value))


_ENCODE = json.JSONEncoder(allow_nan=False, check_circular=False, separators=(",", ":"), default=plain).encode


KEPT_ROWS = 10_000
"""Rows of one file that are kept in memory while they cannot be written."""
RETRY_S = 1.0
"""Seconds between two tries to write them: a full disk may take milliseconds to say so again."""
DELETED = "it was deleted during the run"
LOST = "the run goes on, and rows that cannot be written later are lost"
COUNTED = "the run goes on, and rows that cannot be written later are counted as unwritten in the summary"

Item = TypeVar("Item")
_log = logging.getLogger(__name__)


class AppendFile(Generic[Item]):
    """File of rows, such as CSV or JSON lines, to which a single writer appends complete rows.

    `num_rows`: number of rows that were written.
    `num_dropped`: number of rows that will never be written.
    """

    def __init__(
        self,
        path: Path,
        encode: Callable[[Item], bytes],
        warn: Callable[[str], None] = _log.warning,
        *,
        new: bool = True,
        num_before: int = 0,
        remake: Callable[[], None] = lambda: None,
        consequence: str = LOST,
    ) -> None:
        """Open the file, which has ``num_before`` rows; raise OSError if that fails."""
        self.path, self._encode, self._warn, self._remake = path, encode, warn, remake
        self._consequence = consequence
        self._tried_s, self._looked_s = 0.0, time.monotonic()
        self._file = io.FileIO(path, "xb" if new else "ab")
        self._kept: deque[Item] = deque()
        self._num_before = num_before
        self.num_rows = self.num_dropped = self._num_new_dropped = 0
        self._warned = False

    def abandon(self) -> None:
        """Close the file; rows that could not be written so far are lost."""
        self._file.close()

    @property
    def num_unwritten(self) -> int:
        """Number of rows that the file lacks, since they could not be written yet or were dropped."""
        return len(self._kept) + self.num_dropped

    def add(self, item: Item) -> bool:
        """Append a row; if it cannot be written now, store it in memory and try again later. Return whether it is in the file.

        Raises:
            ValueError: the file is closed.
        """
        data = self._encode(item)
        if self._file.closed:
            raise ValueError("the file is closed, so no row can be written to it")
        if not (self._kept or self._num_new_dropped):
            try:
                self._put(data)
                self.num_rows += 1
                return True
            except OSError as error:
                self._fail(error)
        if len(self._kept) < KEPT_ROWS:
            self._kept.append(item)
        else:
            self.num_dropped += 1
            self._num_new_dropped += 1
        if time.monotonic() - self._tried_s >= RETRY_S:
            self.flush()
        return not (self._kept or self._num_new_dropped)

    def flush(self) -> None:
        """Try again to write the rows that could not be written so far."""
        if self._file.closed:
            return
        self._tried_s = time.monotonic()
        try:
            self._look()
            while self._kept:
                self._put(self._encode(self._kept[0]))
                self._kept.popleft()
                self.num_rows += 1
            if self._num_new_dropped:
                self._put_gap(self._num_new_dropped)
                self._num_new_dropped = 0
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """Try once more to write the rows that could not be written so far, and close the file; a second call does nothing."""
        self.flush()
        # some file systems report a failed write only now; how many rows are lost is then unknown
        with suppress(OSError):
            self._file.close()

    def _put(self, data: bytes) -> None:
        """Write one row completely or not at all; every few seconds, check that the file still exists."""
        if time.monotonic() - self._looked_s >= RETRY_S:
            self._look()
        self._prepare()
        self._write(data)

    def _look(self) -> None:
        """Recreate the file if it was deleted: writes to a deleted file would be lost without any error."""
        self._looked_s = time.monotonic()
        if os.fstat(self._file.fileno()).st_nlink == 0:
            self._begin_anew()

    def _write(self, data: bytes) -> None:
        start, rest = -1, data
        try:
            while rest:  # a signal, or a disk that is almost full, can cut a write short
                num_bytes = self._file.write(rest)
                if num_bytes < len(rest) and start < 0:
                    start = self._file.tell() - num_bytes
                rest = rest[num_bytes:]
        except OSError:
            if start >= 0:
                with suppress(OSError):
                    self._file.truncate(start)
                    self._file.seek(start)
            raise

    def _prepare(self) -> None:
        """Write the file's header before the first row; formats without a header do nothing."""

    def _emptied(self) -> None:
        """Reset what depends on the file's header, after a new file was begun."""

    def _put_gap(self, num_rows: int) -> None:
        """Write into the file that ``num_rows`` rows are missing here, if its format can say so."""

    def _begin_anew(self) -> None:
        """Recreate a deleted file: its rows count as lost, rows that wait are written to the new file."""
        try:
            self._remake()
            self._open("ab")
        except OSError as error:
            raise OSError(error.errno, f"{DELETED}, and cannot be made again: {error.strerror}") from None
        self._complain(DELETED)
        self._emptied()
        lost, self.num_rows, self._num_before = self._num_before + self.num_rows, 0, 0
        self.num_dropped += lost
        if lost:
            try:
                self._prepare()
                self._put_gap(lost)
            except OSError:
                self._num_new_dropped += lost  # reported with the next warning
                raise

    def _open(self, mode: str) -> None:
        file = io.FileIO(self.path, mode)
        with suppress(OSError):
            self._file.close()
        self._file = file

    def _fail(self, error: OSError) -> None:
        self._tried_s = time.monotonic()
        self._complain(error.strerror or str(error))

    def _complain(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"{self.path} cannot be written: {why}; {self._consequence}")


def complete_rows(data: bytes) -> list[bytes]:
    """Return the complete rows in the content of a file, with their line ends."""
    # not splitlines, which splits at other bytes, too
    return [row + b"\n" for row in data.split(b"\n")[:-1]]


def read_table(path: Path) -> Iterator[list[str]]:
    """Yield the header of a CSV file and then its rows; nothing if the file is empty."""
    with path.open(encoding="utf-8", newline="") as file:
        yield from csv.reader(file)


def write_table(path: Path, rows: Iterable[Sequence[str]]) -> None:
    """Write a CSV file atomically; it may replace the file from which the rows are being read."""
    with atomic_file(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        csv.writer(text, lineterminator="\n").writerows(rows)
        text.detach()


START: Final = "0" * 64
"""Head of a journal without rows."""

CHAIN_FIELD: Final = b',"chain":"'
CHAIN_END: Final = b'"}\n'


def link(head: str, row: bytes) -> tuple[bytes, str]:
    """Compute a journal row's hash, which depends on all rows before; return the row with its hash, and the hash alone."""
    new = hashlib.sha256(head.encode() + row).hexdigest()
    return b"".join((row[:-2], CHAIN_FIELD, new.encode(), CHAIN_END)), new
