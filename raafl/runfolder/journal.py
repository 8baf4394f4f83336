"""The run folder as it is written; its names are in raafl.runfolder.schema.

config.yaml     the whole configuration, as given
events.jsonl    the journal, one JSON object a line: the events in the order in which the coordinator handled them
metrics.csv     version, time_s, wall_s, then one column a metric, one a figure of the run, one a target
clients.csv     one line a task
checkpoints/    see raafl.runfolder.checkpoints
summary.json    written once, at the end

Each row is one write to the operating system (about a microsecond), so a run that crashes leaves whole lines and loses
none that were appended. What cannot be written never ends a run: see raafl.runfolder.append_file. One writer at a time: nothing
here is safe to call from several threads.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self

from raafl.errors import BadInput
from raafl.runfolder.append_file import AppendFile, atomic_file, read_table, remove_leftovers, write_table
from raafl.runfolder.schema import (
    CHECKPOINTS,
    CLIENT_COLUMNS,
    CLIENTS,
    CONFIG,
    GROWING,
    JOURNAL,
    LOGGED_COLUMNS,
    MEMORY_COLUMNS,
    METRIC_COLUMNS,
    METRICS,
    RUN_COLUMNS,
    SUMMARY,
    TESTED,
    TIME_TO,
    JournalRow,
    Summary,
)
from raafl.runfolder.tail import Reader

_READ_BYTES = 2**16  # at a time, of a file's end
_log = logging.getLogger(__name__)


class RunFolder:
    """The files of one run, opened for writing.

    Attributes:
        reader: receives each row as it is written, such as the progress view; None = none.

    Args:
        path: The folder; made if it is not there.
        config_yaml: The text of `config.yaml`.
        warn: Told what cannot be written, once for each file; the logger unless given.

    Raises:
        BadInput: The folder holds something already, or `path` is not a folder.
        OSError: It cannot be made; nothing of it is left.
    """

    reader: Reader | None = None

    def __init__(
        self, path: str | os.PathLike[str], config_yaml: str, warn: Callable[[str], None] = _log.warning
    ) -> None:
        self.path = Path(path)
        was_there = self.path.exists()
        if was_there and (not self.path.is_dir() or any(self.path.iterdir())):
            raise BadInput(
                f"output: {str(self.path)!r} exists and is not an empty folder; name a new one, or remove it first"
            )
        self._config, self._warn = config_yaml, warn
        try:
            self._remake()
            self._open(new=True)
        except OSError:
            self._remove(folder=not was_there)
            raise

    @classmethod
    def reopen(cls, path: str | os.PathLike[str], warn: Callable[[str], None] = _log.warning) -> Self:
        """Open the folder of an interrupted run to continue it; an incomplete last line is removed.

        Raises:
            BadInput: the folder is not a run's.
            OSError: nothing may be written in it.
        """
        folder = cls.__new__(cls)
        folder.path = Path(path)
        for name in (CONFIG, *GROWING):
            if not (folder.path / name).is_file():
                raise BadInput(f"resume: '{folder.path}' is not a run folder: it has no {name}")
        for name in GROWING:
            _cut_torn_line(folder.path / name)
        for place in (folder.path, folder.path / CHECKPOINTS):
            remove_leftovers(place)
        folder._config = (folder.path / CONFIG).read_text(encoding="utf-8")
        folder._warn = warn
        folder._open(new=False)
        return folder

    def _open(self, *, new: bool) -> None:
        opened: list[AppendFile[Any]] = []
        try:
            self._events = _Journal(self.path / JOURNAL, self._warn, self._remake, new=new)
            opened.append(self._events)
            self._metrics = _Table(self.path / METRICS, (), self._warn, self._remake, new=new)
            opened.append(self._metrics)
            self._clients = _Table(self.path / CLIENTS, CLIENT_COLUMNS, self._warn, self._remake, new=new)
        except OSError:
            for rows in opened:  # without a flush: the folder is given up
                rows.abandon()
            raise

    def _remake(self) -> None:
        """Create the folder and its config where they are missing."""
        self.path.mkdir(parents=True, exist_ok=True)
        config = self.path / CONFIG
        if not config.exists():
            config.write_text(self._config, encoding="utf-8")

    def _remove(self, *, folder: bool) -> None:
        """Remove a folder that has no space for a run."""
        with suppress(OSError):
            for name in (CONFIG, *GROWING):
                (self.path / name).unlink(missing_ok=True)
            if folder:
                self.path.rmdir()

    @property
    def unwritten(self) -> dict[str, int]:
        """Return the rows missing in each file, pending or dropped; complete files are left out."""
        files: tuple[AppendFile[Any], ...] = (self._events, self._metrics, self._clients)
        return {file.path.name: file.num_unwritten for file in files if file.num_unwritten}

    @property
    def num_clients_dropped(self) -> int:
        """Return the number of rows of clients.csv that could never be written."""
        return self._clients.num_dropped

    def event(self, event: JournalRow) -> None:
        """Append one object to the journal; NaN and infinities become null, TypeError for what JSON cannot hold."""
        self._events.event(event)
        if self.reader is not None:
            self.reader.event(event)

    def metrics(self, row: Mapping[str, Any]) -> None:
        """Append one evaluation: `version`, `time_s`, `wall_s` and any metrics.

        The first row fixes the columns. A metric that first appears later gets a column at the end: the table is then
        rewritten once, with that column empty in the earlier rows. A metric that a row lacks is left empty.
        """
        table, row = self._metrics, {name: _rounded(name, value) for name, value in row.items()}
        new = [name for name in row if name not in table.columns]
        if new:
            table.widen(new if table.columns else [*METRIC_COLUMNS, *(n for n in new if n not in METRIC_COLUMNS)])
        table.append(row)
        if self.reader is not None:
            self.reader.metrics(row)

    def client(self, row: Mapping[str, Any]) -> None:
        """Append one finished task: a `ClientRow`, whose missing cells are left empty; `spec` may be a mapping.

        Columns for memory, for what `training_step` logs, and for what clients measure themselves, come at the end once a row
        has them.

        Raises:
            ValueError: `row` has a column that clients.csv does not know.
        """
        row = {name: _rounded(name, value) for name, value in row.items()}
        new = [name for name in row if name not in self._clients.columns]
        known = (*MEMORY_COLUMNS, *LOGGED_COLUMNS)
        if unknown := [name for name in new if not name.startswith(TESTED) and name not in known]:
            raise ValueError(
                f"clients.csv has no column {', '.join(sorted(unknown))}; it has {', '.join(CLIENT_COLUMNS)}"
            )
        if new:
            self._clients.widen(new)
        self._clients.append(row)
        if self.reader is not None:
            self.reader.client(row)

    def gap(self, num_rows: int) -> None:
        """Mark in the journal that rows are missing here."""
        self._events.gap(num_rows)

    def flush(self) -> None:
        """Try again to write pending rows."""
        for file in (self._events, self._metrics, self._clients):
            file.flush()

    def summary(self, summary: Summary) -> None:
        """Write `summary.json`, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        text = to_json(summary, indent=2) + "\n"
        self._remake()
        with atomic_file(self.path / SUMMARY) as file:
            file.write(text.encode())

    def finish(self, summary: Summary, num_checkpoints: int, warnings: list[str]) -> None:
        """Write the summary, after adding to it, in place, the numbers of rows that could not be written.

        Args:
            summary: gets ``unwritten``: rows missing in each file, checkpoints, and the summary itself; and ``warnings``.
            num_checkpoints: how many could not be written.
            warnings: what was said during the run; one is added if the summary cannot be written.
        """
        self.flush()
        summary["unwritten"] = self.unwritten | ({"checkpoints": num_checkpoints} if num_checkpoints else {})
        summary["warnings"] = warnings
        try:
            self.summary(summary)
        except OSError as error:
            self._warn(f"{self.path / 'summary.json'} cannot be written: {error.strerror or error}")
            summary["unwritten"][SUMMARY] = 1

    def close(self) -> None:
        """Write pending rows if possible, and close the files; a second call does nothing."""
        for file in (self._events, self._metrics, self._clients):
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def default_run_folder(name: str, root: str | os.PathLike[str] = "runs") -> Path:
    """Return `runs/NAME-YYYYMMDD-HHMMSS`, with a number behind it if that is taken. The folder is not made."""
    first = Path(root) / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = first, 2
    while path.exists():
        path, number = first.with_name(f"{first.name}-{number}"), number + 1
    return path


