"""Read a grid: comparisons of methods on every combination of task and fleet, each described by a file of its own."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from raafl.errors import BadInput, at_least, nearest
from raafl.lab.compare.comparison import (
    Comparison,
    Options,
    Search,
    check_fields,
    check_folder_name,
    labelled,
    mapping,
    numbers,
    read_mapping,
    seeds_of,
    with_direction,
    words,
)
from raafl.lab.compare.processes import in_processes, log_of, replay, replay_difference
from raafl.lab.compare.runs import Outcome, Run, Runner, resolve
from raafl.lab.compare.search import Trial, run_trials, trials_of

Cell = tuple[str, str]
"""Name of a task and of a fleet."""

_ALL = "*"  # key in `GridFleet.devices` that stands for all learning tasks without a key of their own
TASK_S = "{task_s}"
"""Stands in a method's options for the seconds that a task should take: the fleet's `task_s` of the task."""


@dataclass(frozen=True)
class GridTask:
    """A learning task of a grid (comparisons of the same methods on several tasks and fleets): a model with its data."""

    name: str  # name of the task, from its file
    # base config of all runs: a file, relative to the task's file, or the name of one of raafl's own configs
    config: str
    # values to try for each option, unless the method has values of its own for this task
    search: Mapping[str, Sequence[Any]]
    targets: tuple[float, ...]
    options: Options = ()  # options that all runs on this task have
    metric: str = "accuracy"  # see `Comparison`; methods are ranked by the time to the first target
    maximize: bool = True
    smooth: int = 1
    about: str = ""  # description for readers, in one sentence


@dataclass(frozen=True)
class GridFleet:
    """A fleet (devices of all clients) on which a grid compares methods, with the virtual time of a run for each learning task."""

    name: str  # name of the fleet, from its file
    # value of `devices` in a config (`fleet:NAME`, a device file, or a list), by the learning task's name or `*` for
    # all others
    devices: Mapping[str, str]
    # virtual duration of a run, by the learning task's name: a number of seconds, or 90s, 5m, 2h
    max_time: Mapping[str, float | str]
    # seconds that a client should train at a time, by the learning task's name; replaces `{task_s}` in a method's
    # options
    task_s: Mapping[str, float] = field(default_factory=dict)
    about: str = ""  # description for readers, in one sentence


@dataclass(frozen=True)
class GridMethod:
    """A federated method of a grid of comparisons; it becomes a row of each comparison."""

    name: str  # name of the method, which is the label of its rows
    options: Options  # options of all its runs
    # further options on single learning tasks, by the task's name
    tasks: Mapping[str, Options] = field(default_factory=dict)
    # values to try for options on single learning tasks, by the task's name; other tasks use the values in the task's
    # file
    search: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)
    about: str = ""  # description for readers, in one sentence


@dataclass(frozen=True)
class GridSearch:
    """Search for the settings of each method of a grid, with equally many trials for each, on one fleet."""

    fleet: str  # name of the fleet on which trials run; their best settings are then used on all fleets
    seeds: tuple[int, ...]  # seeds of the trials; they must not be seeds of the grid
    options: Options = ()  # further options of the trials
    # whether trials are compared by the time to the task's first target, by which methods are ranked; those that miss
    # it, and all trials if False, by the metric at their end
    by_target: bool = False


@dataclass(frozen=True)
class Grid:
    """A grid of comparisons: the same methods on several learning tasks and fleets; read from files and checked."""

    name: str  # name of the result folder; by default the file's name
    tasks: Mapping[str, GridTask]  # tasks, fleets and methods of the grid by name, in order
    fleets: Mapping[str, GridFleet]
    methods: Mapping[str, GridMethod]
    seeds: tuple[int, ...]  # seeds of the reported runs
    search: GridSearch  # search for the settings of each method
    baseline: str | None = None  # label of the method with which the others are compared; None = the first
    # number of evaluations of each run, evenly spaced in virtual time; None = as the methods' options say
    evaluations: int | None = None
    # number of runs of each row that are replayed from their journals; a row counts only if each replay gives the same
    # model
    replays: int = 1
    about: str = ""  # description for readers, in one paragraph

    def __post_init__(self) -> None:
        check_folder_name(self.name)
        for name, value in (("tasks", self.tasks), ("fleets", self.fleets), ("methods", self.methods)):
            if not value:
                raise BadInput(f"{name} is empty: give at least one file")
        if self.search.by_target and (without := [name for name, one in self.tasks.items() if not one.targets]):
            raise BadInput(f"search.by_target is true, and task '{without[0]}' has no targets: give one")
        at_least("replays", self.replays, 1)
        at_least("evaluations", self.evaluations, 1, optional=True)
        if self.search.fleet not in self.fleets:
            raise BadInput(
                f"search.fleet is '{self.search.fleet}', which is no fleet: {nearest(self.search.fleet, self.fleets)}"
            )
        if self.baseline is not None and self.baseline not in self.methods:
            raise BadInput(f"baseline is '{self.baseline}', which is no method: {nearest(self.baseline, self.methods)}")
        for fleet in self.fleets.values():
            for task in self.tasks:
                if task not in fleet.max_time:
                    raise BadInput(
                        f"fleet '{fleet.name}' has no max_time for task '{task}': give max_time.{task}, such as 90s"
                    )
                if _ALL not in fleet.devices and task not in fleet.devices:
                    raise BadInput(f"fleet '{fleet.name}' has no devices for task '{task}': give devices.{task}")

    @property
    def cells(self) -> list[Cell]:
        """Return the task and fleet of each comparison (cell) of the grid, in order."""
        return [(task, fleet) for task in self.tasks for fleet in self.fleets]

    def comparison(self, cell: Cell, settings: Mapping[str, Options] | None = None) -> Comparison:
        """Return the comparison of all methods on one task and fleet.

        `settings`: best settings of each method for this task; None = the comparison includes the search for them.

        Raises:
            BadInput: a method's options contain `{task_s}` and the fleet has no `task_s` for the task, or methods would
                get different numbers of trials.
        """
        from raafl.config.options import seconds

        task, fleet = self.tasks[cell[0]], self.fleets[cell[1]]
        rows = {label: self._options(method, task, fleet) for label, method in self.methods.items()}
        search = None
        if settings is None:
            search = Search(
                task.search,
                self.search.seeds,
                options=self.search.options,
                target=task.targets[0] if self.search.by_target else None,
                rows={
                    label: method.search[task.name]
                    for label, method in self.methods.items()
                    if task.name in method.search
                },
            )
        else:
            rows = {label: (*options, *settings[label]) for label, options in rows.items()}
        devices = fleet.devices.get(task.name) or fleet.devices[_ALL]
        every = None
        if self.evaluations is not None:
            every = f"{(seconds('max_time', fleet.max_time[task.name]) or 0.0) / self.evaluations:.6g}s"
        return Comparison(
            name="--".join(cell),
            eval_every=every,
            config=task.config,
            rows=rows,
            seeds=self.seeds,
            search=search,
            metric=task.metric,
            options=(*task.options, "--devices", devices, "--max_time", str(fleet.max_time[task.name])),
            maximize=task.maximize,
            targets=task.targets,
            smooth=task.smooth,
            baseline=self.baseline,
        )

    def only(self, labels: Sequence[str]) -> Grid:
        """Return the grid with only the methods that have these labels; raise `BadInput` for an unknown label."""
        for label in labels:
            if label not in self.methods:
                raise BadInput(f"rows has '{label}', which is no method of the grid: {nearest(label, self.methods)}")
        methods = {label: method for label, method in self.methods.items() if label in labels}
        return replace(self, methods=methods, baseline=self.baseline if self.baseline in methods else None)

    @staticmethod
    def _options(method: GridMethod, task: GridTask, fleet: GridFleet) -> Options:
        options = (*method.options, *method.tasks.get(task.name, ()))
        if any(TASK_S in word for word in options) and task.name not in fleet.task_s:
            raise BadInput(
                f"method '{method.name}' needs task_s.{task.name} in fleet '{fleet.name}': give the seconds that a "
                "task should take, such as those of the whole model on a median client"
            )
        return tuple(word.replace(TASK_S, str(fleet.task_s.get(task.name))) for word in options)


def is_grid(path: Path) -> bool:
    """Check whether a file describes a grid, and not a comparison; False if it cannot be read."""
    try:
        raw = _load(path)
    except BadInput:
        return False
    return "tasks" in raw and "fleets" in raw


def read_grid(path: Path, more: Sequence[Path] = ()) -> Grid:
    """Read a grid, and the files of its tasks, fleets and methods.

    Raises:
        BadInput: a file is missing or not YAML, or a field is unknown, missing or out of range.
    """
    raw = check_fields(_texts(_load(path), "name", "baseline"), Grid, "")
    folder = path.parent
    named = {kind: [_file(folder, kind, name) for name in _names(kind, raw)] for kind in ("tasks", "fleets", "methods")}
    for file in more:
        named["fleets" if "devices" in _load(file) else "methods"].append(file)
    given = mapping("search", raw.get("search", {}))
    search = check_fields(_texts(given, "fleet"), GridSearch, "search.")
    for name in ("fleet", "seeds"):
        if name not in search:
            raise BadInput(f"search.{name} is missing in '{path}': give search.fleet and search.seeds")
    return Grid(
        **{"name": path.stem}
        | raw
        | {
            "seeds": seeds_of("seeds", raw.get("seeds")),
            "tasks": _by_name(map(_task, named["tasks"])),
            "fleets": _by_name(map(_fleet, named["fleets"])),
            "methods": _by_name(map(_method, named["methods"])),
            "search": GridSearch(
                search["fleet"],
                seeds_of("search.seeds", search["seeds"]),
                words("search.options", search.get("options")),
                search.get("by_target", False),
            ),
        }
    )


def _texts(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Convert the fields ``names`` to text, since YAML reads a name such as 007 as a number."""
    return {name: str(one) if name in names and one is not None else one for name, one in given.items()}


