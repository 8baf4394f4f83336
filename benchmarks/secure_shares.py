"""Measure how much of a sum of secure aggregation one client has, over the Dirichlet partitions of the shipped configs.

For each distinct (data, partition, number of clients) of configs/, over seeds: random groups of clients, and the largest share of
samples that one of a group has. A group of 2 stands for the smallest cell that may be opened with ``min_cover: 2``.
Real data sets are read where RAAFL_DATA names their folder; configs without their data are left out.

    python -m benchmarks.secure_shares [--json] [--out FILE]
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.common import Row, main
from raafl.config.experiment import Experiment
from raafl.config.parse import load_experiment
from raafl.data import Dirichlet
from raafl.errors import BadInput
from raafl.runtime.setup import load_data

SEEDS, DRAWS = 20, 500
SIZES = (2, 3, 5, 10)
BOUNDS = (0.8, 0.9, 0.95)


def settings() -> Iterator[tuple[str, Experiment, np.ndarray]]:
    """Yield each distinct setting of the shipped configs: name, a config that has it, and labels of its training set."""
    seen = set()
    for path in sorted(Path("configs").glob("*.yaml")):
        experiment = load_experiment(path)
        partition = experiment.partition
        if not isinstance(partition, Dirichlet):
            continue
        try:
            data = load_data(experiment)
        except (BadInput, OSError):
            continue
        labels = data.labels()
        name = f"{type(data.datamodule).__name__}, {experiment.clients} clients, alpha {partition.alpha:g}"
        name += ", capped" if partition.capped else ""
        if name not in seen:
            seen.add(name)
            yield name, experiment, labels


def rows() -> list[Row]:
    """Return a row for each setting and size of a group."""
    found = []
    for name, experiment, labels in settings():
        sizes = [
            np.array([len(part) for part in experiment.partition.split(labels, experiment.clients, seed, {})])
            for seed in range(SEEDS)
        ]
        rng = np.random.default_rng(0)
        for num in (size for size in SIZES if size <= experiment.clients):
            largest = np.concatenate([_largest(samples, num, rng) for samples in sizes])
            over = {f"over_{bound:g}": float(np.mean(largest > bound)) for bound in BOUNDS}
            found.append(
                {
                    "setting": name,
                    "group": num,
                    "median": float(np.median(largest)),
                    "most": float(largest.max()),
                    **over,
                }
            )
    return found


def _largest(samples: np.ndarray, num: int, rng: np.random.Generator) -> np.ndarray:
    groups = np.stack([samples[rng.choice(len(samples), num, replace=False)] for _ in range(DRAWS)])
    return groups.max(1) / groups.sum(1)


if __name__ == "__main__":
    main("secure_shares", rows)
