"""Read a run folder as far as possible; an unfinished or damaged run has notes on what is missing."""

from __future__ import annotations

import csv
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from sys import intern
from typing import Any

import numpy as np
import numpy.typing as npt

from raafl.errors import BadInput
from raafl.plain_yaml import load_untrusted_yaml
from raafl.runfolder.events import JournalReader, is_current, read_summary, rolled_back_lines
from raafl.runfolder.schema import (
    CLIENT_COLUMNS,
    CLIENTS,
    CONFIG,
    EXCHANGES,
    JOURNAL,
    KINDS,
    LOST,
    MEMORY_COLUMNS,
    METRICS,
    SAMPLE_COLUMNS,
    SAMPLE_IMAGES,
    SAMPLES,
    SUMMARY,
    JournalRow,
    Summary,
    kind_of,
)
from raafl.units import quantity

Numbers = npt.NDArray[np.float64]

_FILES = (METRICS, CLIENTS, JOURNAL, SUMMARY)
"""A folder that has one of these, or a config.yaml, is a run folder."""
_TEXT = ("client", "spec", "outcome")
MOST_SAMPLES = 10_000  # most rows of samples.csv that are shown, of the first models and the last
MOST_IMAGES = 64  # most pictures of samples that are read
_MOST_IMAGE_BYTES = 100_000
_AT_A_TIME = 10_000  # number of rows that are parsed at a time
_TASK_NUMBERS = tuple(name for name in (*CLIENT_COLUMNS, *MEMORY_COLUMNS) if name not in _TEXT)


@dataclass(slots=True)
class ClientRecord:
    """Information about a client from the journal of a run."""

    id: int
    num_samples: int = 0
    own_data: bool = False
    profile: Mapping[str, Any] = field(default_factory=dict)  # fields of the device profile; None stands for infinity
    # seconds `(from, to)` between which the client was connected; `to` is infinite if it did not leave
    spells: list[tuple[float, float]] = field(default_factory=list)

    @property
    def device(self) -> str:
        """Name of the client's device; empty if it is unknown."""
        name = str(self.profile.get("name", ""))
        return "" if name == "default" else name

    @property
    def flops_per_s(self) -> float:
        """Speed of the client's device in FLOP/s; NaN if it is unknown."""
        return number(self.profile.get("flops_per_s"))


@dataclass(slots=True)
class Tasks:
    """Columns of clients.csv, with one entry per finished task; missing numbers are NaN."""

    client: npt.NDArray[np.int64]
    outcome: list[str]
    spec: list[str]
    numbers: dict[str, Numbers]
    kind: npt.NDArray[np.int64] = field(init=False)
    """Index into `KINDS`."""

    def __post_init__(self) -> None:
        """Map the tasks' outcomes to codes of `KINDS`; an unknown outcome counts as lost."""
        codes = {kind: code for code, kind in enumerate(KINDS)}
        found = [codes.get(kind_of(outcome), codes[LOST]) for outcome in self.outcome]
        self.kind = np.array(found, np.int64)

    def __len__(self) -> int:
        return len(self.client)

    def __getitem__(self, name: str) -> Numbers:
        """Return the numbers in the column ``name``, one for each task."""
        return self.numbers[name]

    def by_client(self) -> dict[int, npt.NDArray[np.intp]]:
        """Return the indices of each client's tasks, in order; clients without tasks are left out."""
        order = np.argsort(self.client, kind="stable")
        clients, starts = np.unique(self.client[order], return_index=True)
        return dict(zip(clients.tolist(), np.split(order, starts[1:]), strict=True)) if len(clients) else {}

    def are(self, kind: str) -> npt.NDArray[np.bool_]:
        """Return a mask `(len,)` of the tasks whose outcome is of this kind, such as "refused"."""
        found: npt.NDArray[np.bool_] = self.kind == KINDS.index(kind)
        return found


@dataclass(slots=True)
class RecordedRun:
    """Content of a run folder, as far as it could be read."""

    path: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    # columns of metrics.csv by name; NaN where a cell is no number
    metrics: dict[str, Numbers] = field(default_factory=dict)
    tasks: Tasks = field(default_factory=lambda: _tasks([], []))
    summary: Summary | None = None  # content of summary.json; None = there is none
    clients: dict[int, ClientRecord] = field(default_factory=dict)
    # client and start in seconds of each task that was in progress when the files ended
    open_tasks: list[tuple[int, float]] = field(default_factory=list)
    # number of messages between client and server within a task, by task id
    num_exchanges: dict[int, int] = field(default_factory=dict)
    lost_at: dict[int, list[float]] = field(default_factory=dict)  # seconds at which a client was lost, by client id
    # limits that were given to resume the run, which its config does not have
    goals: Mapping[str, Any] = field(default_factory=dict)
    runtime: str = ""
    last_event_s: float = 0.0
    has_journal: bool = False
    resumed: bool = False  # whether the journal says that the run was resumed
    notes: list[str] = field(default_factory=list)  # what is missing or damaged, as sentences for the reader

    @property
    def is_simulated(self) -> bool:
        """Whether the run was simulated, so that its seconds are virtual."""
        return self.runtime == "simulated"

    @property
    def seed(self) -> object:
        """Seed of the run; None if it is unknown."""
        return self.config.get("seed", (self.summary or {}).get("seed"))

    @property
    def end_s(self) -> float:
        """Time on the run's clock at which the run ended, or at which its files end."""
        ended = number((self.summary or {}).get("time_s"))
        if math.isfinite(ended) and ended > 0:
            return ended
        seen = [self.last_event_s]
        for values in (self.metrics.get("time_s"), self.tasks["arrived_s"], self.tasks["assigned_s"]):
            if values is not None and np.isfinite(values).any():
                seen.append(float(np.nanmax(values)))
        return max(seen)

    def client_ids(self) -> list[int]:
        """Return the ids of all clients that joined or worked, ascending."""
        return sorted({*self.clients, *self.tasks.client.tolist(), *(client for client, _ in self.open_tasks)})


