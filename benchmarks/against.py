"""Compare benchmarks of this working tree with those of another commit: run both in turns on one machine, print ratios.

Each tree runs its own benchmark, in a process of its own, from a git worktree of the commit in a temporary folder. Rows are
matched by what was measured (workload, algorithm, transport, ...), and compared by CPU seconds where the benchmark has them,
else by its ratio to what it measured beside, such as a bare loop or a copy.

    python -m benchmarks.against COMMIT NAME ... [--rounds N] [--json] [--out FILE]
    python -m benchmarks.against HEAD~9 overhead cohorts:small

After a colon stands the name of a function in the benchmark's module that returns a few rows instead of all; both trees must
have it. `speed` is how many times as fast this tree is, the median over the rounds, between `least` and `most`; below 0.95 the
row has `fell`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import Row, report, table

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = ("workload", "algorithm", "batch_clients", "device", "processes", "at_work", "merge", "transport", "bytes")
"""Fields that say what a row measured, so that rows of two trees can be matched."""
FIGURES = {"cpu_ratio": True, "cpu_seconds": False, "ratio": True, "seconds": False}
"""Fields that are compared, the first that both rows have; True = more is faster."""
FALL = 0.95
Run = Callable[[Path, str], list[Row]]
_CALL = """
import importlib, json, sys
module = importlib.import_module(f"benchmarks.{sys.argv[1]}")
print(json.dumps(list(getattr(module, sys.argv[2])())))
"""


def run(tree: Path, what: str) -> list[Row]:
    """Run a benchmark, ``NAME`` or ``NAME:FUNCTION``, from one tree in a process of its own, and return its rows."""
    name, _, function = what.partition(":")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    command = [sys.executable, "-c", _CALL, name, function or "rows"]
    done = subprocess.run(command, cwd=tree, env=env, stdout=subprocess.PIPE, text=True, check=True)
    rows: list[Row] = json.loads(done.stdout.splitlines()[-1])
    return rows


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """Return a context with the files of ``commit`` in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", tree, commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)


def in_turns(what: str, other: Path, rounds: int, run: Run = run) -> list[Row]:
    """Run a benchmark from both trees in turns and compare their rows.

    `what`: the benchmark's name, perhaps with a colon and a function. `other`: folder of the other tree. `rounds`: runs
    of each tree; the one that runs first changes each round.
    """
    found: dict[Path, list[list[Row]]] = defaultdict(list)
    for number in range(rounds):
        for tree in (other, ROOT) if number % 2 else (ROOT, other):
            found[tree].append(run(tree, what))
    return compare(what.partition(":")[0], found[ROOT], found[other])


def compare(name: str, here: Sequence[Iterable[Row]], there: Sequence[Iterable[Row]]) -> list[Row]:
    """Compare rows that both trees have measured; ``here`` and ``there`` have this tree's and the other's rows, by round."""
    ours, theirs = ([{_key(row): row for row in rows} for rows in side] for side in (here, there))
    compared = []
    for key in ours[0]:
        pairs = [(one[key], other[key]) for one, other in zip(ours, theirs, strict=True) if key in one and key in other]
        figure = next(
            (field for field in FIGURES if pairs and all(field in row for pair in pairs for row in pair)), None
        )
        if figure is None:
            continue
        values = [(float(one[figure]), float(other[figure])) for one, other in pairs]
        speeds = [one / other if FIGURES[figure] else other / one for one, other in values]
        speed = statistics.median(speeds)
        compared.append(
            {
                "benchmark": name,
                "row": ", ".join(f"{value}" for value in key if value is not None),
                "figure": figure,
                "there": statistics.median(other for _, other in values),
                "here": statistics.median(one for one, _ in values),
                "speed": speed,
                "least": min(speeds),
                "most": max(speeds),
                "fell": "fell" if speed < FALL else "",
            }
        )
    return compared


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(field) for field in SETTINGS)


def main(argv: Sequence[str] | None = None) -> None:
    """Compare two trees as the command line says; ``argv`` None = the process's arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against")
    parser.add_argument("commit", help="commit, branch or tag to compare this working tree with")
    parser.add_argument("names", nargs="+", metavar="NAME", help="benchmark, or NAME:FUNCTION for a few of its rows")
    parser.add_argument("--rounds", type=int, default=3, help="how often each tree runs (default 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    options = parser.parse_args(argv)
    with worktree(options.commit) as other:
        rows = [row for name in options.names for row in in_turns(name, other, options.rounds)]
        commit = subprocess.run(
            ["git", "-C", other, "rev-parse", "--short", "HEAD"], stdout=subprocess.PIPE, text=True, check=True
        ).stdout.strip()
    result = report(rows, against=commit, rounds=options.rounds)
    text = json.dumps(result, indent=2)
    if options.out is not None:
        options.out.write_text(text + "\n")
    print(text if options.json else f"this tree against {commit}, {options.rounds} rounds\n{table(rows)}")


if __name__ == "__main__":
    main()
