"""The acceptance on a GPU, `make gpu`: what nobody can show without one, in the order of value, in at most ten minutes.

Each step runs in a process of its own, with a limit; what one does ends no other. Steps that measure no time run beside each
other, before those that do. The report, build/gpu/report.json, is written after each. Nothing is fetched. Where there is no GPU,
each step is begun on the CPU in a size that shows only that it can.

    python -m benchmarks.gpu [--out FOLDER] [--only STEP ...] [--skip STEP ...] [--resume [REPORT]] [--seconds S]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.common import Row, report, table
from benchmarks.gpu_steps import ROOT, STEPS, Where, run

TOTAL_S = 570.0  # of the ten minutes, some are for starting and ending
GRACE_S = 5.0
BESIDE = 4  # steps at once, of those that measure no time
WHEELS = {
    "torch": "torch",
    "lightning": "lightning",
    "transformers": "transformers",
    "jsonargparse": "jsonargparse[signatures]",
    "docstring_parser": "jsonargparse[signatures]",
    "xxhash": "xxhash",
    "yaml": "pyyaml",
    "sklearn": "scikit-learn",
    "rich": "rich",
    "shtab": "shtab",
    "cryptography": "cryptography>=47",
    "psutil": "psutil",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
}
"""Modules that the steps need, and what brings them."""
TWO_NODES = "HEAD=ADDRESS NODES=2 RANKS_PER_NODE=9 launch/multi-node.sh CONFIG --clients 17 --fabric.accelerator cuda"


def begin(name: str, device: str, limit_s: float) -> Row:
    """Run a step in a process of its own and return its record.

    Args:
        name: name of the step.
        device: on which it runs.
        limit_s: seconds after which it is ended.
    """
    began = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu", "--step", name, "--device", device]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        words, _ = process.communicate(timeout=limit_s)
        record = json.loads(words)
    except ValueError:
        record = {"outcome": f"died with {process.returncode}", "rows": []}
    except subprocess.TimeoutExpired:
        record = {"outcome": f"not done within {limit_s:.0f} s", "rows": []}
    finally:
        _end(process)
    return {**record, "took_s": time.monotonic() - began}


def _end(process: subprocess.Popen[str]) -> None:
    """End a step with all that it has started; what has a group of its own, such as torchrun's ranks, hears of it by SIGTERM."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


def within(name: str, device: str) -> Row:
    """Run a step in this process and return its record; nothing that goes wrong in it leaves it."""
    with tempfile.TemporaryDirectory(prefix="raafl-gpu-") as folder:
        try:
            rows = STEPS[name].run(Where(device, Path(folder)))
        except BaseException as error:
            outcome = f"failed: {type(error).__name__}: {error}"[:3000]
            return {"outcome": outcome, "rows": [], "traceback": traceback.format_exc()}
    failed = device != "cpu" and any(row.get("met") is False for row in rows)
    return {"outcome": "missed" if failed else "ok", "rows": rows}


def accept(
    out: Path, names: Sequence[str], num_gpus: int, known: Mapping[str, Row] | None = None, total_s: float = TOTAL_S
) -> int:
    """Run steps, on the first GPU or in a dry run, write the report after each, and return the exit code.

    Args:
        out: folder of the report.
        names: names of the steps.
        num_gpus: number of GPUs of this machine; 0 = a dry run.
        known: rows of steps from an earlier report, which are not run again; None = none.
        total_s: seconds for all steps.
    """
    out.mkdir(parents=True, exist_ok=True)
    stop_s, records, head = time.monotonic() + total_s, dict[str, Row](), _head(num_gpus)

    def take(name: str) -> tuple[str, Row]:
        return name, _record(name, num_gpus, known or {}, stop_s)

    timed = [name for name in names if STEPS[name].timed]
    with ThreadPoolExecutor(BESIDE) as pool:
        at_once = pool.map if num_gpus else map  # a dry run is in this thread, which alone takes signals
        untimed = at_once(take, [name for name in names if name not in timed])
        for name, record in itertools.chain(untimed, map(take, timed)):
            what = (STEPS[name].run.__doc__ or "").strip()
            records[name] = {"step": name, "what": what, **record}
            print(f"[raafl] {name}: {record['outcome']}\n        {what}", flush=True)
            if num_gpus and record["rows"]:
                print(table(record["rows"]), flush=True)
            found = {**head, "rows": list(records.values()), "dry": not num_gpus}
            (out / "report.json").write_text(json.dumps(found, indent=2, default=str) + "\n")
    print(f"[raafl] {out / 'report.json'}")
    print(f"[raafl] with two nodes, on each of them: {TWO_NODES}")
    return int(any(row["outcome"].startswith(("failed", "missed", "died", "not done")) for row in records.values()))


