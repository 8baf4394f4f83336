"""Whether a committed comparison of an older revision of the rules would run in other times under the present one.

For each result in benchmarks/results that `raafl compare` made under older rules, the first row of each method is built twice,
under its rules and under the present ones, and the virtual seconds of a task of the whole model are compared for every
client. `moved` is the largest relative change: 0 means that every event of the run comes when it came.

    python -m benchmarks.rules [--json] [--out FILE]
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, Row, main, paper_file
from raafl.config.argv import with_paths
from raafl.config.parse import parse
from raafl.core.types import Work
from raafl.errors import BadInput
from raafl.lab.compare.comparison import read
from raafl.lab.compare.runs import Run, resolve
from raafl.rules import CURRENT, recorded_revision
from raafl.runtime.setup import build

RESULTS = Path(__file__).parent / "results"


def older() -> Iterator[tuple[str, int, Path, str | None]]:
    """Yield name, rules, file and variant of each committed comparison that was made under older rules."""
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(result, dict) or not {"rows", "config"} <= {*result}:
            continue
        rules, (file, variant) = recorded_revision(result), paper_file(path.stem)
        if rules < CURRENT and (ROOT / file).is_file():
            yield path.stem, rules, ROOT / file, variant


def seconds(run: Run, rules: int) -> tuple[str, list[float]]:
    """Return a run's method, and each client's virtual seconds for a task of the whole model."""
    experiment = parse(
        "simulate", [*with_paths(list(run.argv)), "--rules", str(rules), "--output", os.devnull]
    ).experiment
    parts = build(experiment, pace=False)
    times = [parts.coordinator.fleet.task_time(client, Work()).compute_s for client in parts.clients]
    return experiment.algorithm.name, times


def rows(only: str | None = None) -> list[Row]:
    """Compare the first row of each method of each result; results whose data are missing are named."""
    return [row for one in older() if only in (None, one[0]) for row in _rows_of(*one)]


def _rows_of(name: str, rules: int, file: Path, variant: str | None) -> Iterator[Row]:
    methods: set[str] = set()
    comparison = read(file, variant)
    for label in comparison.rows:
        row: dict[str, Any] = {"result": name, "rules": rules, "present": CURRENT, "row": label}
        try:
            run = resolve(comparison.config, label, comparison.options_of(label, ()), comparison.seeds[:1])[0]
            method, before = seconds(run, rules)
            if method in methods:
                continue
            methods.add(method)
            _, now = seconds(run, CURRENT)
            row["moved"] = max(abs(b / a - 1) for a, b in zip(before, now, strict=True))
        except BadInput as error:
            row |= {"moved": None, "why": str(error)[:200]}
        yield row


if __name__ == "__main__":
    main("rules", rows)
