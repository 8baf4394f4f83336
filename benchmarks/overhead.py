"""Measure raafl's overhead: client trainings per second of a simulated run over those of a bare PyTorch loop.

The bare loop does the same local steps with nothing around them: parameters are views into one flat vector, so loading
a client's start and averaging are one operation each; batches are index_select of tensors; the optimiser is made anew for
each client. In two processes it splits each round's clients, sums in shared memory, and meets at a barrier. raafl runs
whole: coordinator, journal, clients.csv, checks of every update. Both are timed from the first task to the last merge,
in turns, in one run; a row shows medians, `ratio` that of each turn's ratio, so that a machine which is slower for a
while is so for both. An asynchronous run is compared with the same bare loop, which does the same number of trainings.

    python -m benchmarks.overhead [--json] [--out FILE]
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import Row, main
from model_zoo import CNN, MLP
from raafl import Experiment, fed_async, fed_avg, fed_buff, simulate
from raafl.core.algorithm import Algorithm, Training
from raafl.data import Iid
from raafl.local.train import FabricOptions

REPEATS = 5


def cross_entropy(module: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute the cross-entropy of logits, whose classes are the batch's last tensor."""
    *inputs, labels = batch
    logits = module(*inputs)
    return F.cross_entropy(logits, labels) if logits.dim() == 2 else F.cross_entropy(logits.mT, labels)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer of most workloads, SGD."""
    return torch.optim.SGD(parameters, lr=0.005, momentum=0.5)


@dataclass(frozen=True)
class Workload:
    """Clients, their data, and how they train.

    `draw`: returns a number of samples; None = random numbers of `shape` with ten classes. `optimizer`: the bare
    loop's.
    """

    name: str
    model: Callable[[], LightningModule]
    shape: tuple[int, ...]
    clients: int
    cohort: int
    samples: int
    batch_size: int
    num_steps: int
    rounds: int
    draw: Callable[[int], tuple[torch.Tensor, ...]] | None = None
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = sgd

    @property
    def trainings(self) -> int:
        """Client trainings in one run."""
        return self.cohort * self.rounds


MLP_MNIST = Workload(
    "mlp", lambda: MLP(784, (200, 200), 10, lr=0.005, momentum=0.5), (784,), 10, 10, 6000, 128, 5, rounds=25
)
CNN_CIFAR = Workload("cnn", lambda: CNN(3, 32), (3, 32, 32), 1000, 50, 50, 10, 3, rounds=2)


class RandomData(LightningDataModule):
    """Random samples of a workload."""

    def __init__(self, work: Workload) -> None:
        """Draw all samples."""
        super().__init__()
        torch.manual_seed(0)
        num = work.clients * work.samples
        self.batch_size = work.batch_size
        drawn = work.draw(num) if work.draw else (torch.randn(num, *work.shape), torch.randint(0, 10, (num,)))
        self.samples = TensorDataset(*drawn)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return all samples."""
        return DataLoader(self.samples, batch_size=self.batch_size, shuffle=True)

    def test_dataloader(self) -> DataLoader[Any]:
        """Return a few samples: evaluation is not what is measured."""
        return DataLoader(TensorDataset(*self.samples[:32]), batch_size=32)


