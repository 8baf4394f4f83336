"""Measure what the files of a long run cost to write, follow, report, repair for a resume and replay: seconds and memory.

A simulated run of a small MLP in which nothing is trained (each update is what its client received), so that what is left is
the coordinator and the files: `events.jsonl` has two rows a task, `clients.csv` one. Each thing is done in a process of
its own, once to a run of a tenth of the updates and once to the whole one. `us_per_row` are CPU microseconds for each row of
the journal: where it is the same for both, nothing is quadratic. `grown_bytes` is the growth of the process's memory meanwhile:
where it is the same for both, nothing is kept of each row.

    python -m benchmarks.long_run [--json] [--out FILE]
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.common import Row, main, status_bytes
from benchmarks.scale import Case, make_experiment
from raafl.commands.report import build as build_report
from raafl.config.experiment import Experiment
from raafl.core.types import Assignment, Update
from raafl.local.context import ALONE, TaskContext
from raafl.runfolder.events import read_run
from raafl.runfolder.reading import read
from raafl.runfolder.schema import CHECKPOINTS, JOURNAL
from raafl.runtime.executors import Executor
from raafl.runtime.lifecycle import resume
from raafl.runtime.lifecycle.resume import reopened
from raafl.runtime.replay import Replay
from raafl.runtime.run import Run
from raafl.runtime.setup import build
from raafl.runtime.simulation import Simulation
from raafl.submodel import FlatTensors
from raafl.watch.state import follow as followed

UPDATES = (50_000, 500_000)
CLIENTS, AT_WORK = 1000, 100


class Untrained(Executor):
    """Executor that answers each task with the values that the client received."""

    def __init__(self) -> None:
        """Start without tasks."""
        self._tasks: dict[int, tuple[Assignment, FlatTensors]] = {}

    def submit(self, assignment: Assignment, snapshot: FlatTensors, needed_at: float) -> None:
        """Store the task; see `Executor.submit`."""
        self._tasks[assignment.id] = assignment, snapshot

    def result(self, assignment_id: int, context: TaskContext = ALONE) -> Update:
        """Return the values that the task received."""
        task, values = self._tasks.pop(assignment_id)
        return Update(task.id, task.client, task.incarnation, values, 4, 1, {"loss": 1.0})

    def cancel(self, assignment_id: int) -> None:
        """Forget the task."""
        self._tasks.pop(assignment_id, None)


def experiment_of(folder: Path, updates: int) -> Experiment:
    """Return the experiment of a run in ``folder``, with a checkpoint at half of its updates."""
    case = Case("fed_async", AT_WORK, clients=CLIENTS, updates=updates)
    middle = updates // 2
    return replace(make_experiment(case, folder.parent), checkpoint_every=middle, eval_every=updates // 100)


def write(folder: Path, updates: int) -> None:
    """Run it from the first to the last update."""
    parts = build(experiment_of(folder, updates), pace=False)
    run = Run(parts, "", "simulated")
    try:
        run.start()
        simulation = Simulation(
            parts.coordinator, parts.clients, Untrained(), run.record, run.evaluator, hooks=run.hooks
        )
        run.finish(simulation.run(), simulation.now)
    finally:
        run.close()


def follow(folder: Path, updates: int) -> None:
    """Read a run for the first time, as `raafl watch` does."""
    watched = followed(folder)
    watched.look()
    if watched.state.snapshot().num_updates != updates:
        raise RuntimeError(f"{watched.state.snapshot().num_updates} updates were seen, not {updates}")


def report(folder: Path, updates: int) -> None:
    """Make the report page of a run."""
    build_report([read(folder)])


def mend(folder: Path, updates: int) -> None:
    """Restore a copy of a run to the checkpoint at its half, as a resume does."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        copy = Path(scratch) / "run"
        shutil.copytree(folder, copy)
        last = sorted((copy / CHECKPOINTS).iterdir())[-1]
        last.unlink()
        mended = resume.mend(resume.load(copy, "simulated", experiment_of(folder, updates)))
        reopened(copy).close()
    if mended.num_missing:
        raise RuntimeError(f"{mended.num_missing} events are missing")


def replay(folder: Path, updates: int) -> None:
    """Replay a run, and compare the digest of its model."""
    rows, summary = read_run(folder)
    parts = build(experiment_of(folder, updates), pace=False, min_clients=CLIENTS)
    Replay(parts.coordinator, Untrained()).run(rows)
    if summary is None or parts.coordinator.state.values.model_digest() != summary["model_digest"]:
        raise RuntimeError("the replay has another digest")


WAYS: dict[str, Callable[[Path, int], None]] = {
    "write": write,
    "follow": follow,
    "report": report,
    "mend": mend,
    "replay": replay,
}


def measure(way: str, folder: Path, updates: int) -> Row:
    """Measure one way of using a long journal, in this process; ``way``: a key of `WAYS`."""
    before, begun = status_bytes("VmRSS"), time.process_time()
    WAYS[way](folder, updates)
    seconds = time.process_time() - begun
    grown = status_bytes("VmHWM") - before
    with (folder / JOURNAL).open("rb") as file:
        num_rows = sum(1 for _ in file)
    return {
        "way": way,
        "updates": updates,
        "rows": num_rows,
        "cpu_s": seconds,
        "us_per_row": 1e6 * seconds / num_rows,
        "grown_bytes": grown,
        "journal_bytes": (folder / JOURNAL).stat().st_size,
    }


def rows() -> list[Row]:
    """Measure all ways, on a short and on a long run, each in a process of its own."""
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for updates in UPDATES:
            folder = Path(scratch) / str(updates) / "run"
            folder.parent.mkdir()
            for way in WAYS:
                command = [sys.executable, "-m", "benchmarks.long_run", "one", way, str(folder), str(updates)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1200, check=True)
                found.append(json.loads(done.stdout))
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["one"]:
        print(json.dumps(measure(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))))
    else:
        main("long_run", rows)
