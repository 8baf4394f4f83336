"""Run FedAvg and FedAsync in FLGo, on its clock."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.workload import BATCH, LR, Workload, main

CONFIG = """
import torch
from torch.utils.data import TensorDataset
from benchmarks.peers.workload import WORKLOADS, Net, samples
work = WORKLOADS[{name!r}]
train_data = TensorDataset(*samples(work))
test_data = TensorDataset(*[tensor[:10] for tensor in samples(work)])
def get_model():
    return Net(work)
"""


def run(work: Workload, rounds: int, algorithm: str, more: dict[str, Any]) -> None:
    """Make a benchmark and a task of equal parts in the working directory, and run FLGo's module ``algorithm`` on it.

    `rounds`: versions of the model. `more`: further options of FLGo.
    """
    sys.argv = sys.argv[:1]  # FLGo parses its own options from there
    flgo = importlib.import_module("flgo")
    partition, logger, datasets = (
        importlib.import_module(f"flgo.{name}")
        for name in ("benchmark.partition", "experiment.logger", "benchmark.toolkits.cv.classification")
    )
    # torch 2.14 refuses a data set without this method, with an error of the same wording
    datasets.FromDatasetPipe.TaskDataset.__getitems__ = lambda self, rows: [self[row] for row in rows]
    Path("config.py").write_text(CONFIG.format(name=work.name))
    name = flgo.gen_benchmark_from_file("bench", "config.py", os.curdir, "cv", "classification")
    sys.path.insert(0, os.getcwd())
    benchmark = importlib.import_module(name)
    benchmark.visualize = lambda *_: None  # its picture of the classes takes minutes
    task = flgo.gen_task_by_(benchmark, partition.IIDPartitioner(num_clients=work.clients), "task")

    class Quiet(logger.BasicLogger):  # type: ignore[misc,name-defined]
        def log_once(self, *_: Any, **__: Any) -> None:
            """Evaluate nothing."""

    options = {
        "num_rounds": rounds,
        "num_epochs": 1,
        "batch_size": BATCH,
        "learning_rate": LR,
        "optimizer": "SGD",
        "proportion": work.cohort / work.clients,
        "sample": "uniform",
        "train_holdout": 0.0,
        "eval_interval": -1,
        "log_level": "ERROR",
        "no_log_console": True,
    }
    module = importlib.import_module(f"flgo.algorithm.{algorithm}")
    flgo.init(task, module, options | more, Logger=Quiet).run()


def sync(work: Workload, rounds: int) -> None:
    """Run rounds with uniformly drawn cohorts."""
    run(work, rounds, "fedavg", {})


def asynchronous(work: Workload, rounds: int) -> None:
    """Run FedAsync with uniform latencies, for as many versions as ``rounds`` cohorts have members."""
    run(work, rounds * work.cohort, "fedasync", {"responsiveness": "UNI-1-100"})


if __name__ == "__main__":
    main({"sync": sync, "async": asynchronous})
