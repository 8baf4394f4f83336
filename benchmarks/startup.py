"""Measure the start of a run of real ranks: seconds from the command to the first training, and to the first update.

`torchrun` starts one aggregator and four clients on this machine with the quick start's config, as `make demo` does. The
times are those at which the run's journal shows that every client has joined, that the first assignment went out (the
first client trains from then on), and that the first update is there (the config's emulated devices take their time for
it). One more start, with Python's import log on, shows what the ranks imported: how many modules, how many seconds of
imports, and which packages that training an MLP has no use for.

    python -m benchmarks.startup [--json] [--out FILE]
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common import Row, main

ROOT = Path(__file__).resolve().parent.parent
UNNEEDED = ("transformers", "datasets", "wandb", "torchvision", "sklearn", "pandas", "scipy", "matplotlib", "sympy")
_OUTPUT = "output.txt"
_IMPORT = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \| ( *)(\S+)")


def rows(ranks: int = 5, repeats: int = 5, options: Sequence[str] = (), timeout_s: float = 120.0) -> list[Row]:
    """Start the run ``repeats`` times; return one row.

    `ranks`: one aggregator and its clients. `options`: further options of `raafl fit`. `timeout_s`: limit in seconds
    for each start.
    """
    timed = [_times(ranks, options, timeout_s) for _ in range(repeats)]
    row: Row = {"ranks": ranks, "repeats": repeats}
    for name in ("joined_s", "training_s", "first_update_s"):
        row[name] = statistics.median(times[name] for times in timed)
    row["training_s_max"] = max(times["training_s"] for times in timed)
    logs = _imports(ranks, options, timeout_s)
    for who, log in zip(("aggregator", "client"), logs, strict=False):
        row[f"{who}_modules"], row[f"{who}_import_s"] = log.num_modules, log.seconds
        row[f"{who}_unneeded"] = log.found(UNNEEDED)
    return [row]


def _command(ranks: int, output: Path, options: Sequence[str], torchrun: Sequence[str] = ()) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        *torchrun,
        "-m",
        "raafl",
        "fit",
        "--config",
        "configs/quickstart.yaml",
        "--clients",
        str(ranks - 1),
        "--max_updates",
        "8",
        "--output",
        str(output),
        "--progress",
        "quiet",
        *options,
    ]


@contextlib.contextmanager
def _started(
    command: Sequence[str], folder: Path, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command within the block, in a process group that is killed at its end; the output goes to a file."""
    with (folder / _OUTPUT).open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _times(ranks: int, options: Sequence[str], timeout_s: float) -> dict[str, float]:
    """Start a run once and read its journal; return the seconds since the command."""
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name), time.perf_counter()
        with _started(_command(ranks, folder / "run", options), folder) as process:
            times = _watch(folder, ranks - 1, began, timeout_s, process)
            _end(process, folder, timeout_s)
    return times


def _watch(
    folder: Path, clients: int, began: float, timeout_s: float, process: subprocess.Popen[bytes]
) -> dict[str, float]:
    journal = folder / "run" / "events.jsonl"
    times: dict[str, float] = {}
    joined = read = 0
    while "first_update_s" not in times:
        if process.poll() is not None:
            raise RuntimeError(f"the run ended too early:\n{_output(folder)}")
        if time.perf_counter() - began > timeout_s:
            raise TimeoutError(f"no update after {timeout_s:g} s; so far {times}")
        time.sleep(0.005)
        lines = journal.read_text().split("\n")[:-1] if journal.exists() else []
        now = time.perf_counter() - began
        for line in lines[read:]:
            event = json.loads(line)["event"]
            joined += event == "joined"
            if joined == clients:
                times.setdefault("joined_s", now)
            if event in ("assigned", "arrived"):
                times.setdefault({"assigned": "training_s", "arrived": "first_update_s"}[event], now)
        read = len(lines)
    return times


def _end(process: subprocess.Popen[bytes], folder: Path, timeout_s: float) -> None:
    if process.wait(timeout_s):
        raise RuntimeError(f"the run failed with exit code {process.returncode}:\n{_output(folder)}")


def _output(folder: Path) -> str:
    return (folder / _OUTPUT).read_text(errors="replace")[-4000:]


class _Imports:
    """Imports of one process, as `python -X importtime` reports them."""

    def __init__(self, log: Path) -> None:
        matches = [m for line in log.read_text(errors="replace").splitlines() if (m := _IMPORT.match(line))]
        self.names = [m[4] for m in matches]
        self.num_modules = len(matches)
        self.seconds = sum(int(m[1]) for m in matches) / 1e6

    def found(self, packages: Sequence[str]) -> list[str]:
        """Return those of ``packages`` that the process has imported."""
        return sorted({name.partition(".")[0] for name in self.names} & set(packages))


def _imports(ranks: int, options: Sequence[str], timeout_s: float) -> list[_Imports]:
    """Return the imports of rank 0 and rank 1."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = _command(ranks, folder / "run", options, ("--redirects", "3", "--log-dir", f"{folder}/logs"))
        with _started(command, folder, {"PYTHONPROFILEIMPORTTIME": "1"}) as process:
            _end(process, folder, timeout_s)
        return [_Imports(next((folder / "logs").glob(f"**/attempt_0/{rank}/stderr.log"))) for rank in (0, 1)]


if __name__ == "__main__":
    main("startup", rows)