def to_json(value: object, indent: int | None = None) -> str:
    """Return JSON text of plain data, tensors, numpy values and dataclasses; NaN and infinities become null."""
    try:
        return _ENCODE(value) if indent is None else json.dumps(value, indent=indent, allow_nan=False, default=_plain)
    except ValueError:  # a float that JSON has no word for: rare, so only then is the value walked
        return json.dumps(finite(value), indent=indent, separators=None if indent else (",", ":"), allow_nan=False)


def _plain(value: object) -> object:
    """Return a JSON-compatible stand-in for an object."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):  # tensors and numpy arrays; a plain number where they hold one without a dimension
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} {value!r} cannot be written as JSON; convert it to plain data first")


def finite(value: object) -> Any:
    """Return plain data with None for numbers that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value if value is None or isinstance(value, str | int) else finite(_plain(value))


_ENCODE = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_plain).encode


class _Journal(AppendFile[bytes]):
    """Journal file: one JSON object a line, with a `gap` row where rows are missing."""

    def __init__(self, path: Path, warn: Callable[[str], None], remake: Callable[[], None], **options: Any) -> None:
        self._time_s, self._last_id = 0.0, 0
        super().__init__(path, bytes, warn, remake=remake, **options)

    def event(self, event: JournalRow) -> None:
        self._time_s = event.get("time_s", self._time_s)
        if event.get("event") == "assigned":
            self._last_id = event["id"]
        self.add(_line(event))

    def gap(self, num_rows: int) -> None:
        self.add(self._gap(num_rows))

    def _gap(self, num_rows: int) -> bytes:
        return _line({"time_s": self._time_s, "event": "gap", "rows": num_rows, "last_id": self._last_id})

    def _put_gap(self, num_rows: int) -> None:
        self._write(self._gap(num_rows))