def _names(kind: str, raw: Mapping[str, Any]) -> list[Any]:
    found = raw.get(kind, [])
    if not isinstance(found, list):
        raise BadInput(f"{kind} is {found!s:.80}: give a list of files' names")
    return found


def _file(folder: Path, kind: str, name: object) -> Path:
    return folder / kind / f"{name}.yaml"


def _load(path: Path) -> dict[str, Any]:
    return read_mapping(path, f"'{path}'", "see docs/results/unequal-bench.md for its fields")


def _fields(path: Path, kind: type, needed: Sequence[str]) -> dict[str, Any]:
    raw = {"name": path.stem} | check_fields(_texts(_load(path), "name"), kind, f"{path}: ")
    for name in needed:
        if name not in raw:
            raise BadInput(f"{name} is missing in '{path}': give {', '.join(needed)}")
    return raw


def _task(path: Path) -> GridTask:
    raw = _fields(path, GridTask, ("config", "search", "targets"))
    beside = path.parent / raw["config"]
    config = beside.as_posix() if beside.is_file() else raw["config"]
    return GridTask(
        **with_direction(raw, GridTask.metric)
        | {
            "config": config,
            "options": words("options", raw.get("options")),
            "search": mapping("search", raw["search"]),
            "targets": tuple(numbers("targets", raw["targets"])),
        }
    )


