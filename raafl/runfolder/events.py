"""Read the journal and the other records of a run, whole or while they grow, without importing torch."""

from __future__ import annotations

import csv
import json
import os
import re
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from types import UnionType
from typing import Any, Generic, Literal, Protocol, TypeVar, cast, get_args, get_origin, get_type_hints

from raafl.errors import BadInput
from raafl.runfolder.append_file import complete_rows
from raafl.runfolder.outcome import REASONS
from raafl.runfolder.schema import (
    BREAKS,
    CLIENTS,
    CONFIG,
    EVENTS,
    GROWING,
    JOURNAL,
    METRICS,
    SEALS,
    SUMMARY,
    JournalRow,
    Summary,
)
from raafl.sanitize import sanitize_text, sanitize_tree


def read_summary(folder: Path) -> Summary | None:
    """Read the summary of a run; None if the file is missing or damaged.

    Fields of the wrong type are dropped, and texts are made safe for display.

    Raises:
        OSError: the file exists but cannot be read.
    """
    if not (folder / SUMMARY).is_file():
        return None
    try:
        found = sanitize_tree(json.loads((folder / SUMMARY).read_text(encoding="utf-8", errors="replace")))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    wrong = wrong_fields(found, Summary)
    return cast(Summary, {name: value for name, value in found.items() if name not in wrong})


def is_ended(summary: Summary | None) -> bool:
    """Check whether a summary is of a run that ended by a limit, or a reason of its method's own, and was not broken off."""
    reason = (summary or Summary()).get("finished")
    return bool(reason) and not str(reason).startswith(BREAKS)


def is_current(summary: Summary, folder: Path, *, resumed: bool) -> bool:
    """Check whether the run has written nothing since its summary, as one does that was resumed after that.

    `resumed`: whether the journal says that the run was resumed.
    """
    if not resumed:
        return True
    journal = folder / JOURNAL
    try:
        last = json.loads(complete_rows((folder / SEALS).read_bytes())[-1])
    except (OSError, ValueError, IndexError, RecursionError):
        if str(summary.get("finished")) in REASONS:  # versions before seals resumed no finished run
            return True
        # nothing but times tells, and a copy may have others
        return journal.stat().st_mtime_ns <= (folder / SUMMARY).stat().st_mtime_ns
    # a run that ends seals its summary and as many rows as there are; a resumed one adds rows, and then seals that are not final
    return isinstance(last, dict) and last.get("final") is True and last.get("rows") == _num_lines(journal)


def _num_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(piece.count(b"\n") for piece in iter(lambda: file.read(1 << 20), b""))


_REMEDY = "the journal was changed: give an unchanged copy of the run's folder"


_READ = {
    "arrived": ("time_s", "assignment", "client", "incarnation", "num_samples", "refusal", "fingerprint"),
    "assigned": ("id", "client", "version", "spec", "seed"),
    "batch": ("assignments",),
    "gap": ("rows",),
    **dict.fromkeys(("joined", "lost", "sending", "timer", "stop", "received"), ("time_s",)),
}
"""Fields without which a replay cannot read a row, by event; others are checked where they are converted."""


class RolledBackLines:
    """Set of journal lines, numbered from 0, that no longer count since the run was resumed from an earlier point.

    Rows about a resume always count: merges that it has undone are charged in a replay, too, if a later one goes back
    behind it.
    """

    def __init__(self) -> None:
        self.num_lines = 0
        self._events = array("q")  # line numbers of the events that no resume has undone
        self._ranges: list[range] = []
        self._resumes: set[int] = set()

    def add(self, kind: str | None, kept: int | None = None) -> None:
        """Process the next line of the journal."""
        number, self.num_lines = self.num_lines, self.num_lines + 1
        if kind in EVENTS:
            self._events.append(number)
        elif kind == "resumed":
            self._resumes.add(number)
            if kept is not None and kept < len(self._events):
                begin = self._events[kept]  # assignments that follow the last kept event stay valid
                self._ranges = [one for one in self._ranges if one.start < begin] + [range(begin, number)]
                del self._events[kept:]

    @property
    def num_events(self) -> int:
        """Number of events so far, without events that no longer count since the run was resumed."""
        return len(self._events)

    def line_after(self, num_events: int) -> int:
        """Return the number of the line that follows the first ``num_events`` events; 0 if there are fewer, or none."""
        return self._events[num_events - 1] + 1 if 0 < num_events <= len(self._events) else 0

    def __contains__(self, number: int) -> bool:
        return number not in self._resumes and any(number in one for one in self._ranges)


