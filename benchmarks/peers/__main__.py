"""Measure the CPU seconds of a client training in each simulator, each run in a process of the peer's own environment.

A row is two runs that differ in their number of rounds alone: the seconds of all their processes, those of what they started
included, are counted, and the difference belongs to the further trainings. What is left is `start_s`. So imports, set-up and
agents are no part of `ms`, and Ray's daemons are.

    RAAFL_PEERS=FOLDER python -m benchmarks.peers [--json] [--out FILE]

FOLDER has an environment for each peer, see README.md. Peers without one are left out. The further trainings take `LEAST_S`
or more, since imports alone differ by some 0.3 s between two runs. `repeat` is how often each of the two was run; the one
that took least counts.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import Row, main
from benchmarks.peers.workload import WORKLOADS, Workload

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 600.0
LEAST_S, MOST_TIMES = 5.0, 20
"""CPU seconds that the further trainings of a long run take, unless it would have more than 20 times the rounds."""
REPEATS = int(os.environ.get("RAAFL_PEERS_REPEATS", "1"))


@dataclass(frozen=True)
class Way:
    """One way to run a workload.

    `peer`: the module `with_PEER`, and the peer's environment. `package`: distribution whose version is reported.
    `way`: argument of the module. `label`: name in the table.
    """

    peer: str
    package: str
    way: str
    label: str

    @property
    def kind(self) -> str:
        """Whether the way is synchronous or asynchronous: sync or async."""
        return "async" if self.way.startswith("async") else "sync"


WAYS = (
    Way("raafl", "torch", "bare", "bare loop of PyTorch"),
    Way("raafl", "raafl", "sync", "raafl, one by one"),
    Way("raafl", "raafl", "sync, in batches", "raafl"),
    Way("pfl", "pfl", "sync", "pfl-research"),
    Way("fluke", "fluke-fl", "sync", "fluke"),
    Way("blazefl", "blazefl", "sync", "BlazeFL"),
    Way("flgo", "flgo", "sync", "FLGo"),
    Way("flower", "flwr", "sync", "Flower, one Ray actor"),
    Way("appfl", "appfl", "sync", "APPFL, optimize_memory false"),
    Way("raafl", "raafl", "async", "raafl, one by one"),
    Way("raafl", "raafl", "async, in batches", "raafl"),
    Way("flgo", "flgo", "async", "FLGo"),
    Way("appfl", "appfl", "async", "APPFL, optimize_memory false"),
)


def cpu_seconds(command: Sequence[str | Path], folder: Path, limit_s: float = LIMIT_S) -> tuple[float, str]:
    """Run a command and all processes that it starts to their end; return their CPU seconds and its output.

    `folder`: working directory. Raises `subprocess.TimeoutExpired` after ``limit_s`` seconds, and RuntimeError with the
    end of the output if the command fails.
    """
    seconds = folder / "cpu-seconds"
    settings = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "WANDB_MODE": "offline",
        "TQDM_DISABLE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "FLWR_TELEMETRY_ENABLED": "0",
    }
    counted = [sys.executable, "-m", "benchmarks.peers.counted", seconds, *command]
    with subprocess.Popen(
        counted,
        cwd=folder,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {process.returncode}: {errors[-2000:]}")
    return float(seconds.read_text()), printed


def interpreter(peer: str) -> Path | None:
    """Return the Python of a peer's environment; None if it is not installed."""
    if peer == "raafl":
        return Path(sys.executable)
    path = Path(os.environ.get("RAAFL_PEERS", "peers")).resolve() / peer / "bin" / "python"
    return path if path.exists() else None


def measure(work: Workload, one: Way, python: Path) -> Row:
    """Measure the CPU time of a client's training: the difference of a short and a long run, each the least of `REPEATS`."""

    def run(rounds: int) -> tuple[float, int]:
        with tempfile.TemporaryDirectory() as folder:
            command = [python, "-m", f"benchmarks.peers.with_{one.peer}", one.way, work.name, str(rounds)]
            seconds, printed = cpu_seconds(command, Path(folder))
        return seconds, json.loads(printed.splitlines()[-1])["trainings"]

    few_rounds, many_rounds = work.rounds
    short, long = run(few_rounds), run(many_rounds)
    further_s = max(long[0] - short[0], LEAST_S / MOST_TIMES)
    if further_s < LEAST_S:
        many_rounds = few_rounds + (many_rounds - few_rounds) * math.ceil(LEAST_S / further_s)
        long = run(many_rounds)
    for _ in range(REPEATS - 1):
        short, long = min(short, run(few_rounds)), min(long, run(many_rounds))
    (short_s, few), (long_s, many) = short, long
    each = (long_s - short_s) / (many - few)
    start_s, trainings = short_s - each * few, many - few
    return {
        "workload": work.name,
        "kind": one.kind,
        "simulator": one.label,
        "version": _version(python, one.package),
        "ms": 1e3 * each,
        "per_s": 1 / each,
        "start_s": start_s,
        "trainings": trainings,
        "repeat": REPEATS,
    }


def _version(python: Path, package: str) -> str:
    asked = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()


def rows() -> list[Row]:
    """Measure every installed peer beside raafl; peers that fail are left out."""
    found = []
    for work, one in itertools.product(WORKLOADS.values(), WAYS):
        python = interpreter(one.peer)
        if python is None:
            continue
        try:
            found.append(measure(work, one, python))
            print(found[-1], file=sys.stderr, flush=True)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{work.name}, {one.label}: left out: {error}", file=sys.stderr, flush=True)
    ours = {(row["workload"], row["kind"]): row["ms"] for row in found if row["simulator"] == "raafl"}
    return [row | {"over_raafl": row["ms"] / ours[row["workload"], row["kind"]]} for row in found]


if __name__ == "__main__":
    main("peers", rows)
