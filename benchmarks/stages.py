"""Measure what a task of a simulation costs beside its training steps: CPU microseconds of each stage, one by one and batched.

Whole runs of the smallest model (MLP 64-32-10, 50 samples in batches of ten, a hundred clients at work), with a clock around the
functions that a stage begins and ends with. A stage's time is its own, without the stages that it calls. The clocks take time,
too: `whole` is a run without them, `bare` the plain PyTorch loop of `benchmarks.overhead`, in the same process in turns.

    python -m benchmarks.stages [--json] [--out FILE]
"""

from __future__ import annotations

import functools
import gc
import itertools
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.cohorts import SMALL, algorithms, run
from benchmarks.common import Row, main
from benchmarks.overhead import Bare, RandomData
from raafl.core.coordinator import Coordinator
from raafl.core.snapshots import Snapshots
from raafl.local.malloc import keep_freed
from raafl.local.stacked import CohortTrainer, Trained
from raafl.local.stacked.steps import Steps
from raafl.local.train import LocalTrainer, TaskSteps
from raafl.parts.merge.mean import Mean
from raafl.parts.protect.assembly import Bounded
from raafl.runfolder.journal import RunFolder
from raafl.runfolder.record import RunRecord
from raafl.runtime.executors.batched import BatchedExecutor
from raafl.runtime.simulation import Simulation
from raafl.submodel import FlatTensors

REPEATS, ROUNDS = 3, 20
STAGES: dict[str, Sequence[tuple[type, str]]] = {
    "training steps": [(Steps, "run"), (TaskSteps, "run")],
    "before and after the steps": [(CohortTrainer, "train"), (LocalTrainer, "run_once"), (Trained, "update")],
    "trials of batches": [(BatchedExecutor, "_compare"), (BatchedExecutor, "_settled_s")],
    "executor": [(BatchedExecutor, "result"), (BatchedExecutor, "submit")],
    "coordinator": [(Coordinator, "handle")],
    "norms of updates": [(Bounded, "_measure")],
    "merge": [(Mean, "receive"), (Mean, "detach"), (Mean, "apply")],
    "snapshots": [(Snapshots, "cut"), (Snapshots, "give_back"), (Snapshots, "returned")],
    "fingerprint": [(FlatTensors, "fingerprint")],
    "journal": [(RunRecord, "event"), (RunRecord, "assigned")],
    "clients.csv and statistics": [(RunRecord, "settled"), (RunFolder, "client")],
    "delivery": [(Simulation, "_deliver")],
    "event loop": [(Simulation, "_turn")],
}
"""Functions at which each stage begins."""


@contextmanager
def clocks() -> Iterator[dict[str, float]]:
    """Return a context that yields the CPU seconds which each stage has taken so far, without those of stages inside."""
    spent: dict[str, float] = defaultdict(float)
    open_stages: list[str] = []
    since = 0.0
    before: list[tuple[type, str, Any]] = []

    def timed(stage: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal since
            at = time.thread_time()
            if open_stages:
                spent[open_stages[-1]] += at - since
            open_stages.append(stage)
            since = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                at = time.thread_time()
                spent[stage] += at - since
                open_stages.pop()
                since = time.thread_time()

        return call

    for stage, functions in STAGES.items():
        for owner, name in functions:
            before.append((owner, name, vars(owner)[name]))
            setattr(owner, name, timed(stage, vars(owner)[name]))
    try:
        yield spent
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def rows(rounds: int = ROUNDS, repeats: int = REPEATS) -> list[Row]:
    """Measure fed_avg and fed_async, one by one and in batches.

    Args:
        rounds: number of tasks of a run, in hundreds.
        repeats: repeats of each run; the least time of each counts.
    """
    torch.set_num_threads(1)
    keep_freed()
    work = replace(SMALL, rounds=rounds)
    data = RandomData(work)
    bare, methods = Bare(work, data), algorithms(work.cohort)
    least: dict[tuple[str, Any, str], float] = {}

    def take(method: str, way: Any, stage: str, seconds: float) -> None:
        key = method, way, stage
        least[key] = min(seconds / work.trainings * 1e6, least.get(key, float("inf")))

    bare.train(0)
    with tempfile.TemporaryDirectory() as folder:
        for repeat, method, way in itertools.product(range(repeats), ("fed_avg", "fed_async"), (1, "auto")):
            gc.collect()
            begin = time.thread_time()
            bare.run()
            take(method, way, "bare", time.thread_time() - begin)
            at = Path(folder) / f"{method}-{way}-{repeat}"
            take(method, way, "whole", run(work, data, methods[method], way, at)[0])
            with clocks() as spent:
                run(work, data, methods[method], way, at.with_suffix(".clocks"))
            for stage in STAGES:
                take(method, way, stage, spent[stage])
    return [
        {
            "stage": stage,
            "run": f"{method} {'in batches' if way == 'auto' else 'one by one'}",
            "us": least[method, way, stage],
        }
        for stage in (*STAGES, "whole", "bare")
        for method in ("fed_avg", "fed_async")
        for way in (1, "auto")
    ]


if __name__ == "__main__":
    main("stages", rows)
