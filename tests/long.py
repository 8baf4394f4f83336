"""Run what is too long for each change, and record when: `make test-long`, or `python -m tests.long --out FILE`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import report

FRAMES, KILLS = 100_000, 200


class Counts:
    """How many tests ended how."""

    def __init__(self) -> None:
        self.outcomes = {"passed": 0, "failed": 0, "skipped": 0}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1


def marked() -> dict[str, Any]:
    """Run the tests that are marked long, and those of Hypothesis with many examples."""
    counts = Counts()
    many = ["-m", "long or hypothesis", "--hypothesis-profile=thorough"]
    code = pytest.main(["-q", "--durations=10", *many], plugins=[counts])
    return {"part": "tests marked long, and Hypothesis's", "exit_code": int(code), **counts.outcomes}


def fuzz() -> dict[str, Any]:
    """As many damaged frames as a change is not tested with."""
    command = [sys.executable, "-m", "pytest", "-q", "tests/transport/test_fuzz.py"]
    done = subprocess.run(command, env=os.environ | {"RAAFL_FUZZ_FRAMES": str(FRAMES)}, check=False)
    return {"part": "fuzz", "exit_code": done.returncode, "frames": FRAMES}


def chaos() -> dict[str, Any]:
    """A federation that loses processes all the time."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "chaos"
        command = [sys.executable, "-m", "tests.chaos.run", "--kills", str(KILLS), "--out", str(out)]
        done = subprocess.run(command, check=False)
    return {"part": "chaos", "exit_code": done.returncode, "kills": KILLS}


def main(argv: list[str] | None = None) -> int:
    """Run from the command line; 0 = everything passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.long")
    parser.add_argument("--out", type=Path, required=True, help="write what was run, date and hardware to this file")
    options = parser.parse_args(argv)
    rows = []
    for part in (marked, fuzz, chaos):
        began = time.monotonic()
        rows.append(part() | {"seconds": round(time.monotonic() - began)})
        print(f"[raafl] {rows[-1]}", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report(rows), indent=2) + "\n")
    return int(any(row["exit_code"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