class JournalReader:
    """Reader of a journal. Each iteration reads the file again, and skips rows that no longer count since the run was resumed.

    `path`: path of the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Store the path of the journal; ``path`` is a run folder, or the journal itself."""
        path = Path(path)
        self.path = path / JOURNAL if path.is_dir() else path

    def written(self) -> Iterator[JournalRow]:
        """Yield all rows in order, including those that a resume has rolled back.

        An incomplete last line, as a crash leaves, is skipped.

        Raises:
            ValueError: a complete line is not a JSON object.
            FileNotFoundError: the journal does not exist.
        """
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                where = f"{self.path}:{number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{where} is not JSON ({error}); {_REMEDY}") from error
                if not isinstance(row, dict):
                    raise ValueError(f"{where} is not a JSON object, but a {type(row).__name__}; {_REMEDY}")
                # the chain's hash belongs to the file format of `raafl.runfolder.append_file`, not to the event
                row.pop("chain", None)
                yield cast(JournalRow, row)

    def first(self) -> JournalRow:
        """Return the first row, which describes the run; an empty one if the journal has none. Raises as `written` does."""
        return next(self.written(), JournalRow())

    def __iter__(self) -> Iterator[JournalRow]:
        """Yield the rows in order, except those that were rolled back.

        Rows that the run has added since the reader first read the journal are left out, so that all passes are over the same.
        """
        undone = self._undone
        return (row for number, row in enumerate(islice(self.written(), undone.num_lines)) if number not in undone)

    @property
    def num_events(self) -> int:
        """Number of events, without events that no longer count since the run was resumed.

        Raises:
            ValueError: a row is damaged or has a field of the wrong type.
            FileNotFoundError: the journal does not exist.
        """
        return self._undone.num_events

    def line_after(self, num_events: int) -> int:
        """Return the number of the line that follows the first ``num_events`` events; 0 if there are fewer, or none."""
        return self._undone.line_after(num_events)

    @cached_property
    def _undone(self) -> RolledBackLines:
        undone = RolledBackLines()
        for number, row in enumerate(self.written(), 1):
            for name in wrong_fields(row, JournalRow):
                raise ValueError(f"{JOURNAL}:{number}: {name} is {row.get(name)!r:.60}; {_REMEDY}")
            undone.add(row.get("event"), row.get("kept"))
        return undone


def read_run(folder: Path, until: int | None = None) -> tuple[JournalReader, Summary | None]:
    """Read what a replay needs: the journal, and the summary (None if the run has not finished, or not since it was resumed).

    Raises:
        BadInput: the folder does not contain a run, or the journal lacks rows before event ``until``.
    """
    for name in (CONFIG, JOURNAL):
        if not (folder / name).is_file():
            raise BadInput(f"'{folder}' is not a run folder: it has no {name}")
    rows = JournalReader(folder)
    try:
        # for its effect: counting reads the whole journal, and so finds damaged rows
        _, summary = rows.num_events, read_summary(folder)
    except ValueError as error:
        raise BadInput(sanitize_text(error)) from None
    num_events, resumed = 0, False
    for row in rows:
        resumed |= row.get("event") == "resumed"
        for name in (name for name in _READ.get(str(row.get("event")), ()) if name not in row):
            raise BadInput(f"{JOURNAL}: the row {json.dumps(row)[:120]} has no {name}; {_REMEDY}")
        if row.get("event") == "gap":
            raise _missing(f"{row['rows']} rows are missing after event {num_events}", num_events)
        num_events += row.get("event") in EVENTS
        if until is not None and num_events >= until:
            return rows, summary
    missing = (summary or {}).get("unwritten", {}).get(JOURNAL, 0)
    if missing:
        raise _missing(f"its last {missing} rows are missing", num_events)
    return rows, summary if summary is not None and is_current(summary, folder, resumed=resumed) else None


