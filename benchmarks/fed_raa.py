"""Simulated seconds to 93 % on MNIST: Fed-RAA against FedAvg and FedAsync (docs/results/fed-raa.md says how they were tuned).

Everything but what a row names is `configs/mnist-fed-raa.yaml`: model, data, clients, devices, learning rate, local
epochs. The time is the virtual clock's when the global model first reaches the target, measured at every version; null
where it was not reached. `ratio_to_fed_raa` is the row's time over that of Fed-RAA, as the search found it, with the same
seed, beta and learning rate. On standard error: each row as it comes.

    python -m benchmarks.fed_raa --json             the three methods, seeds 0, 1, 2, beta 0.3
    python -m benchmarks.fed_raa --full --json      also beta 0.9, Table 3, rescale, M, other learning rates, and
                                                    when the target is reached for good
    python -m benchmarks.fed_raa --search --json    the grid of time on MNIST, seeds 10, 11, 12
    python -m benchmarks.fed_raa --defaults --json  alpha and staleness on four unequal tasks, seed 10: what the defaults are from
    (--jobs N runs N simulations at a time; --out FILE saves the result)
"""

from __future__ import annotations

import argparse
import csv
import itertools
import multiprocessing as mp
import os
import shlex
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import Row, main

CONFIG = Path(__file__).parents[1] / "configs" / "mnist-fed-raa.yaml"
SEEDS = (0, 1, 2)
SEARCH_SEEDS = (10, 11, 12)
SEARCH_LIMIT_S = 75.0
SLACK = 1.25
FINALISTS = 6

Arguments = tuple[tuple[str, Any], ...]

UNEQUAL = (
    "--partition raafl.data.Dirichlet --partition.alpha 0.5 --train.num_epochs null --train.num_steps 20 "
    "--max_updates 300 --eval_every 50"
)
CIFAR = "--clients 20 --data.num_train 10000 --data.num_test 2000 --model.in_features 3072 --model.lr 0.01 "
TASKS = {
    "mnist": "--model.lr 0.02",
    "cifar10": "--data raafl.data.CIFAR10 --data.batch_size 64 " + CIFAR,
    "cifar100": "--data raafl.data.CIFAR100 --data.batch_size 64 --model.num_classes 100 " + CIFAR,
    "sst2": "--clients 20 --data raafl.data.SST2 --data.tokenizer words --data.vocab_size 5000 --data.num_train 10000 "
    "--data.batch_size 64 --model model_zoo.FastText --model.vocab_size 5000 --model.num_classes 2 --model.lr 0.2",
}
MIXES: tuple[Arguments, ...] = (
    (("alpha", 0.9), ("staleness", "constant")),
    (("alpha", 0.9), ("staleness", "polynomial"), ("staleness_a", 0.5)),
    (("alpha", 0.9), ("staleness", "polynomial"), ("staleness_a", 1.0)),
    (("alpha", 0.6), ("staleness", "polynomial"), ("staleness_a", 0.5)),
)
FOUND = {"fed_raa": {"staleness": "constant"}}
"""What the search found soonest on MNIST, where it is not the factory's default."""
PLAIN = {"staleness": "constant", "prox": 0.0}


@dataclass(frozen=True)
class Setting:
    """One run: what it changes in the config.

    Attributes:
        part: part of the report the row belongs to.
        algorithm: name of the factory.
        arguments: the factory's arguments that are not its defaults.
        seed: seed of the run.
        beta: share of clients of capability 1.
        lr: learning rate; None = the config's.
        limit_s: simulated seconds after which the run is given up; None = only the config's max_updates.
        through: go on to limit_s past the target, to see whether it lasts.
        options: further command-line options of `raafl simulate`, e.g. for a smaller run.
    """

    part: str
    algorithm: str
    arguments: Arguments = ()
    seed: int = 0
    beta: float = 0.3
    lr: float | None = None
    limit_s: float | None = None
    through: bool = False
    options: tuple[str, ...] = ()