def number(value: object) -> float:
    """Convert a value to a finite number; NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return math.nan
    return found if math.isfinite(found) else math.nan


def read(path: Path) -> RecordedRun:
    """Read the content of a run folder; the result has notes about files that are missing or damaged.

    Raises:
        BadInput: there is no run folder at ``path``.
    """
    if not path.is_dir():
        raise BadInput(f"'{path}' is not a run folder: {'it is a file' if path.exists() else 'there is nothing there'}")
    if not any((path / name).is_file() for name in (CONFIG, *_FILES)):
        inside = sum((child / JOURNAL).is_file() for child in path.iterdir() if child.is_dir())
        more = f"; it holds {inside} of them: raafl report {path}/*" if inside else ""
        raise BadInput(f"'{path}' is not a run folder: it has neither config.yaml nor any of {', '.join(_FILES)}{more}")
    run = RecordedRun(path, path.resolve().name)
    readers: dict[str, Callable[[RecordedRun, Path], None]] = {
        CONFIG: _read_config,
        METRICS: _read_metrics,
        CLIENTS: _read_clients,
        JOURNAL: _read_journal,
        SUMMARY: _read_summary,
    }
    for name, reader in readers.items():
        if not (path / name).is_file():
            missing = "there is no summary.json: the run has not ended, or was killed"
            run.notes.append(missing if name == SUMMARY else f"there is no {name}")
            continue
        try:
            reader(run, path / name)
        except OSError as error:
            run.notes.append(f"{name} cannot be read: {error.strerror or error}")
    run.runtime = run.runtime or str((run.summary or {}).get("runtime", ""))
    return run


def _read_config(run: RecordedRun, path: Path) -> None:
    run.config_text = path.read_text(encoding="utf-8", errors="replace")
    try:
        run.config = {str(name): value for name, value in load_untrusted_yaml(run.config_text).items()}
    except ValueError as error:
        if run.config_text.strip() not in ("", "null"):  # a run from Python has no text of a config
            run.notes.append(f"config.yaml is not one of raafl's: {error}")


def _read_summary(run: RecordedRun, path: Path) -> None:
    run.summary = read_summary(path.parent)
    if run.summary is None:
        run.notes.append("summary.json is damaged; its values are taken from the other files where possible")
    elif not is_current(run.summary, path.parent, resumed=run.resumed):
        run.summary = None
        run.notes.append("the run has not ended since it was resumed: summary.json is older, and is left out")


def _rows(run: RecordedRun, path: Path) -> Iterator[list[str]]:
    """Yield a table's header and its complete rows; damaged ones are counted in a note."""
    num_damaged = 0
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        found = _csv(line.replace("\0", "") for line in file)
        yield (header := next(found, []))
        for row in found:
            if len(row) == len(header):
                yield row
            else:
                num_damaged += bool(row)
    if num_damaged:
        run.notes.append(f"{path.name}: {num_damaged} damaged rows are left out")


def _csv(lines: Iterator[str]) -> Iterator[list[str]]:
    reader = csv.reader(lines)
    while True:
        try:
            yield next(reader)
        except StopIteration:
            return
        except csv.Error:  # a cell is longer than csv's limit
            yield ["damaged"]


def _numbers(cells: Iterable[str]) -> Numbers:
    cells = list(cells)
    try:
        found = np.array([float(cell) if cell else math.nan for cell in cells], np.float64)
    except ValueError:
        return np.array([number(cell) for cell in cells], np.float64)
    return np.where(np.isfinite(found), found, math.nan)


def _read_metrics(run: RecordedRun, path: Path) -> None:
    header, *rows = _rows(run, path)
    run.metrics = {name: _numbers(row[i] for row in rows) for i, name in enumerate(header) if name}


