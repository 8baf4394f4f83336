"""The acceptance on a GPU, `make gpu`: what nobody can show without one, in the order of value, by commands of ten minutes.

Each step runs in a process of its own, with a limit; what one does ends no other. Steps that measure no time run beside each
other, before those that do. The report, build/gpu/report.json, is written after each. A step that consists of rows writes each
as it comes: a row that fails is a row with its error, one in which the process dies too, and `--resume` runs the others. All
steps take some 25 minutes: `make gpu`, then twice `make gpu ARGS=--resume`. Nothing is fetched. Where there is no GPU, each step
is begun on the CPU in a size that shows only that it can.

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
from typing import cast

from benchmarks.common import Row, report, table
from benchmarks.gpu_steps import ROOT, STEPS, Cases, Where, run

TOTAL_S = 570.0  # the rest of ten minutes is for starting and ending
GRACE_S = 5.0
ENDED = ("ok", "missed")
"""Outcomes of steps that are not run again."""
AGAIN = "failed: a process must run the rows that are left"
"""Outcome of a step's process after an error that may have left its GPU context of no use."""
BESIDE = 4  # steps at the same time, among those that measure no time
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
    "torchmetrics": "torchmetrics",
}
"""Modules that the steps need, and what brings them."""
TWO_NODES = "HEAD=ADDRESS NODES=2 RANKS_PER_NODE=9 launch/multi-node.sh CONFIG --clients 17 --fabric.accelerator cuda"


def begin(name: str, device: str, limit_s: float, rows: Path | None = None) -> Row:
    """Run a step in a process of its own and return its record; if the process dies in a row, another process runs the rest.

    `limit_s`: seconds after which the step is ended. `rows`: file of rows that the step has written and continues; None
    = it writes none.
    """
    began = time.monotonic()
    while True:
        record = _attempt(name, device, limit_s - (time.monotonic() - began), rows)
        died = record["outcome"].startswith("died") and rows is not None and _mark_dead(rows, record["outcome"])
        if not (died or record["outcome"] == AGAIN) or time.monotonic() - began > limit_s - 5:
            break
    if rows is not None and not record["rows"]:
        record["rows"] = rows_of(rows)
    return {**record, "took_s": time.monotonic() - began}


def rows_of(path: Path) -> list[Row]:
    """Read the finished rows of a step, without those that have only begun."""
    if not path.is_file():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if "begun" not in line]


def _mark_dead(path: Path, outcome: str) -> bool:
    """Write an error for the row that was in progress when a process died; return whether there was one."""
    if not path.is_file():
        return False
    last = json.loads(path.read_text().splitlines()[-1])
    if "begun" in last:
        _write_row(path, {"row": last["begun"], "error": f"the process {outcome}"})
    return "begun" in last


def _write_row(path: Path | None, row: Row) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(row, default=str) + "\n")


