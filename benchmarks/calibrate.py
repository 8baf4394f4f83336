"""Measure the error of calibrated profiles: fit them to one real run, and predict another on the virtual clock.

Each case runs `raafl fit --local 2` twice: the profiles are fitted to the first tasks of the first run, with `raafl calibrate`,
and both runs are simulated with them. Where a case is not emulated, the clients train as fast as this machine lets them.

    python -m benchmarks.calibrate [--json] [--out FILE]
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import Row, main
from benchmarks.plan import raafl

_WIDE = ("--model.hidden", "[800,800]", "--train.num_epochs", "5", "--devices", "null", "--emulate", "false")
_NARROW = ("--model.hidden", "[400]", "--train.num_epochs", "10", "--devices", "null", "--emulate", "false")
_HIDDEN = json.dumps([{"name": "fast", "flops_per_s": 1.0e8}, {"name": "slow", "flops_per_s": 4.0e7}])
_PACED = ("--devices", _HIDDEN)
_BUFFERED = ("--algorithm", "fed_buff", "--algorithm.buffer_size", "2", "--max_updates", "24")
_ROUNDS = ("--algorithm", "fed_avg", "--max_updates", "20")
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "emulated devices, another method": ((*_PACED, *_BUFFERED), (*_PACED, *_ROUNDS)),
    "this machine, another method": ((*_WIDE, *_BUFFERED), (*_WIDE, *_ROUNDS)),
    "this machine, another model": ((*_NARROW, *_BUFFERED), (*_WIDE, *_BUFFERED)),
}
"""Options of the run that is calibrated, and of the run that is predicted."""


def rows(cases: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] | None = None) -> list[Row]:
    """Calibrate profiles and predict runs for each case; return a row for each predicted run; ``cases`` None = `CASES`."""
    with tempfile.TemporaryDirectory(prefix="raafl-calibrate-") as scratch:
        base = Path(scratch) / "measured.yaml"
        raafl(["plan", "--measure", str(base), "--json"])
        return [row for name, options in (cases or CASES).items() for row in _rows(name, options, Path(scratch), base)]


def _rows(name: str, options: tuple[tuple[str, ...], tuple[str, ...]], scratch: Path, base: Path) -> list[Row]:
    runs = [scratch / f"{name.replace(' ', '-')}-{number}" for number in range(2)]
    loads = []
    for run, chosen in zip(runs, options, strict=True):
        shown = ["--eval_every", "1000", "--output", str(run), "--progress", "quiet", "--json"]
        raafl(["fit", "--config", "configs/quickstart.yaml", *chosen, "--local", "2", *shown])
        loads.append(os.getloadavg()[0])
    start = [] if "--emulate" not in options[0] else ["--base", str(base)]
    where = ["--check", *map(str, runs), "--output", str(scratch / "calibrated.yaml"), "--trust_config", "--json"]
    found = raafl(["calibrate", str(runs[0]), *start, *where])
    return [
        _row(name, which, found, one, load)
        for which, one, load in zip(("the run it is fitted to", "the other run"), found["checks"], loads, strict=True)
    ]


def _row(name: str, which: str, found: dict[str, Any], one: dict[str, Any], load: float) -> Row:
    return {
        "case": name,
        "run": which,
        "held_out_task_error": max(fit["task_error"] for fit in found["clients"]),
        "updates": one["updates"],
        "predicted_update_s": one["predicted_update_s"],
        "real_update_s": one["real_update_s"],
        "predicted_s": one["predicted_s"],
        "real_s": one["real_s"],
        "error": one["error"],
        "task_error": one["task_error"],
        "load": load,
    }


if __name__ == "__main__":
    main("calibrate", rows)