def experiment_of(setting: Setting, config: Path = CONFIG) -> Any:
    """Build the experiment of a setting."""
    from raafl.config.parse import load_experiment

    options = ["--algorithm", setting.algorithm, "--seed", str(setting.seed), "--progress", "quiet"]
    for name, value in {**FOUND.get(setting.algorithm, {}), **dict(setting.arguments)}.items():
        options += [f"--algorithm.{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    if setting.lr is not None:
        options += ["--model.init_args.lr", str(setting.lr)]
    experiment: Any = load_experiment(config, *options, *setting.options)
    slow, fast = experiment.devices
    num_slow = round(setting.beta * experiment.clients)
    counts = ((slow, num_slow), (fast, experiment.clients - num_slow))
    experiment.devices = [replace(device, count=count) for device, count in counts if count]
    experiment.max_time = setting.limit_s
    return experiment


def run(setting: Setting, config: Path = CONFIG) -> Row:
    """Simulate a setting in this process; return its row, still without the ratio."""
    from raafl import simulate

    experiment = experiment_of(setting, config)
    target = experiment.targets()[0]
    if setting.through:
        experiment.target = None
    with tempfile.TemporaryDirectory() as folder:
        experiment.output = str(Path(folder) / "run")
        summary, path = simulate(experiment)
        history = read_metrics(path / "metrics.csv")
    reached = [(version, time_s) for version, time_s, metrics in history if target.met(metrics)]
    missed = [version for version, _, metrics in history if not target.met(metrics)]
    version, time_s = reached[0] if reached else (None, None)
    row: Row = {
        "part": setting.part,
        "algorithm": setting.algorithm,
        **dict(setting.arguments),
        "beta": setting.beta,
        "lr": setting.lr,
        "seed": setting.seed,
        "time_s": time_s,
        "versions": version,
        "given_up_s": None if reached else summary["time_s"],
        "accuracy": summary["final"].get(target.metric),
        "loss": summary["final"].get("loss"),
        "staleness_mean": summary["staleness"]["mean"],
        "wall_s": summary["wall_s"],
    }
    if setting.through:
        row["lasting_s"] = min((at for version, at in reached if version > max(missed)), default=None)
    return row


def read_metrics(path: Path) -> list[tuple[int, float, dict[str, float]]]:
    """Return (version, time in s, metrics) of each row of a run's metrics.csv."""
    with path.open(newline="") as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [(int(row.pop("version")), row.pop("time_s"), row) for row in rows]


def run_all(settings: Sequence[Setting], jobs: int = 1, config: Path = CONFIG) -> list[Row]:
    """Run all settings, ``jobs`` at a time, and report each result on standard error."""
    rows: list[Row] = []
    with ProcessPoolExecutor(jobs, mp_context=mp.get_context("spawn")) as pool:
        for row in pool.map(run, settings, itertools.repeat(config)):
            rows.append(row)
            print(f"{len(rows)}/{len(settings)}  " + "  ".join(f"{k}={v}" for k, v in row.items()), file=sys.stderr)
    return rows


def with_ratios(rows: Iterable[Row]) -> list[Row]:
    """Add ``ratio_to_fed_raa`` to every row."""
    rows = list(rows)
    base = {
        (row["beta"], row["lr"], row["seed"]): row["time_s"]
        for row in rows
        if row["part"] in ("comparison", "learning rate") and row["algorithm"] == "fed_raa"
    }
    for row in rows:
        own, fed_raa = row["time_s"], base.get((row["beta"], row["lr"], row["seed"]))
        row["ratio_to_fed_raa"] = own / fed_raa if own and fed_raa else None
    return rows


METHODS = ("fed_raa", "fed_avg", "fed_async")
ABLATIONS: tuple[tuple[str, Arguments], ...] = (
    ("table 3", (("select", "random"),)),
    ("table 3", (("select", "fewest_updates"),)),
    ("table 3", (("trigger", "all"),)),
    ("table 3", (("trigger", "all"), ("alpha", 1.0))),
    ("rescale", (("rescale", False),)),
    ("fragments", (("fragments", 2),)),
    ("fragments", (("fragments", 4),)),
    ("fragments", (("fragments", 5),)),
)
LASTING_S = {"fed_raa": 40.0, "fed_avg": 300.0, "fed_async": 120.0}


def comparison(seeds: Sequence[int] = SEEDS, beta: float = 0.3, options: tuple[str, ...] = ()) -> list[Setting]:
    """List the settings of the three methods with their defaults, for each seed; ``options``: further command-line options."""
    return [Setting("comparison", name, seed=s, beta=beta, options=options) for name in METHODS for s in seeds]


def full(seeds: Sequence[int] = SEEDS) -> list[Setting]:
    """List the comparison with beta 0.9, the rows of Table 3, other numbers of fragments, and other learning rates."""
    settings = [*comparison(seeds), *comparison(seeds, beta=0.9)]
    for beta, (part, arguments), seed in itertools.product((0.3, 0.9), ABLATIONS, seeds):
        settings.append(Setting(part, "fed_raa", arguments, seed, beta))
    for lr, seed in itertools.product((0.01, 0.02, 0.05, 0.1), seeds):
        settings += [Setting("learning rate", name, seed=seed, lr=lr) for name in METHODS]
        settings.append(Setting("learning rate, no rescale", "fed_raa", (("rescale", False),), seed, lr=lr))
    for (name, limit_s), seed in itertools.product(LASTING_S.items(), seeds):
        settings.append(Setting("lasting", name, seed=seed, limit_s=limit_s, through=True))
    return settings


def grid() -> dict[str, list[Arguments]]:
    """List the combinations that are tried for each method with settings to tune: 36 each."""
    shared = [
        (("staleness", kind), ("prox", prox))
        for kind, prox in itertools.product(("constant", "polynomial", "hinge"), (0.0, 0.1))
    ]
    return {
        "fed_raa": [
            (("alpha", alpha), *rest, ("rescale", rescale))
            for rescale, alpha, rest in itertools.product((True, False), (0.3, 0.6, 0.9), shared)
        ],
        "fed_async": [
            (("alpha", alpha), *rest) for alpha, rest in itertools.product((0.15, 0.3, 0.45, 0.6, 0.75, 0.9), shared)
        ],
    }


def search(jobs: int = 1, seeds: Sequence[int] = SEARCH_SEEDS, config: Path = CONFIG) -> list[Row]:
    """Search the grid; return its combinations, best mean time first.

    With the first seed: first the plain combinations (constant staleness, no prox), then all others, each given up once
    it is a quarter slower than its method's best plain one. Then the best six of each method run with the other seeds.
    """
    tried = {
        name: [Setting("search", name, combination, seeds[0], limit_s=SEARCH_LIMIT_S) for combination in combinations]
        for name, combinations in grid().items()
    }
    plain = [s for settings in tried.values() for s in settings if dict(s.arguments).items() >= PLAIN.items()]
    found = dict(zip(plain, run_all(plain, jobs, config), strict=True))
    others = []
    for name, settings in tried.items():
        best_s = min(_rank([found[s]])[0] for s in plain if s.algorithm == name)
        others += [replace(s, limit_s=SLACK * best_s) for s in settings if s not in found]
    found |= dict(zip(others, run_all(others, jobs, config), strict=True))
    again: list[Setting] = []
    for name in tried:
        best = sorted((s for s in found if s.algorithm == name), key=lambda s: _rank([found[s]]))[:FINALISTS]
        again += [replace(s, seed=seed, limit_s=SEARCH_LIMIT_S) for s in best for seed in seeds[1:]]
    found |= dict(zip(again, run_all(again, jobs, config), strict=True))
    return _summary(found)


def defaults(seeds: Sequence[int] = SEARCH_SEEDS[:1], tasks: Iterable[str] = TASKS) -> list[Setting]:
    """Run each way of mixing on each task for 300 updates, with unequal data, whether or not the target is reached."""
    return [
        Setting(task, "fed_raa", mix, seed, through=True, options=tuple(shlex.split(f"{TASKS[task]} {UNEQUAL}")))
        for seed, task, mix in itertools.product(seeds, tasks, MIXES)
    ]


def _summary(found: dict[Setting, Row]) -> list[Row]:
    """Return one row for each combination: times by seed and their mean, sorted by number of seeds, then by mean."""
    groups: dict[tuple[str, Arguments], list[Row]] = {}
    for setting, row in found.items():
        groups.setdefault((setting.algorithm, setting.arguments), []).append(row)
    rows = []
    for name, arguments in sorted(groups, key=lambda g: (g[0], -len(groups[g]), _rank(groups[g]))):
        group = groups[name, arguments]
        times = [row["time_s"] for row in group]
        means = (None, None) if None in times else _rank(group)
        row = {"algorithm": name, **dict(arguments), "mean_time_s": means[0], "mean_versions": means[1]}
        rows.append({**row, "times_s": times, "given_up_s": [row["given_up_s"] for row in group]})
    return rows


def _rank(rows: Sequence[Row]) -> tuple[float, float]:
    """Return a sort key: mean time, then mean number of versions; a run that missed the target counts as twice the limit."""
    times = [row["time_s"] if row["time_s"] is not None else 2 * SEARCH_LIMIT_S for row in rows]
    versions = [row["versions"] if row["versions"] is not None else 10_000 for row in rows]
    return sum(times) / len(rows), sum(versions) / len(rows)


def cli(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--defaults", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    options, rest = parser.parse_known_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    def rows() -> list[Row]:
        if options.search:
            return search(options.jobs)
        if options.defaults:
            return run_all(defaults(), options.jobs)
        return with_ratios(run_all(full() if options.full else comparison(), options.jobs))

    main("fed_raa", rows, rest)


if __name__ == "__main__":
    cli()
