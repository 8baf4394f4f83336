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

`engines` measures what each engine costs, which a busy machine disturbs less than speeds: CPU seconds of the command with all
processes below it, for its start (a run of two updates) and for each further training, and the most memory that they have at
once (proportional set size, in which what processes share counts once).

    python -m benchmarks.scaling [--json] [--out FILE]
    python -m benchmarks.scaling engines --out FILE        the costs of engines alone; the file keeps its other rows
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import Row, main, replace_rows

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


def command(case: Case, way: str, num: int, output: str, updates: int) -> list[str]:
    """Return the command that runs a case in one way: by one process, workers, ranks or ray, with ``num`` that train."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(num), "-m"] if way == "ranks" else []
    words = [sys.executable, "-m", *torchrun, "raafl", "simulate", *shlex.split(case.options)]
    words += ["--max_updates", str(updates), "--eval_every", str(updates), "--output", output]
    words += ["--json", "--progress", "quiet", "--workers", str(num if way in ("workers", "ray") else 1)]
    return words + (["--engine", "ray"] if way == "ray" else [])


def run(case: Case, way: str, num: int) -> Row:
    """Run a case in one way, and return the summary."""
    with tempfile.TemporaryDirectory() as folder:
        words = command(case, way, num, f"{folder}/run", case.updates)
        done = subprocess.run(words, cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, check=True, timeout=3600)
    summary: Row = json.loads(done.stdout)
    return summary


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


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


@dataclass
class Tree:
    """CPU seconds and memory of a process and all below it, looked at four times a second."""

    root: int
    cpu_s: dict[tuple[int, str], float] = field(default_factory=dict)  # by process and the moment of its start
    peak_bytes: int = 0

    def look(self) -> None:
        """Add what there is now."""
        stats: dict[int, list[str]] = {}
        for file in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                stats[int(file.parent.name)] = file.read_text().rpartition(")")[2].split()
        below, added = {self.root}, True
        while added:
            more = {pid for pid, stat in stats.items() if int(stat[1]) in below} - below
            below, added = below | more, bool(more)
        memory = 0
        for pid in below & stats.keys():
            stat = stats[pid]
            self.cpu_s[pid, stat[19]] = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                memory += next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
        self.peak_bytes = max(self.peak_bytes, memory)


def cost(words: Sequence[str]) -> tuple[float, int, float, str]:
    """Run a command; return CPU seconds and most bytes of it and all below it, its seconds, and what it printed."""
    began, ended = time.perf_counter(), threading.Event()
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(words, cwd=ROOT, env=_environment(), stdout=printed)
        tree = Tree(process.pid)

        def watch() -> None:
            while not ended.wait(0.25):
                tree.look()

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            code = process.wait(timeout=600)
        finally:
            ended.set()
            watcher.join()
            process.kill()
        if code:
            raise RuntimeError(f"{shlex.join(words)} failed with {code}")
        printed.seek(0)
        return sum(tree.cpu_s.values()), tree.peak_bytes, time.perf_counter() - began, printed.read()


ENGINES = (
    ("one process", 1),
    *((way, 2) for way in ("workers", "ranks", "ray")),
    *((way, 4) for way in ("workers", "ranks", "ray")),
)


def engine_row(case: Case, way: str, num: int) -> Row:
    """Measure what an engine costs for a model: its start by a run of two updates, and a training by what more of them cost."""
    with tempfile.TemporaryDirectory() as folder:
        start_cpu_s, _, start_s, _ = cost(command(case, way, num, f"{folder}/first", 2))
        cpu_s, peak_bytes, _, printed = cost(command(case, way, num, f"{folder}/run", case.updates))
    summary = json.loads(printed)
    return {
        "workload": case.name,
        "way": way,
        "processes": num,
        "start_cpu_s": start_cpu_s,
        "start_s": start_s,
        "cpu_ms_per_task": 1e3 * (cpu_s - start_cpu_s) / (case.updates - 2),
        "peak_bytes": peak_bytes,
        "digest": summary["model_digest"],
        "load": os.getloadavg()[0],
    }


def engines(file: Path) -> None:
    """Measure what each engine costs; each row is written to ``file`` as it is there, and not measured again."""
    large = Case(CASES[0].name, CASES[0].options, 40)
    small = Case(CASES[3].name, CASES[3].options, 2000)
    cells = [(small, way, num) for way, num in ENGINES]
    cells += [(large, way, num) for way, num in ENGINES if num < 4]
    found = [row for row in json.loads(file.read_text())["rows"] if row.get("part") == "engines"]
    done = {(row["workload"], row["way"], row["processes"]) for row in found}
    for case, way, num in cells:
        if (case.name, way, num) not in done:
            found.append(engine_row(case, way, num))
            replace_rows(file, "engines", found)


if __name__ == "__main__":
    if sys.argv[1:3] == ["engines", "--out"]:
        engines(Path(sys.argv[3]))
    else:
        main("scaling", rows)