def _record(name: str, num_gpus: int, known: Mapping[str, Row], stop_s: float) -> Row:
    """Run a step, where its machine and the time that is left allow it, or take what is known of it."""
    step, left_s = STEPS[name], stop_s - time.monotonic()
    if name in known:
        return {**known[name], "before": True}
    if not num_gpus:
        return within(name, "cpu")
    if num_gpus < step.num_gpus:
        return {"outcome": f"needs {step.num_gpus} GPUs", "rows": []}
    if left_s < 5:
        return {"outcome": "no time was left", "rows": []}
    return begin(name, "cuda:0", min(step.limit_s, left_s))


def _head(num_gpus: int) -> Row:
    """Describe hardware and versions; a process of its own asks a GPU, so that this one holds nothing of it."""
    if not num_gpus:
        return report([])
    try:
        script = "import json; from benchmarks.common import report; print(json.dumps(report([])))"
        return dict(json.loads(run([sys.executable, "-c", script]).splitlines()[-1]))
    except Exception as error:
        return {"hardware": str(error)}


def known_of(path: Path) -> dict[str, Row]:
    """Read what a report of a run on a GPU knows of its steps: those that came to an end."""
    told = json.loads(path.read_text()) if path.is_file() else {"rows": []}
    return {} if told.get("dry") else {row["step"]: row for row in told["rows"] if row["outcome"] in ("ok", "missed")}


def missing_wheels() -> str:
    """Say in a line what is not installed here, and how it is brought to a machine without network."""
    names = " ".join(
        dict.fromkeys(f"'{wheel}'" for module, wheel in WHEELS.items() if importlib.util.find_spec(module) is None)
    )
    if not names:
        return "all wheels are here"
    python, machine = platform.python_version_tuple(), platform.machine()
    return (
        f"missing: {names}; bring them in a folder, with `pip download --dest wheels --only-binary :all: --python-version "
        f"{python[0]}.{python[1]} --platform manylinux_2_28_{machine} {names}` elsewhere, and here `{sys.executable} -m pip "
        f"install --no-index --find-links wheels {names}`"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Read the options, say what is missing, and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="folder of report.json")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--skip", nargs="+", choices=STEPS, default=[], metavar="STEP", help="all but these")
    parser.add_argument(
        "--resume", nargs="?", type=Path, const=Path(), help="run what this report (default: OUT's) lacks"
    )
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="for all steps")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--device", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    for name, value in (("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1"), ("WANDB_MODE", "offline")):
        os.environ.setdefault(name, value)
    if options.step:
        told = os.dup(1)
        os.dup2(2, 1)  # what a step's own processes print is no part of its record
        record = within(options.step, options.device)
        with os.fdopen(told, "w") as out:
            print(json.dumps(record, default=str), file=out)
        return 0
    print(f"[raafl] {missing_wheels()}", flush=True)
    import torch

    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        print("[raafl] no GPU here: each step is only begun, on the CPU", flush=True)
    names = [name for name in options.only if name not in options.skip]
    before = options.out / "report.json" if options.resume == Path() else options.resume
    return accept(options.out, names, num_gpus, known_of(before) if before else None, options.seconds)


if __name__ == "__main__":
    sys.exit(main())
