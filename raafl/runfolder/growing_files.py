"""Write the journal of a run, with a hash chain over its rows, and its tables, with a digest of their rows."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from raafl.runfolder.append_file import COUNTED, AppendFile, read_table, write_table
from raafl.runfolder.chain import START, link, read_head
from raafl.runfolder.json_text import plain, to_json
from raafl.runfolder.schema import JournalRow
from raafl.runfolder.seals import TableDigest, TableSeal


class JournalFile(AppendFile[bytes]):
    """Journal file: one JSON object per line, and a `gap` row where rows are missing.

    `head`: hash of the last row in the file; rows that could not be written yet have no hash.
    `length`: number of rows in the file, including those from before the run was resumed.
    """

    def __init__(
        self, path: Path, warn: Callable[[str], None], remake: Callable[[], None], *, new: bool = True
    ) -> None:
        self._time_s, self._last_id = 0.0, 0
        self.head, self.length = (START, 0) if new else read_head(path)
        super().__init__(path, bytes, warn, remake=remake, new=new, consequence=COUNTED)

    def _write(self, data: bytes) -> None:
        line, head = link(self.head, data)
        super()._write(line)
        self.head, self.length = head, self.length + 1

    def _emptied(self) -> None:
        self.length = 0  # the head stays: the gap that comes first is linked to the rows that were lost

    def event(self, event: JournalRow) -> None:
        """Append an event to the journal file."""
        self._time_s = event.get("time_s", self._time_s)
        if event.get("event") == "assigned":
            self._last_id = event["id"]
        self.add(_line(event))

    def gap(self, num_rows: int) -> None:
        """Append a row which says that ``num_rows`` rows are missing at this point of the file."""
        self.add(self._gap(num_rows))

    def _gap(self, num_rows: int) -> bytes:
        return _line({"time_s": self._time_s, "event": "gap", "rows": num_rows, "last_id": self._last_id})

    def _put_gap(self, num_rows: int) -> None:
        self._write(self._gap(num_rows))


class TableFile(AppendFile[list[Any]]):
    """CSV file with a header; None is written as an empty cell, a mapping as JSON."""

    def __init__(
        self,
        path: Path,
        columns: Sequence[str],
        warn: Callable[[str], None],
        remake: Callable[[], None],
        *,
        new: bool = True,
    ) -> None:
        self._digest = TableDigest() if new else TableDigest.of_file(path)
        self._header: tuple[str, ...] = () if new else tuple(next(read_table(path), ()))  # as it is in the file
        self.columns = self._header or tuple(columns)
        self._rows: list[str] = []
        self._writer = csv.writer(_Into(self._rows), lineterminator="\n")
        super().__init__(path, self._text, warn, new=new, remake=remake, consequence=COUNTED)
        try:
            self._prepare()
        except OSError:
            self.abandon()
            raise

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row, given as values by column; missing columns stay empty."""
        get = row.get
        self.add([value if type(value := get(name)) in _AS_THEY_ARE else _cell(value) for name in self.columns])

    def widen(self, new: Sequence[str]) -> None:
        """Add columns at the end; the file is rewritten when the next row is added."""
        self.columns = (*self.columns, *new)

    def sealed(self) -> TableSeal:
        """Return a digest of the rows in the file."""
        return self._digest.seal(self._header)

    def _write(self, data: bytes) -> None:
        super()._write(data)
        self._digest.add(data)

    def _emptied(self) -> None:
        self._header, self._digest = (), TableDigest()

    def _prepare(self) -> None:
        if self._header == self.columns:
            return
        if not self._header:
            super()._write(self._text(list(self.columns)))
        else:
            old = islice(read_table(self.path), 1, None)
            write_table(self.path, chain([self.columns], (row + [""] * (len(self.columns) - len(row)) for row in old)))
            self._open("ab")
        self._header = self.columns

    def _text(self, cells: list[Any]) -> bytes:
        self._writer.writerow(cells + [""] * (len(self.columns) - len(cells)))
        return self._rows.pop().encode()


_AS_THEY_ARE = frozenset({type(None), bool, int, float, str})


class _Into:
    """File object for `csv.writer` that appends each row to a list."""

    def __init__(self, rows: list[str]) -> None:
        self.write = rows.append


def _line(value: JournalRow) -> bytes:
    return (to_json(value) + "\n").encode()


def _cell(value: object) -> object:
    if isinstance(value, (int, float, str)):
        return value
    data = plain(value) if not isinstance(value, dict | list | tuple) else value
    return to_json(data) if isinstance(data, dict | list | tuple) else data
