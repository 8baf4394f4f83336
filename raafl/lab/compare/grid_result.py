"""Compute the result of a grid: for each task and fleet the methods' figures, ranks and Pareto front."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from raafl.atomic_file import atomic_file
from raafl.errors import BadInput
from raafl.lab.compare.grid import Cell, Grid
from raafl.lab.compare.grid_runs import GridRuns, replayed_seeds
from raafl.lab.compare.provenance import provenance
from raafl.lab.compare.report import result
from raafl.lab.compare.results import with_holm
from raafl.lab.compare.statistics import ALPHA, RankTest, holm, rank_test
from raafl.lab.compare.tables import Cells, difference, p_value, short, time_cell, with_interval

SCHEMA = 2
_BY_INTERVALS = 1  # schema of results that left out seeds that did not reach the target
Row = Mapping[str, Any]


def grid_result(grid: Grid, runs: GridRuns, folder: Path) -> dict[str, Any]:
    """Return the result of a grid as JSON; for each task and fleet it also lists runs that are missing."""
    return {
        "schema": SCHEMA,
        "name": grid.name,
        "about": grid.about,
        **provenance(),
        "seeds": list(grid.seeds),
        "search": asdict(grid.search),
        "tasks": {name: asdict(task) for name, task in grid.tasks.items()},
        "fleets": {name: asdict(fleet) for name, fleet in grid.fleets.items()},
        "methods": {name: asdict(method) for name, method in grid.methods.items()},
        "cells": [_cell(grid, runs, cell, folder) for cell in grid.cells],
    }


def _cell(grid: Grid, runs: GridRuns, cell: Cell, folder: Path) -> dict[str, Any]:
    outcomes = runs.outcomes[cell]
    seeds = {label: {o.run.seed for o in outcomes if o.run.label == label} for label in grid.methods}
    labels = [label for label in grid.methods if seeds[label]]
    not_run = {label: sorted(set(grid.seeds) - seeds[label]) for label in grid.methods}
    found: dict[str, Any] = {
        "task": cell[0],
        "fleet": cell[1],
        "not_run": {label: missing for label, missing in not_run.items() if missing},
        "metric": grid.tasks[cell[0]].metric,
        "maximize": grid.tasks[cell[0]].maximize,
        "reference": None,
        "options": [],
        "rows": [],
    }
    if not labels:
        return found
    best, trials = runs.best[cell[0]], runs.trials[cell[0]]
    some = grid.only(labels)
    comparison = some.comparison(cell, {label: best[label].settings for label in labels})
    whole = result(comparison, outcomes, {k: trials[k] for k in labels}, {k: best[k] for k in labels}, folder)
    rows = [_accepted(grid, runs, cell, row) for row in whole["rows"]]
    standing = standings(rows, maximize=comparison.maximize)
    return found | {
        "options": whole["options"],
        "reference": whole["reference"],
        "eval_every": whole["eval_every"],
        "rows": [row | standing[row["row"]] for row in rows],
    }


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

    The time of a method is the median over its seeds, where a run that did not reach the target is later than all that did.
    Of methods whose median run did not reach it, the one that reached it on more seeds is first.

    Returns:
        For each method its ranks (`rank`); whether no other method needs less time and fewer bytes to the target
        (`pareto`); and how its times compare with those of the first method, by ranks (`behind`, see `_behind`), where
        any run reached the target.
    """
    times = {row["row"]: _first(row["time_to"], "median_s") for row in rows}
    reached = {row["row"]: _first(row["time_to"], "reached") or 0 for row in rows}
    order = {label: _order(times[label], reached[label]) for label in times}
    sent = {row["row"]: _first(row["megabytes_to"]) for row in rows}
    finals = {row["row"]: row["final"]["mean"] if "final" in row else None for row in rows}
    worth = {label: None if value is None else (-value if maximize else value) for label, value in finals.items()}
    leader = min((label for label in order if reached[label]), key=lambda label: order[label], default=None)
    behind = {} if leader is None else _behind(rows, leader)
    return {
        label: {
            "rank": {"time": 1 + sum(other < order[label] for other in order.values()), "final": _rank(worth, label)},
            "pareto": times[label] is not None
            and not any(_dominates((times[other], sent[other]), (times[label], sent[label])) for other in times),
            "behind": behind.get(label),
        }
        for label in times
    }


def _order(median_s: float | None, reached: float) -> tuple[float, float]:
    """Return what methods are ranked by: the median time, and among those without one, how many seeds reached the target."""
    return (math.inf, -reached) if median_s is None else (median_s, 0.0)


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


