"""Compare a simulated run over ranks (`torchrun ... -m raafl simulate`) with one process: trainings per second.

Each case is the same run with the same seed in one process, by forked workers and over ranks, one after the other, each on
one thread a process; it is repeated, and a row has the median. `ratio` is trainings per second over those of one process; `equal`
is whether the model's digest is that of one process. Seconds are the run's own, from its first to its last event: what
processes need to start is not in it, the evaluation of the last model is. `serial` is the share of the work of one process
that more of them do not divide (Amdahl's law, from the ratio; where there are as many cores), `of_eight` the ratio that eight
would have with it. `bytes_per_task` are as predicted.

The ViT mini's four clients are of four sizes, and the largest's tasks wait for each other: what is out at a time limits them,
not the number of processes.

What was measured is kept in build/bench until all rows are there: a benchmark that was cut off goes on where it was.

    python -m benchmarks.scaling [--json] [--out FILE]
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import Row, main

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "build" / "bench" / "scaling-runs.json"
REPEATS = 3


@dataclass(frozen=True)
class Case:
    """A workload: a config with options, and the number of trainings."""

    name: str
    options: str
    updates: int


CASES = (
    Case("CNN, CIFAR-10", "--config configs/cifar10-cnn.yaml", 30),
    Case(
        "ViT micro, CIFAR-10",
        "--config configs/cifar10-vit.yaml --model.size micro --algorithm fed_async --clients 16 "
        "--devices '[{name: laptop, flops_per_s: 1.0e+11, count: 16}]'",
        80,
    ),
    Case("ViT mini, CIFAR-10, 4 clients", "--config configs/cifar10-vit.yaml", 20),
    Case("MLP, digits", "--config configs/quickstart.yaml", 400),
    Case(
        "MLP, digits, 100 clients as one",
        "--config configs/quickstart.yaml --algorithm fed_buff --algorithm.buffer_size 10 --clients 100 "
        "--devices '[{name: laptop, flops_per_s: 1.0e+11, count: 100}]' --batch_clients auto",
        4000,
    ),
)
WAYS = (("one process", 1), ("workers", 2), ("ranks", 2), ("ranks", 4))


def run(case: Case, way: str, num: int) -> Row:
    """Run a case by workers or over ranks (``way``), in ``num`` processes; return the summary."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(num), "-m"] if way == "ranks" else []
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            *torchrun,
            "raafl",
            "simulate",
            *shlex.split(case.options),
            "--max_updates",
            str(case.updates),
            "--eval_every",
            str(case.updates),
            "--output",
            f"{folder}/run",
            "--json",
            "--progress",
            "quiet",
            "--workers",
            str(num if way == "workers" else 1),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True, timeout=3600)
    summary: Row = json.loads(done.stdout)
    return summary


def once(key: str, case: Case, way: str, num: int) -> Row:
    """Run a case, unless an earlier start of this benchmark has stored the result under ``key``."""
    known: Row = json.loads(RUNS.read_text()) if RUNS.exists() else {}
    if key not in known:
        summary = run(case, way, num)
        known[key] = {name: summary[name] for name in ("wall_s", "model_digest", "bytes_up", "bytes_down")}
        RUNS.parent.mkdir(parents=True, exist_ok=True)
        RUNS.write_text(json.dumps(known))
    found: Row = known[key]
    return found


def rows() -> list[Row]:
    """Measure each case in each way; return the rows."""
    found = []
    for case in CASES:
        taken: dict[tuple[str, int], list[Row]] = {way: [] for way in WAYS}
        for repeat in range(REPEATS):  # in turns, so that other programs disturb all ways alike
            for way, num in WAYS:
                key = f"{case.name}/{case.updates}/{way}/{num}/{repeat}"
                taken[way, num].append(once(key, case, way, num))
        per_s = {key: statistics.median(case.updates / one["wall_s"] for one in all) for key, all in taken.items()}
        (digest,) = {one["model_digest"] for one in taken["one process", 1]}
        for (way, num), summaries in taken.items():
            ratio = per_s[way, num] / per_s["one process", 1]
            # with more processes than cores, the ratio says nothing about the undivided work
            divided = 1 < num <= (os.cpu_count() or 1)
            serial = min(max((num / ratio - 1) / (num - 1), 0.0), 1.0) if divided else None
            found.append(
                {
                    "workload": case.name,
                    "way": way,
                    "processes": num,
                    "per_s": per_s[way, num],
                    "ratio": ratio,
                    "serial": serial,
                    "of_eight": None if serial is None else 8 / (1 + 7 * serial),
                    "bytes_per_task": (summaries[0]["bytes_up"] + summaries[0]["bytes_down"]) / case.updates,
                    "equal": all(one["model_digest"] == digest for one in summaries),
                }
            )
            print(found[-1], file=sys.stderr, flush=True)
    RUNS.unlink(missing_ok=True)
    return found


if __name__ == "__main__":
    main("scaling", rows)
