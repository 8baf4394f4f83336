"""Final accuracy of Fed-RAA by alpha and form of staleness, on four tasks with unequal data: what its defaults are from.

Everything but what a row names is `configs/mnist-fed-raa.yaml`. On standard error: each row as it comes.

    python -m benchmarks.fed_raa --json             seeds 10, 11, 12   (docs/results/fed-raa.md)
    (--jobs N runs N simulations at a time; --out FILE saves the result)
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing as mp
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean

from benchmarks.common import Row, main

CONFIG = Path(__file__).parents[1] / "configs" / "mnist-fed-raa.yaml"
SEEDS = (10, 11, 12)
UNEQUAL = (
    "--partition raafl.data.Dirichlet --partition.alpha 0.5 --train.num_epochs null --train.num_steps 20 "
    "--max_updates 300 --target null --eval_every 50 --progress quiet"
)
CIFAR = "--clients 20 --data.num_train 10000 --data.num_test 2000 --model.in_features 3072 --model.lr 0.01"
TASKS = {
    "mnist": "--model.lr 0.02",
    "cifar10": f"--data raafl.data.CIFAR10 --data.batch_size 64 {CIFAR}",
    "cifar100": f"--data raafl.data.CIFAR100 --data.batch_size 64 --model.num_classes 100 {CIFAR}",
    "sst2": "--clients 20 --data raafl.data.SST2 --data.tokenizer words --data.vocab_size 5000 --data.num_train 10000 "
    "--data.batch_size 64 --model model_zoo.FastText --model.vocab_size 5000 --model.num_classes 2 --model.lr 0.2",
}
MIXES = (
    {"alpha": 0.9, "staleness": "constant"},
    {"alpha": 0.9, "staleness": "polynomial", "staleness_a": 0.5},
    {"alpha": 0.9, "staleness": "polynomial", "staleness_a": 1.0},
    {"alpha": 0.6, "staleness": "polynomial", "staleness_a": 0.5},
)

Setting = tuple[int, str]
"""Index of a mix, and name of a task."""


def run(setting: Setting) -> Row:
    """Simulate 300 updates of a setting with each seed in this process; return its row, with the mean accuracy."""
    from raafl import simulate
    from raafl.config.parse import load_experiment

    mix, task = MIXES[setting[0]], setting[1]
    given = [word for name, value in mix.items() for word in (f"--algorithm.{name}", str(value))]
    found = []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            options = shlex.split(f"{TASKS[task]} {UNEQUAL} --seed {seed} --output {folder}/run")
            summary, _ = simulate(load_experiment(CONFIG, *options, *given))
            found.append(summary["final"]["accuracy"])
    return {"task": task, **mix, "accuracy": fmean(found), "seeds": dict(zip(SEEDS, found, strict=True))}


def run_all(settings: Sequence[Setting], jobs: int = 1) -> list[Row]:
    """Run all settings, ``jobs`` at a time, and report each result on standard error."""
    rows: list[Row] = []
    with ProcessPoolExecutor(jobs, mp_context=mp.get_context("spawn")) as pool:
        for row in pool.map(run, settings):
            rows.append(row)
            print(f"{len(rows)}/{len(settings)}  " + "  ".join(f"{k}={v}" for k, v in row.items()), file=sys.stderr)
    return rows


def cli(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--jobs", type=int, default=1)
    options, rest = parser.parse_known_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main("fed_raa", lambda: run_all([*itertools.product(range(len(MIXES)), TASKS)], options.jobs), rest)


if __name__ == "__main__":
    cli()
