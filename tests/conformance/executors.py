"""Every executor, for the suite that all pass, and tasks for it."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from raafl.config.experiment import Experiment
from raafl.config.options import Engine
from raafl.core.types import Assignment, derive_seed
from raafl.data.federated import ClientData
from raafl.local.evaluate import Evaluator
from raafl.runtime.executors import Executor, Inline
from raafl.runtime.executors.batched import BatchedExecutor
from raafl.runtime.executors.pool import Pool
from raafl.runtime.executors.rank_worker import work
from raafl.runtime.executors.ranks import RankExecutor
from raafl.submodel import FlatTensors, Spec
from raafl.transport import PeerLost
from raafl.transport.tcp.connection import TcpConnection
from tests.helpers import cached_models
from tests.helpers.emulated_ray import Cluster, emulated_ray
from tests.helpers.real_ranks import ranks as real_ranks
from tests.helpers.small_runs import Finished
from tests.local.bench import BATCH_SIZE, Bench, Net, assignment, samples

HERE = os.getpid()
WAIT_S = 60.0
Tasks = Sequence[tuple[Assignment, FlatTensors]]


class Dropping(Net):
    dropout = 0.3


class Slow(Net):
    """Takes its time in other processes only, so that tasks do not end in the order in which they were given."""

    def training_step(self, batch, index):
        if os.getpid() != HERE:
            time.sleep(0.002)
        return super().training_step(batch, index)


def over_ranks(made: Experiment) -> Finished:
    """Run over two ranks that meet over Gloo: this process, and one that is forked."""
    with cached_models.reuse_findings(), real_ranks(made, simulating=1) as fleet:
        run = fleet.simulate()
        assert fleet.exit_codes() == {1: 0}
    return run


@contextmanager
def inline(bench: Bench, data: list[ClientData], num_processes: int = 1) -> Iterator[Inline]:
    yield Inline(bench.trainer, data.__getitem__)


@contextmanager
def cohorts(bench: Bench, data: list[ClientData], num_processes: int = 1) -> Iterator[BatchedExecutor]:
    with closing(BatchedExecutor(bench.trainer, data.__getitem__, 5)) as executor:
        yield executor


@contextmanager
def ray(bench: Bench, data: list[ClientData], num_processes: int = 1) -> Iterator[Executor]:
    with on_cluster(bench, data, num_processes) as (executor, _):
        yield executor


@contextmanager
def on_cluster(
    bench: Bench,
    data: list[ClientData],
    num_cpus: float,
    engine: Engine | None = None,
    workers: int = 1,
    num_gpus: float = 0.0,
) -> Iterator[tuple[Any, Cluster]]:
    """Return a context with an executor over an emulated Ray cluster, and this."""
    made: Any = SimpleNamespace(engine=engine or Engine("ray"), workers=workers)

    def build(_: Experiment) -> tuple[Any, Executor]:
        return bench.trainer, Inline(bench.trainer, data.__getitem__)

    with (
        emulated_ray(num_cpus, num_gpus) as (module, cluster),
        closing(module.RayExecutor(made, bench.trainer, build)) as executor,
    ):
        yield executor, cluster


@contextmanager
def pool(bench: Bench, data: list[ClientData], num_processes: int) -> Iterator[Pool]:
    with _pool(bench, Inline(bench.trainer, data.__getitem__), num_processes) as executor:
        yield executor


@contextmanager
def pool_of_cohorts(bench: Bench, data: list[ClientData], num_processes: int) -> Iterator[Pool]:
    with _pool(bench, BatchedExecutor(bench.trainer, data.__getitem__, 5), num_processes) as executor:
        yield executor


def _pool(bench: Bench, inner: Executor, num_processes: int) -> closing[Pool]:
    return closing(Pool(bench.trainer, inner, num_processes, lambda: evaluator_of(bench)))


@contextmanager
def ranks(bench: Bench, data: list[ClientData], num_processes: int, theirs: Bench | None = None) -> Iterator[Any]:
    """An executor over forked processes that stand for ranks; its ``processes`` and ``warnings`` are for the test."""
    pairs = [socket.socketpair() for _ in range(num_processes - 1)]  # all forks before any thread
    processes = [
        mp.get_context("fork").Process(target=_rank, args=(end, theirs or bench, data), daemon=True) for _, end in pairs
    ]
    for process, (_, end) in zip(processes, pairs, strict=True):
        process.start()
        end.close()
    executor: Any = RankExecutor(bench.trainer, Inline(bench.trainer, data.__getitem__))
    executor.processes, executor.warnings = processes, []
    executor.warn = executor.warnings.append
    for number, (end, _) in enumerate(pairs, start=1):
        executor.take_on(f"rank {number}", lambda end=end: TcpConnection(end, WAIT_S))
    try:
        yield executor
    finally:
        executor.close()
        executor.close()
        for process in processes:
            process.join(WAIT_S)
        executor.codes = [process.exitcode for process in processes]  # None where it has not ended
        for process in processes:
            process.close()


def _rank(end: socket.socket, bench: Bench, data: list[ClientData]) -> None:
    code = 1
    try:
        with TcpConnection(end, WAIT_S) as pair, suppress(PeerLost):
            work(pair, bench.trainer, Inline(bench.trainer, data.__getitem__), lambda: evaluator_of(bench))
            code = 0
    finally:
        os._exit(code)


def evaluator_of(bench: Bench) -> Evaluator:
    """Measures on 22 samples in batches of three, and one."""
    data = ClientData(samples(7), torch.arange(22), 3)
    return Evaluator(bench.submodels, lambda first=0: list(data.in_order(3))[first:], seed=0)


def tasks_of(bench: Bench, count: int) -> Tasks:
    """Tasks of three submodels from three clients, with what each starts from."""
    axis = next(iter(bench.submodels.axes))
    specs = [Spec(), Spec.select({axis: range(0, 3)}), Spec.select({axis: (1, 4, 6, 7)})]
    generator = torch.Generator().manual_seed(9)
    tasks = []
    for number in range(1, count + 1):
        task = assignment(specs[number % 3], seed=derive_seed(number), epochs=1)
        task = replace(task, id=number, client=number % 3)
        values = bench.submodels.plan(task.spec, "present").gather(bench.values)
        for buffer in values.buffers.values():
            buffer.add_(torch.randn(buffer.shape, generator=generator), alpha=0.1)
        tasks.append((task, values))
    return tasks


def clients() -> list[ClientData]:
    """Three clients with data of other lengths."""
    return [ClientData(samples(seed), torch.arange(4 + 6 * seed), BATCH_SIZE) for seed in range(3)]


def told(update: Any) -> tuple[Any, ...]:
    """All that an update says."""
    return update.tensors.fingerprint(), update.num_samples, update.num_steps, update.metrics


def one_by_one(bench: Bench, data: list[ClientData], todo: Tasks) -> dict[int, tuple[Any, ...]]:
    """What each task must come to."""
    executor, expected = Inline(bench.trainer, data.__getitem__), {}
    for task, values in todo:
        executor.submit(task, values, 0.0)
        expected[task.id] = told(executor.result(task.id))
    return expected


def in_any_order(executor: Executor, todo: Tasks, draw: random.Random) -> dict[int, tuple[Any, ...]]:
    """Hand in all tasks, drop some, and ask for the others."""
    for task, values in todo:
        executor.submit(task, values, draw.random())
    order = [task for task, _ in todo]
    draw.shuffle(order)
    found = {}
    for task in order:
        if draw.random() < 0.3:
            executor.cancel(task.id)
            continue
        update = executor.result(task.id)
        assert (update.assignment, update.client) == (task.id, task.client)
        found[task.id] = told(update)
    return found