def _missing(what: str, num_events: int) -> BadInput:
    return BadInput(
        f"{JOURNAL}: {what}, they could not be written at the time (a full disk?), so the run cannot be replayed: "
        f"use --until {num_events} to replay what came before"
    )


def wrong_fields(row: Mapping[str, Any], kind: type) -> list[str]:
    """Return the names of a row's fields whose values have the wrong type; unknown fields are ignored."""
    hints = _hints(kind)
    return [name for name, value in row.items() if name in hints and not _fits(value, hints[name])]


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _fits(value: object, hint: Any) -> bool:
    """Check whether a JSON value has the type ``hint``; what is in a container is not checked."""
    if hint is Any or get_origin(hint) is Literal:
        return True
    if get_origin(hint) is UnionType:
        return any(_fits(value, one) for one in get_args(hint))
    if hint is int:
        return isinstance(value, int) and abs(value) < 2**64  # seeds have 64 bits
    return isinstance(value, int | float if hint is float else get_origin(hint) or hint)


_RESUMED = '"resumed"'
_KIND = re.compile(r'"event": ?"(\w+)"')
_READ_BYTES = 2**22  # number of bytes read at a time: a long run's journal may be larger than memory


class _WrittenAnew(Exception):
    """Raised when a file was replaced: all rows that were read before are invalid."""


