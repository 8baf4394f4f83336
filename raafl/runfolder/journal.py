"""Write the run folder; its file and column names are in raafl.runfolder.schema.

config.yaml     the whole configuration, as given
events.jsonl    the journal, one JSON object a line: the events in the order in which the coordinator handled them
metrics.csv     version, time_s, wall_s, then one column a metric, one a figure of the run, one a target
clients.csv     one line a task
checkpoints/    see raafl.runfolder.checkpoints
summary.json    written once, at the end
seals.jsonl     signed digests of all of these, see raafl.runfolder.seals

Each row is one write to the operating system (about a microsecond), so a run that crashes leaves whole lines and loses
none that were appended. What cannot be written never ends a run: see raafl.runfolder.append_file. One writer at a time: the
run's loop writes all but checkpoints and their seals, which come one after the other from the checkpointer's thread.
"""

from __future__ import annotations

import csv
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain, count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Self, cast
from weakref import WeakSet

from raafl.atomic_file import atomic_file
from raafl.errors import BadInput
from raafl.runfolder.append_file import (
    COUNTED,
    START,
    AppendFile,
    link,
    plain,
    read_table,
    to_json,
    write_table,
)
from raafl.runfolder.schema import (
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
    Sealed,
    Summary,
    TableSeal,
)

if TYPE_CHECKING:
    from raafl.runfolder.events import Reader
    from raafl.runfolder.seals import RunSeals, Signer


class JournalFile(AppendFile[bytes]):
    """Journal file: one JSON object per line, and a `gap` row where rows are missing.

    `head`: hash of the last row in the file; rows that could not be written yet have no hash.
    `length`: number of rows in the file, including those from before the run was resumed.
    """

    def __init__(
        self, path: Path, warn: Callable[[str], None], remake: Callable[[], None], *, new: bool = True
    ) -> None:
        self._time_s, self._last_id = 0.0, 0
        self.head, self.length = START, 0
        if not new:
            from raafl.runfolder.books import read_head

            self.head, self.length = read_head(path)
        super().__init__(path, bytes, warn, remake=remake, new=new, num_before=self.length, consequence=COUNTED)

    def _write(self, data: bytes) -> None:
        line, head = link(self.head, data)
        super()._write(line)
        self.head, self.length = head, self.length + 1

    def _emptied(self) -> None:
        self.length = 0  # the hash stays, so that the row about the gap is chained to the lost rows

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
        from raafl.runfolder.seals import TableDigest

        self._digest = TableDigest() if new else TableDigest.of_file(path)
        # columns in the file's header
        self._header: tuple[str, ...] = () if new else tuple(next(read_table(path), ()))
        self.columns = self._header or tuple(columns)
        self.names = frozenset(self.columns)
        self._rows: list[str] = []
        self._writer = csv.writer(cast(Any, SimpleNamespace(write=self._rows.append)), lineterminator="\n")
        num_before = self._digest.lines
        super().__init__(path, self._text, warn, new=new, num_before=num_before, remake=remake, consequence=COUNTED)
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
        self.names = frozenset(self.columns)

    def sealed(self) -> TableSeal:
        """Return a digest of the rows in the file."""
        return self._digest.seal(self._header)

    def _write(self, data: bytes) -> None:
        super()._write(data)
        self._digest.add(data)

    def _emptied(self) -> None:
        self._header, self._digest = (), type(self._digest)()

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


def _line(value: JournalRow) -> bytes:
    return (to_json(value) + "\n").encode()


def _cell(value: object) -> object:
    if isinstance(value, (int, float, str)):
        return value
    data = plain(value) if not isinstance(value, dict | list | tuple) else value
    return to_json(data) if isinstance(data, dict | list | tuple) else data


_log = logging.getLogger(__name__)


