"""Compute the result of a grid: for each task and fleet the methods' figures, ranks and Pareto front."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from raafl.atomic_file import atomic_file
from raafl.compare.grid import Cell, Grid
from raafl.compare.grid_runs import GridRuns, replayed_seeds
from raafl.compare.provenance import provenance
from raafl.compare.report import result
from raafl.compare.statistics import geometric
from raafl.compare.tables import Cells, difference, short, time_cell, with_interval
from raafl.errors import BadInput

SCHEMA = 1
Row = Mapping[str, Any]


def grid_result(grid: Grid, runs: GridRuns, folder: Path) -> dict[str, Any]:
    """Return the result of a grid as JSON; for each task and fleet it also lists runs that are missing.

    Args:
        grid: description of the grid.
        runs: runs that have finished.
        folder: folder of the grid.
    """
    return {
        "schema": SCHEMA, "name": grid.name, "about": grid.about, **provenance(),
        "seeds": list(grid.seeds), "search": asdict(grid.search),
        "tasks": {name: asdict(task) for name, task in grid.tasks.items()},
        "fleets": {name: asdict(fleet) for name, fleet in grid.fleets.items()},
        "methods": {name: asdict(method) for name, method in grid.methods.items()},
        "cells": [_cell(grid, runs, cell, folder) for cell in grid.cells],
    }  # fmt: skip


def _cell(grid: Grid, runs: GridRuns, cell: Cell, folder: Path) -> dict[str, Any]:
    outcomes = runs.outcomes[cell]
    seeds = {label: {o.run.seed for o in outcomes if o.run.label == label} for label in grid.methods}
    labels = [label for label in grid.methods if seeds[label]]
    not_run = {label: sorted(set(grid.seeds) - seeds[label]) for label in grid.methods}
    found: dict[str, Any] = {
        "task": cell[0], "fleet": cell[1], "not_run": {label: missing for label, missing in not_run.items() if missing},
        "metric": grid.tasks[cell[0]].metric, "maximize": grid.tasks[cell[0]].maximize, "reference": None, "options": [],
        "rows": [],
    }  # fmt: skip
    if not labels:
        return found
    best, trials = runs.best[cell[0]], runs.trials[cell[0]]
    some = grid.only(labels)
    comparison = some.comparison(cell, {label: best[label].settings for label in labels})
    whole = result(comparison, outcomes, {k: trials[k] for k in labels}, {k: best[k] for k in labels}, folder)
    rows = [_accepted(grid, runs, cell, row) for row in whole["rows"]]
    standing = standings(rows, maximize=comparison.maximize)
    return found | {
        "options": whole["options"], "reference": whole["reference"],
        "rows": [row | standing[row["row"]] for row in rows],
    }  # fmt: skip


def _accepted(grid: Grid, runs: GridRuns, cell: Cell, row: dict[str, Any]) -> dict[str, Any]:
    """Add whether a row is accepted: True = its replays are equal, False = one is not, None = one is missing."""
    due = replayed_seeds(grid, cell, row["row"])
    verdicts = {run["seed"]: _replayed(runs, run) for run in row["runs"] if "error" not in run and run["seed"] in due}
    if any(why for why, _ in verdicts.values()):
        accepted: bool | None = False
    else:
        accepted = True if len(verdicts) == len(due) and all(done for _, done in verdicts.values()) else None
    done = sorted(seed for seed, (_, ended) in verdicts.items() if ended)
    return row | {"accepted": accepted, "replayed": done}


def _replayed(runs: GridRuns, run: Row) -> tuple[str | None, bool]:
    name = Path(run["folder"]).name
    return runs.replays.get(name), name in runs.replays


def standings(rows: Sequence[Row], *, maximize: bool) -> dict[str, dict[str, Any]]:
    """Rank the methods on one task and fleet: by the time to the first target, and by the final value.

    The time of a method is the median over its seeds; methods that did not reach the target share the last rank.

    Args:
        rows: measured values of the methods on one task and fleet.
        maximize: whether a larger value of the metric is better.

    Returns:
        For each method its ranks (`rank`); whether no other method needs less time and fewer bytes to the target
        (`pareto`); and the ratio of its time to the fastest method's, as a geometric mean over seeds with a 95 %
        interval (`behind`).
    """
    times = {row["row"]: _first(row["time_to"], "median_s") for row in rows}
    sent = {row["row"]: _first(row["megabytes_to"]) for row in rows}
    finals = {row["row"]: row["final"]["mean"] if "final" in row else None for row in rows}
    worth = {label: None if value is None else (-value if maximize else value) for label, value in finals.items()}
    leader = min(
        (label for label in times if times[label] is not None), key=lambda label: times[label] or 0.0, default=None
    )
    by_label = {row["row"]: row for row in rows}
    return {
        label: {
            "rank": {"time": _rank(times, label), "final": _rank(worth, label)},
            "pareto": times[label] is not None and not any(
                _dominates((times[other], sent[other]), (times[label], sent[label])) for other in times
            ),
            "behind": None if leader is None else _behind(by_label[label], by_label[leader]),
        }
        for label in times
    }  # fmt: skip


def _first(targets: Mapping[str, Any], key: str | None = None) -> float | None:
    value = next(iter(targets.values()), None)
    found: float | None = value[key] if key is not None and value is not None else value
    return found


def _rank(values: Mapping[str, float | None], label: str) -> int:
    """Return 1 + how many rows are better; those without a value come last, together."""
    own = values[label]
    return 1 + sum(value is not None and (own is None or value < own) for value in values.values())


def _dominates(one: tuple[float | None, float | None], other: tuple[float | None, float | None]) -> bool:
    """Check whether ``one`` needs no more time and bytes than ``other``, and less of either."""
    ours, theirs = ([math.inf if value is None else value for value in pair] for pair in (one, other))
    return all(a <= b for a, b in zip(ours, theirs, strict=True)) and ours != theirs


def _behind(row: Row, leader: Row) -> dict[str, Any]:
    """Compare a row's times to the first target with the leader's, over the seeds in which both got there."""
    ours, theirs = ({run["seed"]: _first(run.get("time_to", {})) for run in one["runs"]} for one in (row, leader))
    ratios = geometric([own / best for seed, own in ours.items() if own and (best := theirs.get(seed))])
    reached = sum(value is not None for value in ours.values())
    return {
        "of": leader["row"], "reached": reached, "seeds": len(ours), **ratios,
        "shown": ratios["low"] is not None and ratios["low"] > 1,
    }  # fmt: skip


def write_grid(whole: Mapping[str, Any], folder: Path) -> Path:
    """Write a grid's result to result.json, with each row on a line of its own; return the path."""
    head = {name: value for name, value in whole.items() if name != "cells"}
    cells = []
    for cell in whole["cells"]:
        rows = ",\n".join("  " + json.dumps(row) for row in cell["rows"])
        own = json.dumps({name: value for name, value in cell.items() if name != "rows"})
        cells.append(f' {own[:-1]}, "rows": [\n{rows}\n ]}}' if rows else f' {own[:-1]}, "rows": []}}')
    text = json.dumps(head, indent=1)[:-2] + ',\n "cells": [\n' + ",\n".join(cells) + "\n]}\n"
    path = folder / "result.json"
    with atomic_file(path) as file:
        file.write(text.encode())
    return path


