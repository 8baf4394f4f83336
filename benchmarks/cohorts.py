"""What training clients as one batch brings: trainings per second of simulated runs over the same runs client by client.

Two kinds of rows. `task`: cohorts of a size, trained together and asked for one by one, over the loop's `LocalTrainer.run`
of the same tasks, without a run around them. Whole runs: each algorithm with `batch_clients` 1 and `auto`, and the bare
PyTorch loop of `benchmarks.overhead`, alternately. All in CPU seconds of the one thread that trains (so that other programs
disturb less), the least of several repeats.

    python -m benchmarks.cohorts [--json] [--out FILE]

`per_s` is client trainings per second, `bare_per_s` the loop's (of a task) or the bare loop's (of a run), `ratio` the one over
the other, `over_loop` that over the same run with batch_clients 1, `in_vain` the share of trainings that nobody asked for,
`equal` whether the digest is the loop's.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule

from benchmarks.common import Row, main
from benchmarks.overhead import Bare, RandomData, Workload
from model_zoo import CNN, MLP, ViT
from raafl import Experiment, fed_async, fed_avg, fed_buff, fed_raa, hetero_fl
from raafl.commands.run import simulate
from raafl.core.algorithm import Algorithm, Local, Training
from raafl.core.coordinator import Coordinator
from raafl.core.hooks import Watcher
from raafl.core.types import Assignment, Event
from raafl.data import Iid
from raafl.data.federated import ClientData
from raafl.local.heap import keep_freed
from raafl.local.stacked import CohortTrainer, Member
from raafl.local.train import LocalTrainer
from raafl.submodel import FULL, Submodels

REPEATS, RUN_REPEATS = 5, 2
SIZES = (4, 16, 32, 64)


def mlp(*widths: int) -> Callable[[], LightningModule]:
    """Return what makes an MLP of these widths."""
    return lambda: MLP(widths[0], widths[1:-1], widths[-1], lr=0.005, momentum=0.5)


TASKS = {
    "logistic regression 784": (mlp(784, 10), (784,)),
    "mlp 64-32-10": (mlp(64, 32, 10), (64,)),
    "mlp 64-128-10": (mlp(64, 128, 10), (64,)),
    "mlp 784-48-10": (mlp(784, 48, 10), (784,)),
    "mlp 784-200-200-10": (mlp(784, 200, 200, 10), (784,)),
    "cnn": (lambda: CNN(3, 32), (3, 32, 32)),
    "vit micro": (lambda: ViT("micro"), (3, 32, 32)),
}
SMALL = Workload("mlp 64-32-10", mlp(64, 32, 10), (64,), 200, 100, 50, 10, 5, rounds=20)
LOGISTIC = Workload("logistic regression 784", mlp(784, 10), (784,), 200, 100, 50, 10, 5, rounds=20)
FEW = replace(SMALL, name="mlp 64-32-10, 20 at work", clients=40, cohort=20, rounds=40)
LARGE = Workload("cnn", lambda: CNN(3, 32), (3, 32, 32), 100, 50, 50, 10, 2, rounds=4)


def task_rows(name: str, make: Callable[[], LightningModule], shape: tuple[int, ...]) -> list[Row]:
    """Measure cohorts of one model against the loop; tasks of five steps on batches of ten."""
    work = Workload(name, make, shape, max(SIZES), max(SIZES), 50, 10, 5, rounds=1)
    data, module = RandomData(work), make()
    submodels = Submodels(module, [tensor[:2] for tensor in data.samples.tensors])
    values = submodels.state(module)
    training = Training(num_epochs=None, num_steps=work.num_steps, batch_size=work.batch_size)
    trainer = LocalTrainer(submodels, Local(), "values", training)
    together = CohortTrainer(trainer)
    tasks = []
    for client in range(max(SIZES)):
        rows = torch.arange(client * work.samples, (client + 1) * work.samples)
        task = Assignment(client + 1, client + 1, 0, 0, 0, FULL, 0, None, None, 1000 + client, 0.0)
        tasks.append(Member(task, values, ClientData(data.samples, rows, work.batch_size)))

    def cohort_s(size: int) -> float:
        begin = time.thread_time()
        trained = together.train(tasks[:size])
        for task in tasks[:size]:
            trained.update(task.assignment.id)
        return (time.thread_time() - begin) / size

    def loop_s() -> float:
        begin = time.thread_time()
        for task in tasks[:8]:
            trainer.run(*task)
        return (time.thread_time() - begin) / 8

    least: dict[int, float] = {}
    for repeat in range(REPEATS + 1):
        found = {0: loop_s()} | {size: cohort_s(size) for size in SIZES}
        if repeat:  # the first of each warms up
            least = {size: min(seconds, least.get(size, seconds)) for size, seconds in found.items()}
    return [
        {
            "workload": name, "algorithm": "task", "batch_clients": size, "at_work": size, "per_s": 1 / least[size],
            "bare_per_s": 1 / least[0], "ratio": least[0] / least[size], "mean_cohort": size, "in_vain": 0.0,
            "equal": _equal(trainer, together, tasks[:size]),
        }
        for size in SIZES
    ]  # fmt: skip


def _equal(trainer: LocalTrainer, together: CohortTrainer, tasks: list[Member]) -> bool:
    trained = together.train(tasks)
    alone = [trainer.run(*task).tensors.fingerprint() for task in tasks]
    return alone == [trained.update(task.assignment.id).tensors.fingerprint() for task in tasks]


def run(work: Workload, data: RandomData, algorithm: Algorithm, batch_clients: Any, folder: Path) -> tuple[float, Any]:
    """Return the CPU seconds of a whole simulated run's thread, and its summary."""
    experiment = Experiment(
        model=work.model, data=lambda: data, algorithm=algorithm, partition=Iid(), clients=work.clients,
        train=Training(num_epochs=None, num_steps=work.num_steps, batch_size=work.batch_size),
        max_updates=work.trainings, eval_every=10**9, batch_clients=batch_clients, output=str(folder), progress="quiet",
    )  # fmt: skip
    watch = _Stopwatch()
    summary, _ = simulate(experiment, watcher=watch)
    return watch.seconds, summary


