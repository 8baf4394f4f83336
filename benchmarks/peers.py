"""The same synchronous runs in another simulator beside raafl's, in one process: client trainings per CPU second and ratios.

Peers are no dependency of raafl and this is no part of `make bench`: what to install, and what came of it, is in
benchmarks/peers.md. The workloads are those of `benchmarks.cohorts` with FedAvg: the same samples for each client, one epoch
of five batches of ten with SGD, a hundred clients drawn in each round, no evaluation. All on one thread, in turns; a row has
the least CPU seconds of that thread.

    python -m benchmarks.peers [--json] [--out FILE]
"""

from __future__ import annotations

import gc
import importlib
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.cohorts import LOGISTIC, SMALL, algorithms, run
from benchmarks.common import Row, main
from benchmarks.overhead import Bare, RandomData, Workload

REPEATS = 3


def pfl_seconds(work: Workload, data: RandomData) -> float:
    """Run FedAvg in Apple's pfl-research on its simulated backend; return the CPU seconds of the thread."""
    simulate, averaging, hyper, nets, datasets, federated, base = (
        importlib.import_module(f"pfl.{name}")
        for name in ("aggregate.simulate", "algorithm.federated_averaging", "hyperparam", "model.pytorch",
                     "data.dataset", "data.federated_dataset", "algorithm.base")
    )  # fmt: skip
    sampling = importlib.import_module("pfl.data.sampling")
    ops = importlib.import_module("pfl.internal.ops.selector")
    ops.set_framework_module(importlib.import_module("pfl.internal.ops.pytorch_ops"))

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = work.model()

        def loss(self, inputs: Any, targets: Any, is_eval: bool = False) -> Any:
            return torch.nn.functional.cross_entropy(self.inner(inputs), targets)

        def metrics(self, inputs: Any, targets: Any, is_eval: bool = False) -> Any:
            return {}

    x, y = data.samples.tensors

    def client(number: int) -> Any:
        rows = slice(number * work.samples, (number + 1) * work.samples)
        return datasets.Dataset((x[rows], y[rows]), user_id=str(number))

    sampler = sampling.get_user_sampler("random", list(range(work.clients)))
    clients = federated.FederatedDataset(client, sampler)
    net = Net()
    model = nets.PyTorchModel(
        net, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.5), torch.optim.SGD(net.parameters(), 1.0)
    )
    params = base.NNAlgorithmParams(work.rounds, 10**9, work.cohort, None)
    train = hyper.NNTrainHyperParams(local_batch_size=work.batch_size, local_num_epochs=1, local_learning_rate=0.005)
    backend = simulate.SimulatedBackend(training_data=clients, val_data=clients)
    begin = time.thread_time()
    averaging.FederatedAveraging().run(params, backend, model, train, None, callbacks=[])
    return time.thread_time() - begin


def measure(work: Workload) -> list[Row]:
    """Measure a workload in every way, in turns."""
    data, method = RandomData(work), algorithms(work.cohort)["fed_avg"]
    bare = Bare(work, data)
    ways: dict[str, Callable[[Path], float]] = {
        "bare loop": lambda folder: cpu_seconds(bare.run),
        "raafl, batch_clients 1": lambda folder: run(work, data, method, 1, folder)[0],
        "raafl, batch_clients auto": lambda folder: run(work, data, method, "auto", folder)[0],
        f"pfl {metadata.version('pfl')}": lambda folder: pfl_seconds(work, data),
    }
    least: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(REPEATS):
            for number, (way, seconds_of) in enumerate(ways.items()):
                gc.collect()
                seconds = seconds_of(Path(scratch) / f"{number}-{repeat}")
                least[way] = min(seconds, least.get(way, seconds))
    return [
        {"workload": work.name, "way": way, "per_s": work.trainings / seconds, "ratio": least["bare loop"] / seconds}
        for way, seconds in least.items()
    ]


def rows() -> list[Row]:
    """Measure each workload."""
    torch.set_num_threads(1)
    return [row for work in (SMALL, LOGISTIC) for row in measure(work)]


def cpu_seconds(function: Callable[[], object]) -> float:
    """Return the CPU seconds of this thread that a call takes."""
    begin = time.thread_time()
    function()
    return time.thread_time() - begin


if __name__ == "__main__":
    main("peers", rows)
