"""Compute the state of a run from the rows of its folder, within the run or from the files."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from raafl.config.targets import Goals, Target
from raafl.runfolder.events import RunTail
from raafl.runfolder.schema import MERGED, UNUSED, JournalRow, Summary, is_metric, kind_of
from raafl.sanitize import sanitize_text

MAX_CLIENTS = 16
"""Largest number of clients that a view shows at a time."""
_AT_ONCE = 1e-9  # share of a time, in seconds of the run, by which another may differ from rounding alone
_MAX_SPECS = 8  # number of submodels of a client whose task durations are remembered
_SHOWN_SPEC, _SHOWN_DEVICE = 48, 24  # most characters that are shown
_MOST_BLOCKS = 1000  # most blocks of a stack that are listed


@dataclass(slots=True)
class _Task:
    id: int
    incarnation: int
    version: int
    spec: object
    since_s: float
    pace_s: float


@dataclass(slots=True)
class _Client:
    there: bool = False
    device: str = ""
    task: _Task | None = None
    num_merged: int = 0
    # seconds of the latest task on each submodel, by spec, newest last
    lasted_s: dict[str, float] = field(default_factory=dict)

    def due_s(self) -> float | None:
        """Predict when the client's task ends, from its latest task on the same submodel, or else on any."""
        if self.task is None:
            return None
        guess = self.lasted_s.get(spec_in_words(self.task.spec)) if len(self.lasted_s) > 1 else None
        if guess is None and self.lasted_s:
            guess = next(reversed(self.lasted_s.values()))
        if guess is None and self.task.pace_s > 0:
            guess = self.task.pace_s
        return None if guess is None else self.task.since_s + guess