def flatten(module: nn.Module) -> torch.Tensor:
    """Move a module's trained parameters into one vector, and return that."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    flat = torch.cat([p.detach().flatten() for p in parameters])
    start = 0
    for p in parameters:
        p.data = flat[start : start + p.numel()].view_as(p)
        start += p.numel()
    return flat


class Bare:
    """Loop of PyTorch alone that does the local steps of a workload."""

    def __init__(self, work: Workload, data: RandomData) -> None:
        """Copy each client's samples to tensors of its own."""
        self.work = work
        self.clients = list(zip(*(tensor.split(work.samples) for tensor in data.samples.tensors), strict=True))
        self.module: nn.Module = work.model()
        self.flat = flatten(self.module)
        self.theta = self.flat.clone()

    def train(self, client: int) -> None:
        """Train one client from the global vector; the result is in ``self.flat``."""
        tensors = self.clients[client]
        self.flat.copy_(self.theta)
        optimizer = self.work.optimizer([p for p in self.module.parameters() if p.requires_grad])
        order = torch.randperm(self.work.samples)
        for rows in order.split(self.work.batch_size)[: self.work.num_steps]:
            loss = cross_entropy(self.module, [tensor[rows] for tensor in tensors])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def run(self) -> float:
        """Run all rounds in this process; return the seconds."""
        begin = time.perf_counter()
        with_sum = torch.zeros_like(self.theta)
        for _ in range(self.work.rounds):
            cohort = torch.randperm(self.work.clients)[: self.work.cohort].tolist()
            with_sum.zero_()
            for client in cohort:
                self.train(client)
                with_sum.add_(self.flat, alpha=1.0 / len(cohort))
            self.theta.copy_(with_sum)
        return time.perf_counter() - begin

    def run_in(self, num_processes: int) -> float:
        """Run all rounds, with the clients of each split among forked processes; return the seconds."""
        import multiprocessing as mp

        context = mp.get_context("fork")
        sums = torch.zeros(num_processes, len(self.theta)).share_memory_()
        self.theta.share_memory_()
        barrier = context.Barrier(num_processes)
        seconds = context.Value("d", 0.0)

        def work(rank: int) -> None:
            torch.set_num_threads(1)
            generator = torch.Generator().manual_seed(0)
            barrier.wait()
            begin = time.perf_counter()
            for _ in range(self.work.rounds):
                cohort = torch.randperm(self.work.clients, generator=generator)[: self.work.cohort].tolist()
                sums[rank].zero_()
                for client in cohort[rank::num_processes]:
                    self.train(client)
                    sums[rank].add_(self.flat, alpha=1.0 / len(cohort))
                barrier.wait()
                if rank == 0:
                    torch.sum(sums, dim=0, out=self.theta)
                barrier.wait()
            if rank == 0:
                seconds.value = time.perf_counter() - begin

        processes = [context.Process(target=work, args=(rank,)) for rank in range(num_processes)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        self.theta = self.theta.clone()
        return float(seconds.value)


def raafl_seconds(
    work: Workload, data: RandomData, algorithm: Algorithm, workers: int, folder: Path, device: str = "cpu"
) -> float:
    """Time one whole simulated run in seconds of the wall clock; ``workers``: processes that train."""
    experiment = Experiment(
        model=work.model,
        data=lambda: data,
        algorithm=algorithm,
        partition=Iid(),
        clients=work.clients,
        train=Training(num_epochs=None, num_steps=work.num_steps, batch_size=work.batch_size),
        max_updates=work.trainings,
        eval_every=10**9,
        workers=workers,
        output=str(folder),
        progress="quiet",
        server_device=device,
        fabric=FabricOptions(accelerator=torch.device(device).type),
    )
    summary, _ = simulate(experiment)
    assert summary["updates_merged"] == work.trainings
    return float(summary["wall_s"])


def algorithms(work: Workload) -> dict[str, Algorithm]:
    """List the algorithms to measure on a workload."""
    whole = work.cohort == work.clients
    cohort = None if whole else work.cohort
    return {
        "fed_avg": fed_avg(cohort=cohort),
        "fed_async": fed_async(cohort=cohort),
        "fed_buff": fed_buff(buffer_size=10, cohort=cohort),
    }


def rows() -> list[Row]:
    """Measure every workload, algorithm and number of processes."""
    torch.set_num_threads(1)
    found: list[Row] = []
    for work in (MLP_MNIST, CNN_CIFAR):
        data = RandomData(work)
        bare = Bare(work, data)
        for processes in (1, 2):
            found += measure(work, data, bare, processes)
    return found


def measure(work: Workload, data: RandomData, bare: Bare, processes: int) -> list[Row]:
    """Time the bare loop and every algorithm in turns, with ``processes`` processes that train."""
    methods = algorithms(work)
    bare_s: list[float] = []
    raafl_s: dict[str, list[float]] = {name: [] for name in methods}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(REPEATS + 1):
            gc.collect()
            bare_seconds = bare.run() if processes == 1 else bare.run_in(processes)
            bare_s += [bare_seconds] * bool(repeat)  # the first repeat is the warm-up
            for name, algorithm in methods.items():
                gc.collect()
                seconds = raafl_seconds(work, data, algorithm, processes, Path(folder) / f"{name}{repeat}")
                raafl_s[name] += [seconds] * bool(repeat)
    bare_per_s = work.trainings / statistics.median(bare_s)
    found = []
    for name, seconds in raafl_s.items():
        found.append(
            {
                "workload": work.name,
                "algorithm": name,
                "processes": processes,
                "per_s": work.trainings / statistics.median(seconds),
                "bare_per_s": bare_per_s,
                "ratio": statistics.median(bare / ours for bare, ours in zip(bare_s, seconds, strict=True)),
            }
        )
    return found


if __name__ == "__main__":
    main("overhead", rows)