def _attempt(name: str, device: str, limit_s: float, rows: Path | None) -> Row:
    command = [sys.executable, "-m", "benchmarks.gpu", "--step", name, "--device", device]
    command += [] if rows is None else ["--rows", str(rows)]
    # a process that is killed leaves its temporary folders: they lie in one that this process deletes
    with tempfile.TemporaryDirectory(prefix="raafl-gpu-", ignore_cleanup_errors=True) as scratch:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": scratch},
        )
        try:
            words, _ = process.communicate(timeout=limit_s)
            return cast(Row, json.loads(words))
        except ValueError:
            return {"outcome": f"died with {process.returncode}", "rows": []}
        except subprocess.TimeoutExpired:
            return {"outcome": f"not done within {limit_s:.0f} s", "rows": []}
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """End a step with all processes that it started; those with their own group, such as torchrun's ranks, get SIGTERM first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


def within(name: str, device: str, written: Path | None = None) -> Row:
    """Run a step in this process and return its record; any error becomes part of the record.

    `written`: file of its rows, of which those without an error are not run again; None = it writes none.
    """
    with tempfile.TemporaryDirectory(prefix="raafl-gpu-") as folder:
        try:
            rows = STEPS[name].run(Where(device, Path(folder)))
            if isinstance(rows, dict):
                rows = _cases(rows, written)
        except Broken:
            return {"outcome": AGAIN, "rows": []}
        except BaseException as error:
            outcome = f"failed: {type(error).__name__}: {error}"[:3000]
            return {"outcome": outcome, "rows": [], "traceback": traceback.format_exc()}
    wrong = [row["row"] for row in rows if "error" in row]
    if wrong:
        return {"outcome": f"failed in {len(wrong)} of {len(rows)} rows: {', '.join(wrong)}", "rows": rows}
    failed = device != "cpu" and any(row.get("met") is False for row in rows)
    return {"outcome": "missed" if failed else "ok", "rows": rows}


class Broken(Exception):
    """Raised when a row has failed on the GPU, whose context may be unusable for the following rows."""


def _cases(cases: Cases, written: Path | None) -> list[Row]:
    """Run those rows of a step that are not written yet; a row that fails is written with its error."""
    known = {row["row"]: row for row in ([] if written is None else rows_of(written))}
    for name, case in cases.items():
        if name in known:
            continue
        _write_row(written, {"begun": name})
        try:
            row = {"row": name, **case()}
        except Exception as error:
            row = {
                "row": name,
                "error": f"{type(error).__name__}: {error}"[:1000],
                "at": traceback.format_exc()[-2000:],
            }
        known[name] = row
        _write_row(written, row)
        if written is not None and "CUDA" in row.get("error", ""):
            raise Broken(name)
    return [known[name] for name in cases]


def accept(
    out: Path, names: Sequence[str], num_gpus: int, known: Mapping[str, Row] | None = None, total_s: float = TOTAL_S
) -> int:
    """Run steps on the first GPU or in a dry run, write the report after each, and return the exit code.

    `out`: folder of the report. `num_gpus`: GPUs of this machine; 0 = a dry run. `known`: steps of an earlier report,
    of which finished ones are not run again. `total_s`: seconds for all steps.
    """
    out.mkdir(parents=True, exist_ok=True)
    stop_s, records, head = time.monotonic() + total_s, dict[str, Row](), _head(num_gpus)

    def take(name: str) -> tuple[str, Row]:
        return name, _record(name, num_gpus, known or {}, stop_s, out)

    timed = [name for name in names if STEPS[name].timed]
    with ThreadPoolExecutor(BESIDE) as pool:
        # a dry run stays in this thread, since only the main thread gets signals
        at_once = pool.map if num_gpus else map
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


def _record(name: str, num_gpus: int, known: Mapping[str, Row], stop_s: float, out: Path) -> Row:
    """Run a step if this machine and the remaining time allow it, or return its record from an earlier report."""
    step, left_s, written = STEPS[name], stop_s - time.monotonic(), out / f"{name}.rows"
    before = known.get(name, {"outcome": "", "rows": []})
    if before["outcome"] in ENDED:
        return {**before, "before": True}
    written.unlink(missing_ok=True)
    for row in before["rows"]:
        if "row" in row and "error" not in row:
            _write_row(written, row)
    if not num_gpus:
        return within(name, "cpu")
    if num_gpus < step.num_gpus:
        return {"outcome": f"needs {step.num_gpus} GPUs", "rows": []}
    if left_s < 5:
        return {"outcome": "no time was left", "rows": before["rows"]}
    return begin(name, "cuda:0", min(step.limit_s, left_s), written)


def _head(num_gpus: int) -> Row:
    """Describe hardware and versions; a separate process asks the GPU, so that this one does not use it."""
    if not num_gpus:
        return report([])
    try:
        script = "import json; from benchmarks.common import report; print(json.dumps(report([])))"
        return dict(json.loads(run([sys.executable, "-c", script]).splitlines()[-1]))
    except Exception as error:
        return {"hardware": str(error)}


def known_of(path: Path) -> dict[str, Row]:
    """Read from a GPU report the finished steps, and the finished rows of the others."""
    told = json.loads(path.read_text()) if path.is_file() else {"rows": []}
    return {} if told.get("dry") else {row["step"]: row for row in told["rows"]}


def missing_wheels() -> str:
    """Return a line that says which packages are missing, and how to install them on a machine without network."""
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
    """Parse the options, report what is missing, and run the steps."""
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
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    for name, value in (("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1"), ("WANDB_MODE", "offline")):
        os.environ.setdefault(name, value)
    if options.step:
        told = os.dup(1)
        os.dup2(2, 1)  # output of a step's own processes goes to standard error, since standard output is the record
        record = within(options.step, options.device, options.rows)
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