class RunState:
    """Progress of a run, computed from the rows of its files; `snapshot` returns it for display.

    `runtime`: kind of the run, "simulated" or "distributed"; empty until it is known.
    `time_s`: time of the last row, in seconds on the run's clock.
    `say`: function called with a line of text for each event.
    """

    # returns three numbers of a simulation: its processes, the share of tasks trained in batches of clients, and the
    # mean number of clients in a batch
    how: Callable[[], tuple[int | None, float | None, float | None]] | None = None

    def __init__(self, say: Callable[[str], None] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without any row; ``say`` prints events as lines, ``clock`` returns real time in seconds."""
        self.say, self._clock = say, clock
        self.title = self.runtime = ""
        self.goals = Goals()
        self.time_s = 0.0
        self.summary: Summary | None = None
        self._seen_at = clock()
        self._clients: dict[int, _Client] = {}
        self._there: set[int] = set()
        self._working: dict[int, _Client] = {}
        self._evaluations: deque[dict[str, float]] = deque(maxlen=EVALUATIONS)
        self._measured: dict[str, Any] = {}  # metrics of the latest evaluation
        self._reached: set[Target] = set()
        self._version = self._updates = 0
        self._marks, self._trainings = Marks(), Trainings()
        self._bytes = [0, 0]  # bytes sent to clients, bytes received
        self._staleness = [0, 0]  # sum and maximum over merged updates
        self._outcomes: Counter[str] = Counter()

    # ---- update the state by rows of the journal ----

    def event(self, row: JournalRow, at: float | None = None) -> None:
        """Update the progress with a row of events.jsonl, written at clock time ``at`` (None = now)."""
        time_s = row.get("time_s")
        if isinstance(time_s, int | float):
            self.time_s, self._seen_at = max(self.time_s, float(time_s)), self._clock() if at is None else at
        kind, client = row.get("event"), row.get("client")
        if kind in ("run", "resumed") and "goals" in row:
            self.goals = Goals.from_json(row["goals"])
            self._reach()
        if kind == "run":
            self.runtime, self.title = sanitize_text(row.get("runtime", "")), sanitize_text(row.get("title", ""), 1000)
        elif isinstance(client, int) and kind in ("joined", "lost", "assigned", "arrived", "away", "back"):
            getattr(self, f"_{kind}")(client, self._clients.setdefault(client, _Client()), row)

    def _joined(self, number: int, client: _Client, row: JournalRow) -> None:
        profile = row.get("profile")
        name = str(profile.get("name", "")) if isinstance(profile, dict) else ""
        client.there, client.task = True, None
        client.device = "" if name == "default" else sanitize_text(name, _SHOWN_DEVICE)
        self._there.add(number)
        self._working.pop(number, None)
        self._tell(f"client {number} is there{f' ({client.device})' if client.device else ''}")

    def _lost(self, number: int, client: _Client, row: JournalRow) -> None:
        client.there, client.task = False, None
        self._there.discard(number)
        self._working.pop(number, None)
        self._tell(f"client {number} is gone: {row.get('reason')}")

    def _assigned(self, number: int, client: _Client, row: JournalRow) -> None:
        client.task = _Task(
            row.get("id", 0),
            row.get("incarnation", 0),
            row.get("version", 0),
            row.get("spec"),
            row.get("assigned_s", self.time_s),
            row.get("pace_s", 0.0),
        )
        self._working.pop(number, None)
        self._working[number] = client  # move to the end: clients are ordered by the start of their tasks
        if self.say is not None:
            self._tell(f"client {number} trains {spec_in_words(row.get('spec'))} of version {client.task.version}")

    def _arrived(self, number: int, client: _Client, row: JournalRow) -> None:
        self._trainings.arrived(self._seen_at)
        task = client.task
        if task is not None and (task.id, task.incarnation) == (row.get("assignment"), row.get("incarnation")):
            client.task = None
            self._working.pop(number, None)

    def _away(self, number: int, client: _Client, row: JournalRow) -> None:
        self._tell(f"client {number} is away: {row.get('reason')}")

    def _back(self, number: int, client: _Client, row: JournalRow) -> None:
        self._tell(f"client {number} is back")

    def client(self, row: Mapping[str, Any]) -> None:
        """Update the progress with a row of clients.csv, which describes a task that has ended."""
        number, outcome = int(row["client"]), str(row["outcome"])
        client = self._clients.setdefault(number, _Client())
        since_s, until_s = _number(row.get("assigned_s")), _number(row.get("arrived_s"))
        self._outcomes[kind_of(outcome)] += 1
        if client.task is not None and str(client.task.id) == str(row.get("assignment")):
            client.task = None
            self._working.pop(number, None)
        for place, name in enumerate(("bytes_down", "bytes_up")):
            self._bytes[place] += int(_number(row.get(name)) or 0)
        if since_s is not None and until_s is not None and outcome in (MERGED, UNUSED):
            spec = str(row.get("spec", ""))
            client.lasted_s.pop(spec, None)
            client.lasted_s[spec] = until_s - since_s
            if len(client.lasted_s) > _MAX_SPECS:
                del client.lasted_s[next(iter(client.lasted_s))]
        if outcome == MERGED:
            client.num_merged += 1
            self._merged(row, until_s)
        if self.say is not None:
            lasted = f" after {until_s - since_s:.4g} s" if since_s is not None and until_s is not None else ""
            stale = f", staleness {row.get('staleness')}" if outcome == MERGED else ""
            self._tell(f"client {number}: {outcome}{lasted}{stale}")

    def _merged(self, row: Mapping[str, Any], at_s: float | None) -> None:
        staleness, version = int(_number(row.get("staleness")) or 0), int(_number(row.get("merged_version")) or 0)
        self._updates += 1
        self._staleness = [self._staleness[0] + staleness, max(self._staleness[1], staleness)]
        mark = Mark(self.time_s if at_s is None else at_s, self._updates, sum(self._bytes))
        self._marks.merged(mark, replaces=version == self._version)
        self._version = version

    def metrics(self, row: Mapping[str, Any]) -> None:
        """Update the progress with a row of metrics.csv, which has an evaluation of the global model."""
        found = {name: number for name, value in row.items() if (number := _number(value)) is not None}
        found.setdefault("time_s", 0.0)
        self._measured = {name: value for name, value in row.items() if is_metric(name)}
        self._evaluations.append(found)
        self._version = max(self._version, int(found.get("version", 0)))
        self._reach()

    def _reach(self) -> None:
        for target in self.goals.targets:
            if any(map(target.met, self._evaluations)):
                self._reached.add(target)

    def ended(self, summary: Summary) -> None:
        """Update the progress with the summary of a finished run."""
        self.summary = summary
        for client in self._working.values():
            client.task = None
        self._working.clear()

    def _tell(self, text: str) -> None:
        if self.say is not None:
            self.say(f"{self.time_s:9.1f} s  {sanitize_text(text)}")

    # ---- describe the state for a display ----

    def now_s(self) -> float:
        """Return the present time on the run's clock; in a distributed run it also advances while no row is written."""
        if self.summary is not None:
            return _number(self.summary.get("time_s")) or self.time_s
        idle_s = max(self._clock() - self._seen_at, 0.0)
        return self.time_s + (idle_s if self.runtime == "distributed" else 0.0)

    def snapshot(self, most: int | None = MAX_CLIENTS) -> ProgressState:
        """Return a snapshot of the progress with at most ``most`` clients: those that have worked longest on their tasks."""
        now_s, summary, is_simulated = self.now_s(), self.summary or {}, self.runtime == "simulated"
        updates = int(summary.get("updates_merged", self._updates))
        down, up = summary.get("bytes_down", self._bytes[0]), summary.get("bytes_up", self._bytes[1])
        # rates of a run that has ended are means over the whole run
        marks = self._marks if self.summary is None else Marks()
        updates_per_s, bytes_per_s = marks.rates(Mark(now_s, updates, down + up))
        found = etas(self.goals, now_s, updates, updates_per_s, self._evaluations, self._reached)
        found = found if self.summary is None else ()
        processes, share, mean = self._how() if is_simulated else (None, None, None)
        return ProgressState(
            version=int(summary.get("versions", self._version)),
            num_updates=updates,
            time_s=now_s,
            metrics={
                name: number for name, value in self._measured.items() if (number := _as_float(value)) is not None
            },
            clients=self._shown(now_s, most),
            num_clients=len(self._clients),
            num_there=len(self._there),
            num_working=len(self._working),
            num_updates_goal=self.goals.max_updates,
            title=self.title,
            simulated=is_simulated,
            finished=summary.get("finished"),
            bytes_down=down,
            bytes_up=up,
            updates_per_s=updates_per_s,
            bytes_per_s=bytes_per_s,
            staleness_mean=self._staleness[0] / self._updates if self._updates else 0.0,
            staleness_max=self._staleness[1],
            outcomes=dict(self._outcomes),
            etas=found,
            ends_in_s=ends_in_s(self.goals, found) if found else None,
            speed=speed(self._evaluations) if is_simulated else 1.0,
            trainings_per_s=self._trainings.per_s(self._clock()) if is_simulated and not summary else None,
            num_processes=processes,
            share_batched=share,
            mean_cohort=mean,
            evaluated=self._evaluated(),
        )

    def _evaluated(self) -> tuple[float, int] | None:
        if not self._evaluations:
            return None
        last = self._evaluations[-1]
        return last["time_s"], int(last.get("version", 0))

    def _how(self) -> tuple[int | None, float | None, float | None]:
        if self.how is not None:
            return self.how()
        batched = (self.summary or {}).get("batched", {})
        return None, batched.get("share"), batched.get("mean_cohort")

    def _shown(self, now_s: float, most: int | None) -> tuple[ClientProgress, ...]:
        if most is None or len(self._clients) <= most:
            numbers = sorted(self._clients)
        else:
            numbers = sorted(islice(self._working, most), key=lambda number: (self._since_s(number), number))
            idle = (number for number in self._clients if number not in self._working)
            numbers += sorted(islice(idle, most - len(numbers)))
        return tuple(self._client(number, self._clients[number], now_s) for number in numbers)

    def _since_s(self, number: int) -> float:
        task = self._working[number].task
        return 0.0 if task is None else task.since_s

    def _client(self, number: int, client: _Client, now_s: float) -> ClientProgress:
        task = client.task
        if task is None:
            return ClientProgress(number, num_tasks=client.num_merged, device=client.device, there=client.there)
        due_s = client.due_s()
        due_in_s = None if due_s is None else due_s - now_s
        if due_in_s is not None and abs(due_in_s) <= _AT_ONCE * now_s:
            due_in_s = 0.0  # rounding of the sum, which is no time
        return ClientProgress(
            number,
            spec_in_words(task.spec, _SHOWN_SPEC),
            client.num_merged,
            client.device,
            client.there,
            version=task.version,
            behind=max(self._version - task.version, 0),
            since_s=now_s - task.since_s,
            due_in_s=due_in_s,
        )


def follow(path: Path, clock: Callable[[], float] = time.time) -> RunTail[RunState]:
    """Return a follower of a run folder, which computes the run's progress as the files grow; the folder need not exist yet."""
    return RunTail(path, lambda: RunState(clock=clock), clock)


def spec_in_words(data: object, most: int | None = None) -> str:
    """Describe a submodel, given as plain data from the journal, in one line of at most ``most`` characters."""
    try:
        text = _in_words(data) if isinstance(data, dict) else str(data or "")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        text = "what cannot be read"  # somebody altered the journal
    return text if most is None or len(text) <= most else text[: most - 1] + "…"


def _in_words(data: dict[str, Any]) -> str:
    alike: dict[str, list[str]] = {}
    for name, kept in data.get("kept", {}).items():
        run = kept.get("range") if isinstance(kept, dict) else None
        alike.setdefault(f"[{run[0]}:{run[1]}]" if run else f"[{len(kept)} of them]", []).append(name)
    words: list[str] = []
    for which, axes in alike.items():
        words += [f"{len(axes)} axes{which}"] if len(axes) > 4 else [name + which for name in axes]
    for name, kept in data.get("blocks", {}).items():
        indices = range(*kept["range"]) if isinstance(kept, dict) else kept
        words.append(f"{name}[{','.join(map(str, islice(indices, _MOST_BLOCKS)))}]")
    for verb, key in (("trains", "trained"), ("exits", "exits")):
        if key in data:
            words.append(f"{verb} {','.join(data[key]) or 'nothing'}")
    return (" ".join(words) or "full") + (f" on {data['base']}" if "base" in data else "")


def _number(value: object) -> float | None:
    number = _as_float(value)
    return number if number is not None and math.isfinite(number) else None


def _as_float(value: object) -> float | None:
    """Convert a table cell to a float; return None if it is not a number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return float(value) if isinstance(value, int | float) else None


MERGES = 20
"""Number of latest merges over which rates are computed."""
EVALUATIONS = 10
"""Number of latest evaluations from which a metric is extrapolated and a simulation's speed computed."""

_SECONDS = 10  # seconds over which a simulation's trainings per second are counted


@dataclass(frozen=True, slots=True)
class Mark:
    """Progress of a run at ``time_s``: number of merged updates and of transferred bytes."""

    time_s: float = 0.0
    updates: int = 0
    num_bytes: int = 0


@dataclass(slots=True)
class Marks:
    """Progress of a run at its most recent merges, from which its speed is computed."""

    marks: deque[Mark] = field(default_factory=lambda: deque([Mark()], MERGES + 1))

    def merged(self, mark: Mark, *, replaces: bool) -> None:
        """Record a run's progress after a merge; those at one time, as of clients on equal devices, count as one."""
        at_once = mark.time_s - self.marks[-1].time_s <= _AT_ONCE * mark.time_s
        if (replaces or at_once) and len(self.marks) > 1:
            last = self.marks.pop()
            mark = Mark(max(mark.time_s, last.time_s), mark.updates, mark.num_bytes)
        self.marks.append(mark)

    def rates(self, now: Mark) -> tuple[float, float]:
        """Return updates per second and bytes per second, averaged over the last `MERGES` times of merges."""
        then = self.marks[0]
        lasted_s = now.time_s - then.time_s
        if lasted_s <= 0:
            return 0.0, 0.0
        return (now.updates - then.updates) / lasted_s, (now.num_bytes - then.num_bytes) / lasted_s


class Trainings:
    """Times of a simulation's recent training tasks, from which its throughput is computed."""

    def __init__(self) -> None:
        self._num = 0
        self._marks: deque[tuple[float, int]] = deque(maxlen=_SECONDS)

    def arrived(self, at: float) -> None:
        """Record that a training task was finished at the clock time ``at``."""
        self._num += 1
        if self._marks and at == self._marks[-1][0]:
            self._marks[-1] = at, self._num
        elif not self._marks or at - self._marks[-1][0] >= 1.0:
            self._marks.append((at, self._num))

    def per_s(self, now: float) -> float | None:
        """Return the number of training tasks per second; None if unknown."""
        if not self._marks or now <= self._marks[0][0] or self._num == self._marks[0][1]:
            return None
        then, num = self._marks[0]
        return (self._num - num) / (now - then)


@dataclass(frozen=True, slots=True)
class Eta:
    """Estimated seconds until one goal of a run is met; None if unknown."""

    goal: str
    in_s: float | None


def etas(
    goals: Goals,
    now_s: float,
    updates: int,
    updates_per_s: float,
    evaluations: Sequence[Mapping[str, float]],
    reached: Container[Target] = (),
) -> tuple[Eta, ...]:
    """Estimate the seconds until each goal of a run is met."""
    found = []
    if goals.max_updates is not None:
        left = max(goals.max_updates - updates, 0)
        in_s = left / updates_per_s if updates_per_s > 0 else None if left else 0.0
        found.append(Eta("max_updates", in_s))
    if goals.max_time_s is not None:
        found.append(Eta("max_time", max(goals.max_time_s - now_s, 0.0)))
    for target in goals.targets:
        found.append(Eta(str(target), 0.0 if target in reached else _reached_in_s(target, now_s, evaluations)))
    return tuple(found)


def ends_in_s(goals: Goals, etas: Iterable[Eta]) -> float | None:
    """Return the seconds until the first goal ends the run; None if unknown."""
    by_goal = {eta.goal: eta.in_s for eta in etas}
    limits = [by_goal[name] for name in ("max_updates", "max_time") if name in by_goal]
    targets = [by_goal[str(target)] for target in goals.targets]
    known = [in_s for in_s in limits if in_s is not None]
    if targets and None not in targets:
        known.append(max(in_s for in_s in targets if in_s is not None))
    return min(known, default=None)


def _reached_in_s(target: Target, now_s: float, evaluations: Sequence[Mapping[str, float]]) -> float | None:
    points = [(row["time_s"], row[target.metric]) for row in evaluations if target.metric in row][-EVALUATIONS:]
    if len(points) < 3:
        return None
    time_s, value = (math.fsum(column) / len(points) for column in zip(*points, strict=True))
    spread = math.fsum((at - time_s) ** 2 for at, _ in points)
    slope = math.fsum((at - time_s) * (found - value) for at, found in points) / spread if spread > 0 else 0.0
    if slope == 0 or (slope < 0) != target.at_most:
        return None
    in_s = time_s + (target.value - value) / slope - now_s
    return in_s if in_s > 0 else None  # a curve that flattens lies below its line: a time that has passed says nothing


def speed(evaluations: Sequence[Mapping[str, float]]) -> float | None:
    """Return the seconds of the run's clock per second of real time, over the last `EVALUATIONS` evaluations.

    Returns None if unknown.
    """
    points = [(row["wall_s"], row["time_s"]) for row in evaluations if "wall_s" in row][-EVALUATIONS:]
    if len(points) < 2:
        return None
    (wall_s, time_s), (last_wall_s, last_time_s) = points[0], points[-1]
    lasted_s, passed_s = last_wall_s - wall_s, last_time_s - time_s
    return passed_s / lasted_s if lasted_s > 0 and passed_s > 0 else None


@dataclass(frozen=True, slots=True)
class ClientProgress:
    """Progress of one client of a run."""

    client: int
    doing: str = ""  # submodel that the client trains; "" = it is idle
    num_tasks: int = 0  # number of its merged updates
    device: str = ""
    there: bool = True  # whether the client is connected
    version: int | None = None  # version of the global model that its task started from
    behind: int = 0  # number of versions made since
    since_s: float | None = None  # seconds since the task began
    due_in_s: float | None = None  # predicted seconds until the task ends, negative if it is late


@dataclass(frozen=True, slots=True)
class ProgressState:
    """A snapshot of a run's progress."""

    version: int  # version of the global model
    num_updates: int  # number of updates merged so far
    time_s: float  # seconds on the run's clock: wall time, or the virtual clock of a simulation
    # metrics of the latest evaluation, whose time and version are in ``evaluated``
    metrics: Mapping[str, float] = field(default_factory=dict)
    clients: tuple[ClientProgress, ...] = ()  # clients to show
    num_updates_goal: int | None = None  # number of updates after which the run ends; None = another limit ends it
    title: str = ""
    simulated: bool = False
    finished: str | None = None  # why the run has ended; None = it goes on
    # clients that ever joined, of which ``num_there`` are connected and ``num_working`` train; may be more than are
    # shown
    num_clients: int | None = None
    num_there: int | None = None
    num_working: int | None = None
    bytes_down: int = 0
    bytes_up: int = 0
    # recent merged updates and recent bytes in both directions, each per second of the run's clock
    updates_per_s: float | None = None
    bytes_per_s: float | None = None
    staleness_mean: float = 0.0  # mean staleness of the updates merged so far
    staleness_max: int = 0
    # number of ended tasks by outcome: merged, refused, lost or unused
    outcomes: Mapping[str, int] = field(default_factory=dict)
    # estimated seconds, on the run's clock, until each goal is met, and until the run ends
    etas: tuple[Eta, ...] = ()
    ends_in_s: float | None = None
    speed: float | None = None  # seconds of the run's clock per second of real time
    # trainings of a simulation per second of real time, and number of processes that train
    trainings_per_s: float | None = None
    num_processes: int | None = None
    # share of tasks that were trained in batches of clients, and mean number of clients in a batch
    share_batched: float | None = None
    mean_cohort: float | None = None
    evaluated: tuple[float, int] | None = None
