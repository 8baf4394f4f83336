"""The run folder: what a run leaves behind, and its journal, from which the run can be replayed.

config.yaml     the whole configuration, as given
events.jsonl    one JSON object a line: the events in the order in which the coordinator handled them
metrics.csv     version, time_s, wall_s, then one column a metric
clients.csv     one line a task; the columns are CLIENT_COLUMNS
checkpoints/    see raafl.runtime.checkpoint
summary.json    written once, at the end

Each row is one write to the operating system (about a microsecond), so a run that crashes leaves whole lines and loses
none that were appended. One writer at a time: nothing here is safe to call from several threads.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from raafl.errors import BadInput

CLIENT_COLUMNS = (
    "client",
    "task",
    "assignment",
    "incarnation",
    "spec",
    "region",
    "version",
    "merged_version",
    "staleness",
    "assigned_s",
    "arrived_s",
    "train_s",
    "bytes_down",
    "bytes_up",
    "num_samples",
    "num_steps",
    "loss",
    "outcome",
)
METRIC_COLUMNS = ("version", "time_s", "wall_s")
_KNOWN_CLIENT_COLUMNS = frozenset(CLIENT_COLUMNS)


class RunFolder:
    """The files of one run, opened for writing.

    Args:
        path: The folder; made if it is not there.
        config_yaml: The text of `config.yaml`.

    Raises:
        BadInput: The folder holds something already, or `path` is not a folder.
    """

    def __init__(self, path: str | os.PathLike[str], config_yaml: str) -> None:
        self.path = Path(path)
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise BadInput(
                f"output: {str(self.path)!r} exists and is not an empty folder; name a new one, or remove it first"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "config.yaml").write_text(config_yaml, encoding="utf-8")
        self._events = _Lines(self.path / "events.jsonl")
        self._metrics = _Table(self.path / "metrics.csv", ())
        self._clients = _Table(self.path / "clients.csv", CLIENT_COLUMNS)

    @classmethod
    def reopen(cls, path: str | os.PathLike[str]) -> Self:
        """Open the folder of an interrupted run to write on; a torn last line is cut off.

        Raises:
            BadInput: the folder is not a run's.
        """
        folder = cls.__new__(cls)
        folder.path = Path(path)
        for name in ("config.yaml", "events.jsonl", "metrics.csv", "clients.csv"):
            if not (folder.path / name).is_file():
                raise BadInput(f"resume: '{folder.path}' is not a run folder: it has no {name}")
        for name in ("events.jsonl", "metrics.csv", "clients.csv"):
            _cut_torn_line(folder.path / name)
        folder._events = _Lines(folder.path / "events.jsonl", "a")
        folder._metrics = _Table(folder.path / "metrics.csv", (), reopen=True)
        folder._clients = _Table(folder.path / "clients.csv", CLIENT_COLUMNS, reopen=True)
        return folder

    def event(self, event: Mapping[str, Any]) -> None:
        """Append one object to the journal; NaN and infinities become null, TypeError for what JSON cannot hold."""
        self._events.write(to_json(event) + "\n")

    def metrics(self, row: Mapping[str, Any]) -> None:
        """Append one evaluation: `version`, `time_s`, `wall_s` and any metrics.

        The first row fixes the columns. A metric that first appears later gets a column at the end: the table is then
        rewritten once, with that column empty in the earlier rows. A metric that a row lacks is left empty.
        """
        table = self._metrics
        new = [name for name in row if name not in table.columns]
        if new:
            table.widen(new if table.columns else [*METRIC_COLUMNS, *(n for n in new if n not in METRIC_COLUMNS)])
        table.append(row)

    def client(self, row: Mapping[str, Any]) -> None:
        """Append one finished task. Columns that `row` lacks are left empty; `spec` may be a mapping.

        Raises:
            ValueError: `row` has a column that is not in CLIENT_COLUMNS.
        """
        if not row.keys() <= _KNOWN_CLIENT_COLUMNS:
            unknown = sorted(row.keys() - _KNOWN_CLIENT_COLUMNS)
            raise ValueError(f"clients.csv has no column {', '.join(unknown)}; it has {', '.join(CLIENT_COLUMNS)}")
        self._clients.append(row)

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`, whole or not at all."""
        text = to_json(summary, indent=2) + "\n"
        with atomic_file(self.path / "summary.json") as file:
            file.write(text.encode())

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        for file in (self._events, self._metrics, self._clients):
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def default_run_folder(name: str, root: str | os.PathLike[str] = "runs") -> Path:
    """Return `runs/NAME-YYYYMMDD-HHMMSS`, with a number behind it if that is taken. The folder is not made."""
    first = Path(root) / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = first, 2
    while path.exists():
        path, number = first.with_name(f"{first.name}-{number}"), number + 1
    return path


