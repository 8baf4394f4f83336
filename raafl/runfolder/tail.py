"""Read a run folder while it grows."""

from __future__ import annotations

import csv
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Generic, Protocol, TypeVar, cast

from raafl.runfolder.events import RolledBackLines, read_summary, wrong_fields
from raafl.runfolder.schema import CLIENTS, GROWING, JOURNAL, METRICS, SUMMARY, JournalRow, Summary
from raafl.sanitize import sanitize_tree

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
                undone = _undone(self.path / JOURNAL)
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
        """Read the summary, unless it is of an interruption or failure after which the run was resumed."""
        if self._has_ended:
            return False
        try:
            found = read_summary(self.path)
            if found is None:
                return False
            later = (self.path / JOURNAL).stat().st_mtime_ns > (self.path / SUMMARY).stat().st_mtime_ns
        except OSError:
            return False
        may_go_on = str(found.get("finished")).startswith(("interrupted", "failed"))
        if may_go_on and later and self._resumed:
            return False
        self.state.ended(found)
        self.begun = self._has_ended = True
        return True


def _undone(journal: Path) -> RolledBackLines:
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