def _read_clients(run: RecordedRun, path: Path) -> None:
    rows = _rows(run, path)
    header = next(rows)
    if "client" not in header or "outcome" not in header:
        if header:
            run.notes.append("clients.csv has no columns client and outcome; it is left out")
        return
    column, parts, num_unknown = header.index("client"), [_tasks([], [])], 0
    while some := list(islice(rows, _AT_A_TIME)):  # in portions: as text, rows take ten times the memory
        known = [row for row in some if row[column].isdecimal() and len(row[column]) < 18]
        num_unknown += len(some) - len(known)
        parts.append(_tasks(header, known))
    if num_unknown:
        run.notes.append(f"clients.csv: {quantity(num_unknown, 'row')} without a client, left out")
    run.tasks = Tasks(
        np.concatenate([part.client for part in parts]),
        [outcome for part in parts for outcome in part.outcome],
        [spec for part in parts for spec in part.spec],
        {name: np.concatenate([part[name] for part in parts]) for name in _TASK_NUMBERS},
    )


def _tasks(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Tasks:
    def cells(name: str) -> list[str]:
        if name not in header:
            return [""] * len(rows)
        place = header.index(name)
        return [intern(row[place]) for row in rows] if name in _TEXT else [row[place] for row in rows]

    client = np.array([int(cell) for cell in cells("client")], np.int64)
    return Tasks(client, cells("outcome"), cells("spec"), {name: _numbers(cells(name)) for name in _TASK_NUMBERS})


def _read_journal(run: RecordedRun, path: Path) -> None:
    """Read from the journal when clients were connected, their device profiles, and which tasks never ended."""
    settled, undone = set(run.tasks["assignment"].tolist()), rolled_back_lines(path)
    try:
        for number, event in enumerate(JournalReader(path).written()):
            if number not in undone:
                _take(run, event, settled)
    except ValueError as error:
        run.notes.append(f"the journal is damaged and was read only up to this point: {str(error)[:200]}")
    run.has_journal = bool(run.clients)


def _take(run: RecordedRun, event: JournalRow, settled: set[float]) -> None:
    kind, at, client = event.get("event"), number(event.get("time_s")), event.get("client")
    if math.isfinite(at):
        run.last_event_s = max(run.last_event_s, at)
    if kind == "run":
        run.runtime = str(event.get("runtime", ""))
    elif kind == "resumed":
        run.resumed = True
        run.goals = event["goals"] if isinstance(event.get("goals"), dict) else run.goals
    elif kind == "gap":
        run.notes.append(f"{event.get('rows')} events are missing in the journal")
    if not isinstance(client, int) or not math.isfinite(at):
        return
    if kind == "joined":
        known = run.clients.setdefault(client, ClientRecord(client))
        profile, num_samples = event.get("profile"), number(event.get("num_samples"))
        known.profile = profile if isinstance(profile, dict) else {}
        known.num_samples = 0 if math.isnan(num_samples) else int(num_samples)
        known.own_data = event.get("own_data") is True
        if not known.spells or math.isfinite(known.spells[-1][1]):
            known.spells.append((at, math.inf))
    elif kind == "lost":
        run.lost_at.setdefault(client, []).append(at)
        spells = run.clients[client].spells if client in run.clients else []
        if spells and math.isinf(spells[-1][1]):
            spells[-1] = (spells[-1][0], at)
    elif kind == "assigned":
        if not isinstance(event.get("id"), int) or event["id"] not in settled:
            run.open_tasks.append((client, at))
        extra = event.get("extra")
        terms = extra.get(EXCHANGES[0]) if isinstance(extra, dict) else None
        exchanges = number(terms.get(EXCHANGES[1])) if isinstance(terms, dict) else math.nan
        if isinstance(event.get("id"), int) and exchanges > 0:
            run.num_exchanges[event["id"]] = int(exchanges)


def sample_rows(folder: Path, most: int | None = MOST_SAMPLES) -> list[list[str]] | None:
    """Return the complete rows of samples.csv as texts, in order of `SAMPLE_COLUMNS`; None where a run has recorded none.

    `most`: number of rows, half of them the first, half of them the last; None = all.
    """
    if not (folder / SAMPLES).is_file():  # reading a device or pipe might never end
        return None
    try:
        with (folder / SAMPLES).open(newline="", encoding="utf-8", errors="replace") as file:
            lines = _csv(file)
            header = next(lines, [])
            if not set(SAMPLE_COLUMNS) <= set(header):
                return []
            places = [header.index(name) for name in SAMPLE_COLUMNS]
            texts = ([row[place] for place in places] for row in lines if len(row) == len(header))
            rows = (row for row in texts if re.fullmatch("[0-9]{1,17}", row[0]))
            half = None if most is None else most // 2
            return [*islice(rows, half), *deque(rows, half)]
    except OSError:
        return None


def sample_images(folder: Path) -> dict[int, tuple[bytes, str]]:
    """Return by number of the test sample its picture as a PNG file, and its last prediction as text."""
    captions = {}
    for version, kind, text, output, expected, probability in sample_rows(folder) or []:
        if kind == "class":
            captions[text] = f"{output} ({probability}), is {expected}; version {version}"
    found = {}
    for number in range(MOST_IMAGES):
        path = folder / SAMPLE_IMAGES / f"{number}.png"
        if not path.is_file():
            break
        try:
            content = path.read_bytes() if path.stat().st_size < _MOST_IMAGE_BYTES else b""
        except OSError:
            break
        if content.startswith(b"\x89PNG\r\n"):
            found[number] = content, captions.get(f"test sample {number}", "")
    return found