class RunFolder:
    """The files of a run, opened for writing.

    Raises:
        BadInput: the folder is not empty, another process writes a run there, or `path` is not a folder.
        OSError: the folder cannot be created; nothing is left behind.
    """

    reader: Reader | None = None  # also gets each row, as the progress display does; None = nobody does
    signer: Signer | None = None  # signs the records; None = they stay unsigned
    _seals: RunSeals | None = None
    _lock: FolderLock | None = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        config_yaml: str,
        warn: Callable[[str], None] = _log.warning,
        *,
        new: bool = True,
    ) -> None:
        """Create the folder, or open one that is locked and checked already; see `raafl.runtime.lifecycle.resume.reopened`."""
        self.path = Path(path)
        self._was_there = self.path.exists()
        self._config, self._warn = config_yaml, warn
        if new:
            self._take()
        try:
            self._remake()
            self._open(new=new)
        except OSError:
            if new:
                self._remove()
            raise

    def _take(self) -> None:
        """Create and lock the folder, and check only then that it is empty: another process may have been faster."""
        if self.path.is_dir() or not self.path.exists():
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.path, "output")
            if not any(self.path.iterdir()):
                return
            self._lock.close()
        raise BadInput(
            f"output: {str(self.path)!r} exists and is not an empty folder; name a new one, or remove it first"
        )

    def _open(self, *, new: bool) -> None:
        opened: list[AppendFile[Any]] = []
        try:
            self._events = JournalFile(self.path / JOURNAL, self._warn, self._remake, new=new)
            opened.append(self._events)
            self._metrics = TableFile(self.path / METRICS, (), self._warn, self._remake, new=new)
            opened.append(self._metrics)
            self._clients = TableFile(self.path / CLIENTS, CLIENT_COLUMNS, self._warn, self._remake, new=new)
        except OSError:
            for rows in opened:  # without flushing, since the folder is given up
                rows.abandon()
            raise

    def _remake(self) -> None:
        """Create the folder and its config again if somebody has deleted them."""
        self.path.mkdir(parents=True, exist_ok=True)
        config = self.path / CONFIG
        if not config.exists():
            config.write_text(self._config, encoding="utf-8")

    def discard(self) -> None:
        """Close the files of a new run that cannot begin, and delete them."""
        for file in (self._events, self._metrics, self._clients):
            file.abandon()
        self._remove()

    def _remove(self) -> None:
        """Delete the files of a new run that cannot begin, and its folder unless that was there before or has other files."""
        with suppress(OSError):
            for name in (CONFIG, *GROWING):
                (self.path / name).unlink(missing_ok=True)
            if not self._was_there:
                self.path.rmdir()
        if self._lock is not None:
            self._lock.close()

    @property
    def unwritten(self) -> dict[str, int]:
        """Number of rows that could not be written, by file name; files that lack no rows are left out."""
        files: tuple[AppendFile[Any], ...] = (self._events, self._metrics, self._clients)
        return {file.path.name: file.num_unwritten for file in files if file.num_unwritten}

    @property
    def num_clients_dropped(self) -> int:
        """Number of rows that clients.csv lacks and that will never be written."""
        return self._clients.num_dropped

    def event(self, event: JournalRow) -> None:
        """Append a row to the journal; NaN and infinity become null, and data that JSON cannot represent raise a TypeError."""
        self._events.event(event)
        if self.reader is not None:
            self.reader.event(event)

    def metrics(self, row: Mapping[str, Any]) -> None:
        """Append a row to metrics.csv for an evaluation: `version`, `time_s`, `wall_s` and any metrics.

        The first row determines the columns. A metric that appears later gets a new column at the end, for which the
        file is rewritten once. Missing metrics are left empty.
        """
        table, row = self._metrics, _rounded(row)
        new = [name for name in row if name not in table.columns]
        if new:
            table.widen(new if table.columns else [*METRIC_COLUMNS, *(n for n in new if n not in METRIC_COLUMNS)])
        table.append(row)
        if self.reader is not None:
            self.reader.metrics(row)

    def client(self, row: Mapping[str, Any]) -> None:
        """Append a row to clients.csv for a finished task: a `ClientRow`; missing cells stay empty.

        Further columns (memory, values logged by `training_step`, metrics measured by clients) are added at the end
        when a row first has them.

        Raises:
            ValueError: `row` has a column that clients.csv cannot have.
        """
        row = _rounded(row)
        if not row.keys() <= self._clients.names:
            self._widen_clients([name for name in row if name not in self._clients.names])
        self._clients.append(row)
        if self.reader is not None:
            self.reader.client(row)

    def _widen_clients(self, new: Sequence[str]) -> None:
        known = (*MEMORY_COLUMNS, *LOGGED_COLUMNS)
        if unknown := [name for name in new if not name.startswith(TESTED) and name not in known]:
            raise ValueError(
                f"clients.csv has no column {', '.join(sorted(unknown))}; it has {', '.join(CLIENT_COLUMNS)}"
            )
        self._clients.widen(new)

    def gap(self, num_rows: int) -> None:
        """Write a note to the journal that ``num_rows`` rows are missing at this point."""
        self._events.gap(num_rows)

    def flush(self) -> None:
        """Try again to write the rows that could not be written so far, in all files."""
        for file in (self._events, self._metrics, self._clients):
            file.flush()

    def summary(self, summary: Summary) -> None:
        """Write `summary.json` atomically.

        Raises:
            OSError: the file cannot be written.
        """
        text = to_json(summary, indent=2) + "\n"
        self._remake()
        with atomic_file(self.path / SUMMARY) as file:
            file.write(text.encode())

    def finish(self, summary: Summary, num_checkpoints: int, warnings: list[str]) -> None:
        """Write the summary of a run that ended, with its warnings and the number of rows that could not be written."""
        self.flush()
        summary["unwritten"] = self.unwritten | ({"checkpoints": num_checkpoints} if num_checkpoints else {})
        summary["warnings"] = warnings
        try:
            self.summary(summary)
        except OSError as error:
            self._warn(f"{self.path / 'summary.json'} cannot be written: {error.strerror or error}")
            summary["unwritten"][SUMMARY] = 1

    @property
    def head(self) -> str:
        """Hash of the journal's last row."""
        return self._events.head

    def sealed(self) -> Sealed:
        """Return hashes of the present rows of the journal and the tables, to be passed to `seal` later."""
        tables = {METRICS: self._metrics.sealed(), CLIENTS: self._clients.sealed()}
        return Sealed(self._events.length, self._events.head, tables)

    def seal(
        self, sealed: Sealed, version: int, names: Iterable[str], *, final: bool = False, altered: Iterable[str] = ()
    ) -> bool:
        """Write a seal (signed if there is a signer) with hashes of the run's files; return whether the disk took it."""
        if self._seals is None:
            from raafl.runfolder.seals import RunSeals

            self._seals = RunSeals(self.path, self.signer, self._warn, self._remake)
        taken = self._seals.seal(sealed, version, names, final=final, altered=altered)
        if final:
            # give up rows that wait for disk space: written after the final seal, they would look like a forgery
            for file in (self._events, self._metrics, self._clients):
                file.abandon()
        return taken

    def close(self) -> None:
        """Try once more to write the rows that could not be written so far, and close the files; a second call does nothing."""
        for file in (self._events, self._metrics, self._clients):
            file.close()
        if self._seals is not None:
            self._seals.close()
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def default_run_folder(name: str, root: str | os.PathLike[str] = "runs") -> Path:
    """Return a new path `runs/NAME-YYYYMMDD-HHMMSS`, with a number appended if it exists; the folder is not created."""
    return unused_path(Path(root) / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")


def unused_path(first: Path) -> Path:
    """Return ``first``, with a number appended if it exists."""
    others = (first.with_name(f"{first.name}-{number}") for number in count(2))
    return next(path for path in chain([first], others) if not path.exists())


@lru_cache(maxsize=1024)
def _is_figure(name: str) -> bool:
    """Check whether a column holds times or shares; they are rounded to 12 digits, against errors of summation in the last."""
    return name in RUN_COLUMNS or name.endswith("_s") or name.startswith(TIME_TO)


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Round the times and shares of a row; metrics stay exact."""
    return {
        name: float(f"{value:.12g}") if type(value) is float and _is_figure(name) else value
        for name, value in row.items()
    }


# Lock a run folder, so that two processes never write the same run. The lock is on the folder itself (flock): it leaves
# no file, follows a renamed folder, and the kernel releases it when the process ends. Readers do not need it.

_held: Final[WeakSet[FolderLock]] = WeakSet()
"""Locks of run folders that this process holds."""


class FolderLock:
    """Lock on a run folder, for the process that writes the run; a context manager.

    Where the file system cannot lock, it logs a warning and does nothing else. On a network file system (NFS) Linux locks
    folders on each machine by itself, without asking the server.
    """

    def __init__(self, folder: Path, field: str) -> None:
        """Take the lock of ``folder`` without waiting.

        Raises:
            BadInput: another process, or another run of this process, has the lock.
        """
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            _held.add(self)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise BadInput(
                f"{field} is '{folder}', where another process is writing its run: wait until it ends, or end it first"
            ) from None
        except OSError as error:
            self.close()
            _log.warning(
                f"{folder} cannot be locked ({error.strerror or error}): make sure that no other process writes there"
            )

    def close(self) -> None:
        """Release the lock; a second call does nothing."""
        _held.discard(self)
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:  # the run failed before `close` was called
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _leave_to_parent() -> None:
    """Close a forked child's copies of the folder locks: it may outlive its parent, which alone must hold them."""
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_leave_to_parent)