class _Table(AppendFile[list[Any]]):
    """CSV file with a header. None becomes an empty cell, mappings become JSON."""

    def __init__(
        self, path: Path, columns: Sequence[str], warn: Callable[[str], None], remake: Callable[[], None], *,
        new: bool = True, **options: Any,
    ) -> None:  # fmt: skip
        self._header: tuple[str, ...] = () if new else tuple(next(read_table(path), ()))  # as it is in the file
        self.columns = self._header or tuple(columns)
        self._rows: list[str] = []
        self._writer = csv.writer(_Into(self._rows), lineterminator="\n")
        super().__init__(path, self._text, warn, new=new, remake=remake, **options)
        try:
            self._prepare()
        except OSError:
            self.abandon()
            raise

    def append(self, row: Mapping[str, Any]) -> None:
        get = row.get
        self.add([value if type(value := get(name)) in _AS_THEY_ARE else _cell(value) for name in self.columns])

    def widen(self, new: Sequence[str]) -> None:
        """Add columns at the end; the existing rows are rewritten with the next row."""
        self.columns = (*self.columns, *new)

    def _emptied(self) -> None:
        self._header = ()

    def _prepare(self) -> None:
        if self._header == self.columns:
            return
        if not self._header:
            self._write(self._text(list(self.columns)))
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
    plain = _plain(value) if not isinstance(value, dict | list | tuple) else value
    return to_json(plain) if isinstance(plain, dict | list | tuple) else plain


def _rounded(name: str, value: object) -> object:
    """Round times and shares to hide summation error; leave metrics exact."""
    is_figure = name in RUN_COLUMNS or name.endswith("_s") or name.startswith(TIME_TO)
    return float(f"{value:.12g}") if is_figure and type(value) is float else value


def _cut_torn_line(path: Path) -> None:
    with path.open("rb+") as file:
        end, found = file.seek(0, os.SEEK_END), -1
        while end and found < 0:
            start = max(end - _READ_BYTES, 0)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            end = start
        file.truncate(end + found + 1)