def read_events(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of a journal in order; `path` is a run folder or its `events.jsonl`.

    A last line that is torn (no line end, as a crash may leave it) is left out.

    Raises:
        ValueError: A line that is not torn is not a JSON object; the message names file and line.
        FileNotFoundError: There is no journal at `path`.
    """
    path = Path(path)
    path = path / "events.jsonl" if path.is_dir() else path
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                event = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not a line of JSON ({error}); the journal was changed") from error
            if not isinstance(event, dict):
                raise ValueError(f"{path}:{number}: a {type(event).__name__} where an event (an object) was expected")
            yield event


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that appears under `path` only when the block ends well: written beside it, synced, then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON text of plain data, tensors, numpy values and dataclasses; NaN and infinities become null."""
    try:
        return _ENCODE(value) if indent is None else json.dumps(value, indent=indent, allow_nan=False, default=_plain)
    except ValueError:  # a float that JSON has no word for: rare, so only then is the value walked
        return json.dumps(_finite(value), indent=indent, separators=None if indent else (",", ":"), allow_nan=False)


def _plain(value: Any) -> Any:
    """What JSON should hold in place of an object that it does not know."""
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


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value if value is None or isinstance(value, str | int) else _finite(_plain(value))


_ENCODE = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_plain).encode


class _Lines:
    """A text file whose lines are written one at a time, each as a whole."""

    def __init__(self, path: Path, mode: str = "x") -> None:
        self._file = io.FileIO(path, mode)

    def write(self, line: str) -> None:
        data = line.encode()
        while data:  # a signal or a nearly full disk may cut a write short
            data = data[self._file.write(data) :]

    def close(self) -> None:
        self._file.close()


class _Table:
    """A CSV file with a header. None is left empty, mappings become JSON, anything else is written as it prints."""

    def __init__(self, path: Path, columns: Sequence[str], *, reopen: bool = False) -> None:
        self.columns: tuple[str, ...] = tuple(read_table(path)[0]) if reopen else ()
        self._path = path
        self._lines = _Lines(path, "a" if reopen else "x")
        self._writer = csv.writer(self._lines, lineterminator="\n")
        if columns and not self.columns:
            self.widen(columns)

    def append(self, row: Mapping[str, Any]) -> None:
        self._writer.writerow([_cell(row.get(name)) for name in self.columns])

    def widen(self, new: Sequence[str]) -> None:
        """Add columns at the end; the rows that are there are written again."""
        _, old = read_table(self._path)
        self.columns = (*self.columns, *new)
        self._lines.close()
        write_table(self._path, self.columns, [row + [""] * (len(self.columns) - len(row)) for row in old])
        self._lines = _Lines(self._path, "a")
        self._writer = csv.writer(self._lines, lineterminator="\n")

    def close(self) -> None:
        self._lines.close()


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, int | float | str):
        return value
    plain = _plain(value) if not isinstance(value, dict | list | tuple) else value
    return to_json(plain) if isinstance(plain, dict | list | tuple) else plain


def read_table(path: Path) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a CSV file; no header for an empty one."""
    rows = list(csv.reader(io.StringIO(path.read_text(encoding="utf-8"), newline="")))
    return (rows[0], rows[1:]) if rows else ([], [])


def write_table(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a CSV file, whole or not at all."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    with atomic_file(path) as file:
        file.write(text.getvalue().encode())


def _cut_torn_line(path: Path) -> None:
    with path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` outlive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