def _behind(rows: Sequence[Row], leader: str) -> dict[str, dict[str, Any]]:
    """Compare each row's times to the first target with those of the first method, by ranks over all runs.

    Returns:
        For each row how many of its seeds reached the target; the ratio of its median time to the first method's; in how
        many pairs of runs it is later; and p-values of the Mann-Whitney test, one row's own and with Holm's correction
        for all rows of the cell. The first method has no test.
    """
    times = {row["row"]: times_of(row) for row in rows}
    medians = {row["row"]: _first(row["time_to"], "median_s") for row in rows}
    tests = {label: rank_test([(own, times[leader])]) for label, own in times.items() if label != leader}
    return {
        label: {
            "of": leader,
            "reached": sum(one is not None for one in own),
            "seeds": len(own),
            "ratio": _ratio(medians[label], medians[leader]),
            **tested,
        }
        for (label, own), tested in zip(times.items(), (tested_by_holm(tests)[label] for label in times), strict=True)
    }


def overall(cells: Sequence[Row], reference: str) -> dict[str, dict[str, Any]]:
    """Compare each method's times to the first target with those of one method, over several cells of a grid.

    Only runs of one cell are compared with each other, and the counts of all cells are added.

    Returns:
        The test of each other method, see `tested_by_holm`, corrected for their number.
    """
    by_cell = [{row["row"]: times_of(row) for row in cell["rows"]} for cell in cells]
    labels = dict.fromkeys(label for times in by_cell for label in times if label != reference)
    tests = {
        label: rank_test(
            [(times[label], times[reference]) for times in by_cell if label in times and reference in times]
        )
        for label in labels
    }
    tested = tested_by_holm(tests)
    return {label: tested[label] for label in labels}


def tested_by_holm(tests: Mapping[str, RankTest | None]) -> Mapping[str, dict[str, Any]]:
    """Return the results of tests by ranks, with Holm's correction for their number, as plain data for JSON.

    `tests`: tests of one table, by label; None = a method without runs. A label that is not among them has no test.
    """
    known = {label: one for label, one in tests.items() if one is not None}
    corrected = dict(zip(known, holm([one.p for one in known.values()]), strict=True))
    found = {
        label: {
            "later": one.later,
            "pairs": one.pairs,
            "p": one.p,
            "least_p": one.least_p,
            "p_holm": corrected[label],
            "shown": corrected[label] <= ALPHA,
        }
        for label, one in known.items()
    }
    nothing = {"later": None, "pairs": 0, "p": None, "least_p": None, "p_holm": None, "shown": False}
    return defaultdict(lambda: dict(nothing), found)


def times_of(row: Row) -> list[float | None]:
    """Return the time to the first target of each of a row's runs; None = it did not reach it, or failed."""
    return [_first(run.get("time_to", {})) for run in row["runs"]]


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


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
        if schema == _BY_INTERVALS:
            found = anew(found)
            schema = found["schema"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"'{path}' is not the result of a grid ({error}): run raafl compare GRID.yaml first") from None
    if schema != SCHEMA:
        raise BadInput(f"'{path}' has schema {schema}, and this version reads {SCHEMA}: run the grid with this version")
    return found


def anew(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return a grid's result with ranks, tests and differences computed anew from its runs."""
    cells = []
    for cell in whole["cells"]:
        gaps = with_holm({row["row"]: row["difference"] for row in cell["rows"]})
        standing = standings(cell["rows"], maximize=cell["maximize"])
        rows = [row | {"difference": gaps[row["row"]]} | standing[row["row"]] for row in cell["rows"]]
        cells.append({**cell, "eval_every": cell.get("eval_every"), "rows": rows})
    return {**whole, "schema": SCHEMA, "cells": cells}


def cell_table(cell: Mapping[str, Any]) -> Cells:
    """Format the result for one task and fleet as a table; methods are sorted by the time to the first target."""
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
    ("worst_client", "worst client"),
    ("utilisation", "utilisation"),
    ("participation", "participation"),
    ("participation_gini", "Gini"),
    ("peak_memory_mb", "peak MB"),
    ("megabytes", "MB"),
    ("energy_kj", "kJ"),
    ("updates", "updates"),
)
_ACCEPTED = {True: "yes", False: "NO", None: "not replayed"}


def _behind_cell(behind: Mapping[str, Any] | None, label: str) -> str:
    """Format the ratio of a method's median time to the first method's, and the test: `1.8 x (9 of 9 pairs, p 0.1)`."""
    if behind is None or behind["of"] == label:
        return ""
    ratio = "never" if behind["ratio"] is None else f"{short(behind['ratio'])} x"
    if behind["p_holm"] is None:
        return ratio
    end = "" if behind["shown"] else ", not shown"
    return f"{ratio} ({behind['later']:g} of {behind['pairs']} pairs, p {p_value(behind['p_holm'])}{end})"