def load_grid(path: Path) -> dict[str, Any]:
    """Read the result of a grid; raise `BadInput` if the file has none."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        schema = found["schema"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"'{path}' is not the result of a grid ({error}): run raafl compare GRID.yaml first") from None
    if schema != SCHEMA:
        raise BadInput(f"'{path}' has schema {schema}, and this version reads {SCHEMA}: run the grid with this version")
    return found


def cell_table(cell: Mapping[str, Any]) -> Cells:
    """Format the result for one task and fleet as a table; methods are sorted by the time to the first target.

    Args:
        cell: entry of a grid's result for one task and fleet.
    """
    rows = sorted(cell["rows"], key=lambda row: (row["rank"]["time"], row["rank"]["final"]))
    targets = list(rows[0]["time_to"]) if rows else []
    head = [
        "method",
        *(f"s to {target}" for target in targets),
        "behind the first",
        *(f"MB to {target}" for target in targets),
    ]
    head += [
        cell["metric"],
        "best",
        f"minus {cell['reference']}",
        *(title for _, title in _COLUMNS),
        "front",
        "accepted",
    ]
    table = [head]
    for row in rows:
        line = [
            row["row"],
            *(time_cell(row["time_to"][target]) for target in targets),
            _behind_cell(row["behind"], row["row"]),
        ]
        line += ["-" if (sent := row["megabytes_to"][target]) is None else short(sent) for target in targets]
        line += [with_interval(row.get("final")), with_interval(row.get("best")), difference(row.get("difference"))]
        line += [short(row[name]["mean"]) if name in row else "" for name, _ in _COLUMNS]
        table.append([*line, "yes" if row["pareto"] else "", _ACCEPTED[row["accepted"]]])
    return table


_COLUMNS = (
    ("worst_client", "worst client"), ("utilisation", "utilisation"), ("participation", "participation"),
    ("participation_gini", "Gini"), ("peak_memory_mb", "peak MB"), ("megabytes", "MB"), ("energy_kj", "kJ"), ("updates", "updates"),
)  # fmt: skip
_ACCEPTED = {True: "yes", False: "NO", None: "not replayed"}


def _behind_cell(behind: Mapping[str, Any] | None, label: str) -> str:
    """Format the ratio of a method's time to the fastest: `1.8 x (1.2 to 2.7)`; a remark is added if they may be equal."""
    if behind is None or behind["of"] == label:
        return ""
    if behind["ratio"] is None:
        return "never"
    if behind["low"] is None:
        return f"{short(behind['ratio'])} x (one seed)"
    shown = "" if behind["shown"] else ", not shown"
    return f"{short(behind['ratio'])} x ({short(behind['low'])} to {short(behind['high'])}{shown})"