class _Stopwatch(Watcher):
    """CPU seconds of this thread from the first event of a run to the last: what is built before is the same for all."""

    def __init__(self) -> None:
        self._begun: float | None = None
        self.seconds = 0.0

    def on_event(self, event: Event, coordinator: Coordinator, now: float) -> None:
        """Look at the clock."""
        at = time.thread_time()
        self._begun = at if self._begun is None else self._begun
        self.seconds = at - self._begun


def run_rows(work: Workload, methods: dict[str, Algorithm]) -> list[Row]:
    """Measure whole runs of each algorithm, client by client and as auto has it."""
    data = RandomData(work)
    bare, ways = Bare(work, data), (1, "auto")
    least: dict[Any, float] = {}
    summaries: dict[Any, dict[str, Any]] = {}

    def take(key: Any, seconds: float) -> None:
        least[key] = min(seconds, least.get(key, seconds))

    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(RUN_REPEATS):
            gc.collect()
            begin = time.thread_time()
            bare.run()
            take("bare", time.thread_time() - begin)
            for name, algorithm in methods.items():
                for way in ways:
                    seconds, summaries[name, way] = run(
                        work, data, algorithm, way, Path(folder) / f"{name}{way}{repeat}"
                    )
                    take((name, way), seconds)
    found = []
    for name in methods:
        for way in ways:
            summary = summaries[name, way]
            batched = summary.get("batched", {"mean_cohort": 1.0, "share": 0.0, "in_vain": 0})
            per_s, bare_per_s = work.trainings / least[name, way], work.trainings / least["bare"]
            found.append({
                "workload": work.name, "algorithm": name, "batch_clients": way, "at_work": work.cohort, "per_s": per_s,
                "bare_per_s": bare_per_s, "ratio": per_s / bare_per_s, "over_loop": least[name, 1] / least[name, way],
                "mean_cohort": batched["mean_cohort"], "share": batched["share"],
                "in_vain": batched["in_vain"] / work.trainings,
                "equal": summary["model_digest"] == summaries[name, 1]["model_digest"],
            })  # fmt: skip
    return found


def algorithms(cohort: int) -> dict[str, Algorithm]:
    """Return the algorithms measured, with so many clients at work."""
    return {
        "fed_avg": fed_avg(cohort=cohort), "fed_async": fed_async(cohort=cohort),
        "fed_buff": fed_buff(buffer_size=10, cohort=cohort), "fed_raa": fed_raa(fragments=3, cohort=cohort),
        "hetero_fl": hetero_fl(rates=[1.0, 0.75, 0.5, 0.25], cohort=cohort),
    }  # fmt: skip


def rows() -> list[Row]:
    """Measure cohorts of every model, then whole runs."""
    torch.set_num_threads(1)
    keep_freed()
    found = [row for name, (make, shape) in TASKS.items() for row in task_rows(name, make, shape)]
    found += run_rows(SMALL, algorithms(100))
    for work in (LOGISTIC, FEW, LARGE):
        few = algorithms(work.cohort)
        found += run_rows(work, {name: few[name] for name in ("fed_avg", "fed_async")})
    return found


if __name__ == "__main__":
    main("cohorts", rows)
