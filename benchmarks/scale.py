"""Whether the cost of an event grows with the run or with the clients: 10,000 to 1,000,000 of them, 20,000 updates of a small MLP.

Also 1,000 clients on CIFAR-10 (which must be there, see `RAAFL_DATA`), a CNN.

Every case is a whole simulated run (coordinator, journal, clients.csv, checks of every update) in a process of its own,
on one thread. An event is an arrival, a join, a loss or a timer. What events cost is that thread's CPU time from the end
of one client's training to the beginning of the next, everything that is not training, over the events that the journal
has between the two. It is averaged over windows of 100 updates; a row holds the medians over the windows of the first
and of the last thousand updates, and their ratio. `wall_ratio` is the same on the wall clock, which whatever else the
machine is doing disturbs; `training_us` is the CPU time of a training, so that events can be compared over machines that
are more or less busy. `joined_s` is the time of all clients' arrival at time 0 with the first assignments, up to the
first training; `build_s` what went before, where data are shared out, devices dealt and checked. Memory is the process's
peak, and its growth from the moment when the model, the data and its share for each client were there;
`bytes_per_client` is its growth from before that until all clients have joined, without the samples themselves.
`evaluate_s` are the CPU seconds of measuring the model once, for CIFAR-10 on its whole test set.
In the cases with many clients (`many`) 10,000 of 10,000, of 100,000 and of a million train at a time, on devices whose
speed varies with each task and drifts.
In the cases that come and go, every client is there for three quarters of its time only, each in its own rhythm.

    python -m benchmarks.scale [--json] [--out FILE]
    python -m benchmarks.scale many --out FILE        the cases with many clients alone; the file keeps its other rows
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import Row, main, replace_rows, status_bytes
from raafl import Experiment, fed_async, fed_buff, fed_raa
from raafl.core.algorithm import Algorithm, Training
from raafl.core.types import Assignment, Update
from raafl.data import CIFAR10, Iid
from raafl.devices import Device
from raafl.lean_import import import_lightning
from raafl.local.context import ALONE, TaskContext
from raafl.runfolder.events import JournalReader
from raafl.runtime.executors import Executor
from raafl.runtime.run import Run
from raafl.runtime.setup import build, make_executor
from raafl.runtime.simulation import Simulation
from raafl.submodel import FlatTensors

WINDOW = 100
EDGE = 1000
FEATURES, HIDDEN, CLASSES = 64, 32, 10


@dataclass(frozen=True)
class Case:
    """One simulated run of the benchmark."""

    algorithm: str
    concurrency: int | None
    clients: int = 10_000
    updates: int = 20_000
    samples: int = 4
    come_and_go: bool = False
    cifar10: bool = False
    varies: bool = False


NAMES = ("fed_async", "fed_buff", "fed_raa")
MANY = Case("fed_async", 1000, clients=100_000)
CIFAR = Case("fed_async", 100, clients=1000, updates=1500, cifar10=True)
CASES = [
    *(Case(name, cap) for name in NAMES for cap in (1000, None)),
    Case("fed_raa", 1000, come_and_go=True),
    MANY,
    CIFAR,
    *(
        Case(name, 10_000, clients=num, samples=1, varies=True)
        for name in ("fed_buff", "fed_raa")
        for num in (10_000, 100_000, 1_000_000)
    ),
]


class SmallData:
    """Data module with a few random samples for each client, without the base class, whose import takes more memory."""

    def __init__(self, num: int) -> None:
        """Draw all samples."""
        torch.manual_seed(0)
        self.samples = TensorDataset(torch.randn(num, FEATURES), torch.randint(0, CLASSES, (num,)))

    def prepare_data(self) -> None:
        """Do nothing: all is there."""

    def setup(self, stage: str) -> None:
        """Do nothing: all is there."""

    def train_dataloader(self) -> DataLoader[Any]:
        """Return all samples."""
        return DataLoader(self.samples, batch_size=4, shuffle=True)

    def test_dataloader(self) -> DataLoader[Any]:
        """Return a few samples: evaluation is not what is measured."""
        return DataLoader(TensorDataset(*self.samples[:32]), batch_size=32)


class Stopwatch(Executor):
    """Executor that trains in this process and records when each training began and ended, on two clocks."""

    def __init__(self, inner: Executor) -> None:
        """Wrap the executor ``inner``."""
        self._inner = inner
        self.joined_bytes = 0
        self.began: list[tuple[float, float]] = []
        self.ended: list[tuple[float, float]] = []

    def submit(self, assignment: Assignment, snapshot: FlatTensors, needed_at: float) -> None:
        """Pass the task to the wrapped executor."""
        self._inner.submit(assignment, snapshot, needed_at)

    def result(self, assignment_id: int, context: TaskContext = ALONE) -> Update:
        """Train, and read the clocks before and after."""
        self.joined_bytes = self.joined_bytes or status_bytes("VmRSS")
        self.began.append((time.perf_counter(), time.thread_time()))
        update = self._inner.result(assignment_id, context)
        self.ended.append((time.perf_counter(), time.thread_time()))
        return update

    def cancel(self, assignment_id: int) -> None:
        """Pass the cancellation on."""
        self._inner.cancel(assignment_id)


def make_algorithm(case: Case) -> Algorithm:
    """Return the algorithm of a case."""
    if case.algorithm == "fed_async":
        return fed_async(concurrency=case.concurrency)
    if case.algorithm == "fed_buff":
        return fed_buff(buffer_size=10, concurrency=case.concurrency)
    return fed_raa(fragments=3, concurrency=case.concurrency)


def make_devices(case: Case) -> list[Device]:
    """Return devices of three speeds, with 0.8, 1.6 and 4 virtual seconds for a task, each in ten rhythms of availability."""
    devices = []
    for kind in range(30):
        windows = None
        if case.come_and_go:  # present for 15 of every 20 s, beginning at 0 s, 2 s, ..., 18 s
            start = float(2 * (kind // 3))
            windows = ((start, start + 15.0),) if start <= 5 else ((0.0, start - 5.0), (start, 20.0))
        varying: dict[str, Any] = {"speed_jitter": 0.2, "speed_drift": 0.3, "drift_s": 60.0} if case.varies else {}
        speed = (5e4, 2.5e4, 1e4)[kind % 3]
        devices.append(Device(flops_per_s=speed, availability=windows, period_s=windows and 20.0, **varying))
    return devices


def make_experiment(case: Case, folder: Path) -> Experiment:
    """Return the experiment of a case."""
    import_lightning()
    from model_zoo import CNN, MLP

    data: Any = CIFAR10() if case.cifar10 else SmallData(case.clients * case.samples)
    return Experiment(
        model=(lambda: CNN(3, 32))
        if case.cifar10
        else lambda: MLP(FEATURES, (HIDDEN,), CLASSES, lr=0.01, momentum=0.5),
        data=lambda: data,
        algorithm=make_algorithm(case),
        partition=Iid(),
        clients=case.clients,
        devices=make_devices(case),
        train=Training(num_epochs=None, num_steps=1, batch_size=10 if case.cifar10 else 4),
        max_updates=case.updates,
        eval_every=10**9,
        output=str(folder / "run"),
        progress="quiet",
    )


def measure(case: Case, folder: Path) -> Row:
    """Simulate one case in this process, and return its row."""
    torch.set_num_threads(1)
    experiment = make_experiment(case, folder)
    first_bytes, began = status_bytes("VmRSS"), time.perf_counter()
    parts = build(experiment, pace=False)
    run = Run(parts, "", "simulated")
    executor = Stopwatch(make_executor(parts, workers=1))
    build_s, before_bytes = time.perf_counter() - began, status_bytes("VmRSS")
    began = time.perf_counter()
    try:
        run.start()
        simulation = Simulation(parts.coordinator, parts.clients, executor, run.record, None, progress=run.progress)
        summary = run.finish(simulation.run(), simulation.now)
    finally:
        run.close()
    run_s = time.perf_counter() - began
    peak_bytes, begun = status_bytes("VmHWM"), time.thread_time()
    run.evaluator(parts.coordinator.state.values, 0)
    evaluate_s = time.thread_time() - begun
    if summary["updates_merged"] != case.updates:
        raise RuntimeError(f"{case} merged {summary['updates_merged']} updates: {summary['finished']}")
    events = events_between(folder / "run")
    edge, window = min(EDGE, case.updates // 3), min(WINDOW, max(case.updates // 30, 1))
    wall, cpu = (edges_us(executor, clock, events, edge, window) for clock in (0, 1))
    return {
        "algorithm": case.algorithm,
        "data": "cifar10" if case.cifar10 else "random",
        "concurrency": case.concurrency,
        "come_and_go": case.come_and_go,
        "varies": case.varies,
        "clients": case.clients,
        "updates": case.updates,
        "events": sum(events),
        "us_per_event_first": cpu[0],
        "us_per_event_last": cpu[1],
        "ratio": cpu[1] / cpu[0],
        "wall_ratio": wall[1] / wall[0],
        "training_us": 1e6
        * statistics.median(end - begin for (_, begin), (_, end) in zip(executor.began, executor.ended, strict=True)),
        "build_s": build_s,
        "bytes_per_client": None if case.cifar10 else (executor.joined_bytes - first_bytes) / case.clients,
        "joined_s": executor.began[0][0] - began,
        "run_s": run_s,
        "peak_bytes": peak_bytes,
        "beside_data_bytes": peak_bytes - before_bytes,
        "evaluate_s": evaluate_s,
    }


def events_between(folder: Path) -> list[int]:
    """Count the coordinator's events between each update's arrival and the next one's."""
    counts: list[int] = []
    for event in JournalReader(folder).written():
        if event["event"] == "arrived":
            counts.append(1)
        elif counts and event["event"] in ("joined", "lost", "timer"):
            counts[-1] += 1
    return counts


