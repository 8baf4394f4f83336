"""Run a grid of comparisons: the search for each method's settings, all reported runs, and replays of some."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from raafl.lab.compare.fields import Options
from raafl.lab.compare.grid import Cell, Grid
from raafl.lab.compare.processes import in_processes
from raafl.lab.compare.runs import Outcome, Run, Runner, resolve
from raafl.lab.compare.search import Trial, run_trials, trials_of
from raafl.lab.compare.verify import difference, log_of, replay

Tell = Callable[[str], None]


@dataclass
class GridRuns:
    """Record of the runs of a grid that have finished."""

    # trials of each method's search, by name of the learning task
    trials: dict[str, Mapping[str, Sequence[Trial]]] = field(default_factory=dict)
    # the best trial of each method, by name of the learning task
    best: dict[str, Mapping[str, Trial]] = field(default_factory=dict)
    # outcomes of the finished runs, by name of the learning task and of the fleet
    outcomes: dict[Cell, list[Outcome]] = field(default_factory=dict)
    # results of replays (runs computed again from their event logs), by name of the run's folder: the reason why
    # the replay gave another model; None = it gave the same
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
        if finished_only:  # the trials of a method that has not had all of its own say nothing
            runs = {label: [run for trial in some for run in trial.runs] for label, some in trials.items()}
            trials = {label: some for label, some in trials.items() if all(map(runner.find, runs[label]))}
        found.trials[task] = trials
        found.best[task] = run_trials(trials, comparison, comparison.search, runner) if trials else {}


def _runs(grid: Grid, found: GridRuns) -> dict[Run, Cell]:
    """Return the runs of all cells, those of a method before those of the next one."""
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
    """Replay the runs that have not been, and note whether each is equal to what its summary says."""
    left = []
    for outcome in due:
        if _was_replayed(outcome):
            replays[outcome.folder.name] = difference(outcome.summary, log_of(outcome.folder))
        elif not finished_only:
            left.append(outcome)

    def start_one(outcome: Outcome) -> BaseProcess:
        return replay(outcome.folder)

    for outcome, _, num in in_processes(left, jobs, start_one, lambda _: None):
        why = replays[outcome.folder.name] = difference(outcome.summary, log_of(outcome.folder))
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
