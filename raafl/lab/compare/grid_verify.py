"""Verify a grid's result by repeating some of its runs; add the rows of another result to one's own."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raafl.errors import BadInput
from raafl.lab.compare.fields import Options
from raafl.lab.compare.grid import Grid
from raafl.lab.compare.grid_result import load_grid, standings
from raafl.lab.compare.processes import in_processes
from raafl.lab.compare.provenance import file_digest
from raafl.lab.compare.results import differences
from raafl.lab.compare.runs import Run, Runner, resolve
from raafl.lab.compare.verify import difference, log_of, replay
from raafl.runfolder.schema import JOURNAL


def verify_grid(
    grid: Grid, path: Path, share: float, folder: Path, jobs: int = 1, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Check another person's result: train a random share of its runs anew and compare the models with it.

    Each new run is also replayed (computed again from its event log). Yields for each run its `cell` (task and fleet),
    `row` and `seed`, and `why`: None if the journal and the model have the digests in the result, else what differs.
    Nothing in the result is executed: the grid's own files configure the runs, and a method's settings are taken from
    the result only if the grid's search would try them.

    Raises:
        BadInput: the file has no result, or the result of another grid.
    """
    asked = _drawn(grid, load_grid(path), share, seed)
    runner = Runner(folder / "runs", jobs, False, lambda _: None)
    outcomes = dict(zip(asked, runner.run_all(list(asked)), strict=True))
    ended = [outcome for outcome in outcomes.values() if outcome.summary is not None]
    for _ in in_processes(ended, jobs, lambda outcome: replay(outcome.folder), lambda _: None):
        pass
    for run, outcome in outcomes.items():
        cell, said = asked[run]
        verdict = {"cell": cell, "row": run.label, "seed": run.seed}
        if outcome.summary is None:
            yield verdict | {"why": f"failed: {outcome.error}"}
        elif (journal := file_digest(outcome.folder / JOURNAL)) != said["journal_digest"]:
            yield verdict | {
                "why": f"its journal is {journal[:16]}, the result says {str(said['journal_digest'])[:16]}"
            }
        else:
            yield verdict | {"why": difference(said, log_of(outcome.folder))}


def _drawn(grid: Grid, found: Mapping[str, Any], share: float, seed: int) -> dict[Run, tuple[str, Mapping[str, Any]]]:
    """Return runs to make, with the name of their cell and what the result says of them."""
    listed = [
        (cell, row, run)
        for cell in found["cells"]
        if (cell["task"], cell["fleet"]) in grid.cells
        for row in cell["rows"]
        if row["row"] in grid.methods
        for run in row["runs"]
        if "error" not in run
    ]
    if not listed:
        raise BadInput(f"the result of '{str(found['name'])[:80]}' has no run of this grid: give the grid that made it")
    asked: dict[Run, tuple[str, Mapping[str, Any]]] = {}
    for cell, row, run in random.Random(seed).sample(listed, math.ceil(share * len(listed))):
        settings = _settings(grid, cell, row)
        key = (str(cell["task"]), str(cell["fleet"]))
        comparison = grid.only([row["row"]]).comparison(key, {row["row"]: settings})
        options = comparison.options_of(row["row"])
        (made,) = resolve(comparison.config, row["row"], options, [int(run["seed"])])
        asked[made] = ("--".join(key), run)
    return asked


def _settings(grid: Grid, cell: Mapping[str, Any], row: Mapping[str, Any]) -> Options:
    """Return a row's settings; raises `BadInput` unless the grid's search tries them."""
    search = grid.comparison((cell["task"], grid.search.fleet)).search
    settings = tuple(map(str, row["searched"]["settings"]))
    if search is None or settings not in search.settings(row["row"]):
        raise BadInput(
            f"row '{row['row']}' has settings that this grid's search does not try: give the grid that made the result"
        )
    return settings


def add_rows(whole: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Add the rows of another result for the same tasks, fleets and options; return a new result with ranks among all rows.

    Raises:
        BadInput: the file has no result of a grid.
    """
    others = {(cell["task"], cell["fleet"]): cell for cell in load_grid(path)["cells"]}
    cells = []
    for cell in whole["cells"]:
        other = others.get((cell["task"], cell["fleet"]), {})
        labels = {row["row"] for row in cell["rows"]}
        more = [
            row | {"from": str(path)}
            for row in other.get("rows", ())
            if row["row"] not in labels and cell["rows"] and other.get("options") == cell["options"]
        ]
        rows = [*cell["rows"], *more]
        reference = other.get("reference") if more else cell["reference"]
        gaps = differences({row["row"]: row["runs"] for row in rows}, reference) if rows else {}
        standing = standings(rows, maximize=cell["maximize"])
        every = cell.get("eval_every") if not more or other.get("eval_every") == cell.get("eval_every") else None
        cells.append(
            {**cell, "reference": reference, "eval_every": every}
            | {"rows": [row | {"difference": gaps[row["row"]]} | standing[row["row"]] for row in rows]}
        )
    return {**whole, "cells": cells}