def edges_us(watch: Stopwatch, clock: int, events: list[int], edge: int, window: int) -> tuple[float, float]:
    """Compute microseconds per event at the beginning and at the end of a run, medians over windows.

    `clock`: index of the clock. `events`: number of events of each update. `edge`: updates at each end. `window`:
    updates in a window.
    """
    gaps_us = [1e6 * (begin[clock] - end[clock]) for end, begin in zip(watch.ended, watch.began[1:], strict=False)]

    def median(start: int) -> float:
        windows = (slice(i, i + window) for i in range(start, start + edge - window + 1, window))
        return statistics.median(sum(gaps_us[w]) / sum(events[w]) for w in windows)

    return median(0), median(len(gaps_us) - edge)


def rows(cases: list[Case] | None = None, timeout_s: float = 1200.0) -> list[Row]:
    """Run every case in a process of its own, one after the other."""
    found = []
    for case in CASES if cases is None else cases:
        command = [sys.executable, "-m", "benchmarks.scale", "case", json.dumps(asdict(case))]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=timeout_s, check=True)
        found.append(json.loads(done.stdout))
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["case"]:
        with tempfile.TemporaryDirectory() as scratch:
            print(json.dumps(measure(Case(**json.loads(sys.argv[2])), Path(scratch))))
    elif sys.argv[1:3] == ["many", "--out"]:
        replace_rows(Path(sys.argv[3]), "many", rows([case for case in CASES if case.varies]))
    else:
        main("scale", rows)