def _fleet(path: Path) -> GridFleet:
    raw = _fields(path, GridFleet, ("devices", "max_time"))
    devices = (
        labelled(f"{path}: devices", raw["devices"]) if isinstance(raw["devices"], dict) else {_ALL: raw["devices"]}
    )
    devices = {task: one if isinstance(one, str) else json.dumps(one) for task, one in devices.items()}
    times = {name: labelled(f"{path}: {name}", raw.get(name)) for name in ("max_time", "task_s")}
    return GridFleet(**raw | times | {"devices": devices})


def _method(path: Path) -> GridMethod:
    raw = _fields(path, GridMethod, ("options",))
    tasks, search = (labelled(f"{path}: {name}", raw.get(name)) for name in ("tasks", "search"))
    return GridMethod(
        **raw
        | {
            "options": words("options", raw["options"]),
            "tasks": {name: words(f"tasks.{name}", text) for name, text in tasks.items()},
            "search": {name: mapping(f"search.{name}", grid) for name, grid in search.items()},
        }
    )


def _by_name(items: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in items:
        if item.name in found:
            raise BadInput(f"{type(item).__name__.lower()} '{item.name}' is given twice: give each name once")
        found[item.name] = item
    return found


Tell = Callable[[str], None]


@dataclass
class GridRuns:
    """Record of the runs of a grid that have finished."""

    # trials of each method's search, by the learning task's name, then by the method's
    trials: dict[str, Mapping[str, Sequence[Trial]]] = field(default_factory=dict)
    # best trial of each method, by the learning task's name, then by the method's
    best: dict[str, Mapping[str, Trial]] = field(default_factory=dict)
    # outcomes of the finished runs, by the names of task and fleet
    outcomes: dict[Cell, list[Outcome]] = field(default_factory=dict)
    # result of each replay, by the name of the run's folder: how its model differs from the run's, or None if it is
    # equal
    replays: dict[str, str | None] = field(default_factory=dict)


def run_grid(
    grid: Grid,
    runner: Runner,
    jobs: int,
    tell: Tell,
    after_seed: Callable[[GridRuns], object],
    *,
    finished_only: bool = False,
) -> GridRuns:
    """Run everything in a grid that has not finished yet.

    First come the trials that search each row's settings. Then come all runs with the first seed and the replays that
    verify them, then those with the second seed, and so on. So a grid that is interrupted lacks only its last seeds.

    Raises:
        BadInput: an option of a method, task or fleet is wrong; raised before any run starts.
        RunFailed: all trials of a method failed, or one was interrupted.
    """
    found = GridRuns(outcomes={cell: [] for cell in grid.cells})
    _search(grid, runner, found, finished_only)
    runs = _runs(grid, found)
    for seed in grid.seeds:
        outcomes = _outcomes([run for run in runs if run.seed == seed], runner, finished_only)
        for outcome in outcomes:
            found.outcomes[runs[outcome.run]].append(outcome)
        due = [
            outcome
            for outcome in outcomes
            if outcome.summary is not None and seed in replayed_seeds(grid, runs[outcome.run], outcome.run.label)
        ]
        _replay(due, jobs, tell, found.replays, finished_only)
        after_seed(found)
    return found


def replayed_seeds(grid: Grid, cell: Cell, label: str) -> list[int]:
    """Choose the seeds whose runs of a method are replayed (computed again from their event logs) as a check.

    The choice is random, but the same in every call.
    """
    num = min(grid.replays, len(grid.seeds))
    return random.Random(f"raafl compare {'--'.join(cell)} {label}").sample(list(grid.seeds), num)


def _search(grid: Grid, runner: Runner, found: GridRuns, finished_only: bool) -> None:
    for task in grid.tasks:
        comparison = grid.comparison((task, grid.search.fleet))
        assert comparison.search is not None
        trials = trials_of(comparison, comparison.search)
        if finished_only:  # leave out methods whose search has not finished
            runs = {label: [run for trial in some for run in trial.runs] for label, some in trials.items()}
            trials = {label: some for label, some in trials.items() if all(map(runner.find, runs[label]))}
        found.trials[task] = trials
        found.best[task] = run_trials(trials, comparison, comparison.search, runner) if trials else {}


def _runs(grid: Grid, found: GridRuns) -> dict[Run, Cell]:
    """List the runs of all cells (pairs of task and fleet), one method after the other, each run with its cell."""
    listed: list[tuple[Run, Cell]] = []
    for cell in grid.cells:
        best = found.best[cell[0]]
        if not best:
            continue
        settings: dict[str, Options] = {label: trial.settings for label, trial in best.items()}
        comparison = grid.only(list(settings)).comparison(cell, settings)
        listed += [
            (run, cell)
            for label in comparison.rows
            for run in resolve(comparison.config, label, comparison.options_of(label), grid.seeds)
        ]
    place = {label: number for number, label in enumerate(grid.methods)}
    return dict(sorted(listed, key=lambda item: place[item[0].label]))


def _outcomes(runs: list[Run], runner: Runner, finished_only: bool) -> list[Outcome]:
    if finished_only:
        return [outcome for run in runs if (outcome := runner.find(run)) is not None]
    return runner.run_all(runs)


def _replay(due: Sequence[Outcome], jobs: int, tell: Tell, replays: dict[str, str | None], finished_only: bool) -> None:
    """Replay runs that have not been replayed, several at a time, and store in ``replays`` how each model differs."""
    left = []
    for outcome in due:
        if _was_replayed(outcome):
            replays[outcome.folder.name] = replay_difference(outcome.summary, log_of(outcome.folder))
        elif not finished_only:
            left.append(outcome)

    def start_one(outcome: Outcome) -> BaseProcess:
        return replay(outcome.folder)

    for outcome, _, num in in_processes(left, jobs, start_one, lambda _: None):
        why = replays[outcome.folder.name] = replay_difference(outcome.summary, log_of(outcome.folder))
        verdict = "equal" if why is None else f"NOT equal: {why}"
        tell(f"{outcome.run.label}, seed {outcome.run.seed}: replay {verdict}  ({num} replays left in this step)")


def _was_replayed(outcome: Outcome) -> bool:
    log = log_of(outcome.folder)
    return log.is_file() and any(
        _is_verdict(line) for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
    )


def _is_verdict(line: str) -> bool:
    if not line.startswith("{"):
        return False
    try:
        verdict: Any = json.loads(line)
    except ValueError:
        return False
    return isinstance(verdict, dict) and "model_digest" in verdict


def root_of(folder: Path) -> Path:
    """Return the folder that contains the run folders of a grid."""
    return folder / "runs"