class NewLines:
    """Reader of the lines that were appended to a growing file since the last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode, self._read = 0, 0

    def lines(self) -> list[str] | None:
        """Return new complete lines without their line ends; None if the file was replaced.

        For a long file only the first lines are returned; call again for the next.
        """
        if not self.path.is_file():  # reading a device or pipe might never end
            return None if self._read else []
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if self._read and (found.st_ino != self._inode or found.st_size < self._read):
                    return None
                self._inode = found.st_ino
                file.seek(self._read)
                whole = file.read(_READ_BYTES)
                while b"\n" not in whole and (more := file.read(_READ_BYTES)):
                    whole += more
        except (FileNotFoundError, NotADirectoryError):
            return None if self._read else []
        whole = whole[: whole.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.decode(errors="replace").replace("\0", "").split("\n")[:-1]


class Reader(Protocol):
    """Interface for objects that process the rows of a run's files one by one.

    Methods may raise TypeError, ValueError, AttributeError or KeyError for an invalid row.
    """

    def event(self, row: JournalRow, at: float | None = None) -> None:
        """Process a row of the journal, written at clock time ``at`` or before (None = now)."""

    def client(self, row: Mapping[str, str]) -> None:
        """Process a row of clients.csv, which describes a finished task."""

    def metrics(self, row: Mapping[str, str]) -> None:
        """Process a row of metrics.csv, which has an evaluation."""

    def ended(self, summary: Summary) -> None:
        """Process the summary of a finished run."""


R = TypeVar("R", bound=Reader)


class RunTail(Generic[R]):
    """Follower of a run folder that grows, which passes each new row to a reader; the folder need not exist yet.

    `state`: object to which rows are passed. If a file is replaced, or the run is resumed from an earlier point, a
    new object gets all rows again.
    `begun`: whether the folder has rows or a summary.
    `num_damaged`: number of invalid lines.
    """

    def __init__(self, path: Path, make: Callable[[], R], clock: Callable[[], float] = time.time) -> None:
        """Store the run's folder; ``make`` creates the reader's empty state, ``clock`` returns the time, as files have it."""
        self.path, self._make, self._clock = path, make, clock
        self._begin()

    def _begin(self) -> None:
        self.state = self._make()
        self.num_damaged = 0
        self.begun = self._resumed = self._has_ended = False
        self._header: dict[str, list[str]] = {}
        self._new_lines = {name: NewLines(self.path / name) for name in GROWING}

    @property
    def silent_s(self) -> float:
        """Seconds since anything was written to the folder; 0 if nothing was."""
        times = []
        for name in (*GROWING, SUMMARY):
            with suppress(OSError):
                times.append((self.path / name).stat().st_mtime)
        return max(self._clock() - max(times), 0.0) if times else 0.0

    def look(self) -> bool:
        """Read new rows and pass them to the reader; return whether there were any."""
        undone = RolledBackLines()
        while True:
            try:
                news = self._take_events(undone)
                for name, take in ((CLIENTS, self.state.client), (METRICS, self.state.metrics)):
                    news = self._take_rows(name, take) or news
                break
            except _WrittenAnew:
                self._begin()
                undone = rolled_back_lines(self.path / JOURNAL)
        return self._take_summary() or news

    def _take_rows(self, name: str, take: Callable[[Mapping[str, str]], None]) -> bool:
        """Pass the new rows of a table to ``take``; return whether there were any."""
        news = False
        for line in self._new(name):
            news = True
            self._row(name, line, take)
        return news

    def _new(self, name: str) -> Iterator[str]:
        while (lines := self._new_lines[name].lines()) != []:
            if lines is None:
                raise _WrittenAnew
            yield from lines

    def _take_events(self, undone: RolledBackLines) -> bool:
        at, number = self._clock() - self.silent_s, -1
        for number, line in enumerate(self._new(JOURNAL)):
            if number >= undone.num_lines and _RESUMED in line:
                raise _WrittenAnew
            row = self._event(line)
            if row is None or number in undone:
                continue
            try:
                self.state.event(row, at)
                self.begun |= row.get("event") == "run"
                self._resumed |= row.get("event") == "resumed"
            except (TypeError, ValueError, AttributeError, KeyError):  # valid JSON, but no row of raafl's
                self.num_damaged += 1
        return number >= 0

    def _event(self, line: str) -> JournalRow | None:
        try:
            row = sanitize_tree(json.loads(line))
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or wrong_fields(row, JournalRow):
            self.num_damaged += 1
            return None
        return cast(JournalRow, row)

    def _row(self, name: str, line: str, take: Callable[[Mapping[str, str]], None]) -> None:
        try:
            cells = sanitize_tree(next(csv.reader([line])))
            header = self._header.setdefault(name, cells)
            self.begun = True
            if header is not cells:
                take(dict(zip(header, cells, strict=True)))
        except (ValueError, TypeError, KeyError, csv.Error, StopIteration):
            self.num_damaged += 1

    def _take_summary(self) -> bool:
        """Read the summary, unless the run was resumed since."""
        if self._has_ended:
            return False
        try:
            found = read_summary(self.path)
            if found is None or not (self.path / JOURNAL).is_file():
                return False
            if not is_current(found, self.path, resumed=self._resumed):
                return False
        except OSError:
            return False
        self.state.ended(found)
        self.begun = self._has_ended = True
        return True


def rolled_back_lines(journal: Path) -> RolledBackLines:
    """Find the journal's lines that a resume has undone; only the few lines about a resume are parsed as JSON."""
    new_lines, undone = NewLines(journal), RolledBackLines()
    while lines := new_lines.lines():
        for line in lines:
            kind = _KIND.search(line)
            undone.add(kind[1] if kind else None, _num_kept(line) if kind and kind[1] == "resumed" else None)
    return undone


def _num_kept(line: str) -> int | None:
    """Read from a line about a resume how many events it keeps; None if the line is damaged."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        return int(json.loads(line)["kept"])
    return None
