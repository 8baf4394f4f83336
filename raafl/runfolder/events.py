"""Read the journal and the summary of a run without importing torch."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from types import UnionType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from raafl.errors import BadInput
from raafl.runfolder.schema import CONFIG, EVENTS, JOURNAL, SUMMARY, JournalRow, Summary
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


_REMEDY = "the journal was changed: give an unchanged copy of the run's folder"


class RolledBackLines:
    """Set of journal lines, numbered from 0, that no longer count since the run was resumed from an earlier point."""

    def __init__(self) -> None:
        self.num_lines = 0
        self._events = array("q")  # line numbers of the events that no resume has undone
        self._ranges: list[range] = []

    def add(self, kind: str | None, kept: int | None = None) -> None:
        """Process the next line of the journal."""
        number, self.num_lines = self.num_lines, self.num_lines + 1
        if kind in EVENTS:
            self._events.append(number)
        elif kind == "resumed" and kept is not None and kept < len(self._events):
            begin = self._events[kept]  # assignments that follow the last kept event stay valid
            self._ranges = [one for one in self._ranges if one.start < begin] + [range(begin, number)]
            del self._events[kept:]

    @property
    def num_events(self) -> int:
        """Number of events so far, without events that no longer count since the run was resumed."""
        return len(self._events)

    def __contains__(self, number: int) -> bool:
        return any(number in one for one in self._ranges)


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

    def __iter__(self) -> Iterator[JournalRow]:
        """Yield the rows in order, except those that were rolled back."""
        undone = self._undone
        return (row for number, row in enumerate(self.written()) if number not in undone)

    @property
    def num_events(self) -> int:
        """Number of events, without events that no longer count since the run was resumed.

        Raises:
            ValueError: a row is damaged or has a field of the wrong type.
            FileNotFoundError: the journal does not exist.
        """
        return self._undone.num_events

    @cached_property
    def _undone(self) -> RolledBackLines:
        undone = RolledBackLines()
        for number, row in enumerate(self.written(), 1):
            for name in wrong_fields(row, JournalRow):
                raise ValueError(f"{JOURNAL}:{number}: {name} is {row.get(name)!r:.60}; {_REMEDY}")
            undone.add(row.get("event"), row.get("kept"))
        return undone


def read_run(folder: Path, until: int | None = None) -> tuple[JournalReader, Summary | None]:
    """Read what a replay needs: the journal, and the summary (None if the run has not finished).

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
    num_events = 0
    for row in rows:
        if row.get("event") == "gap":
            raise _missing(f"{row['rows']} rows are missing after event {num_events}", num_events)
        num_events += row.get("event") in EVENTS
        if until is not None and num_events >= until:
            return rows, summary
    missing = (summary or {}).get("unwritten", {}).get(JOURNAL, 0)
    if missing:
        raise _missing(f"its last {missing} rows are missing", num_events)
    return rows, summary


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
