"""Compute the result of a grid: for each task and fleet the methods' figures, ranks and Pareto front."""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from raafl.atomic_file import atomic_file
from raafl.errors import BadInput
from raafl.lab.compare.comparison import Options
from raafl.lab.compare.grid import Cell, Grid, GridRuns, replayed_seeds
from raafl.lab.compare.processes import in_processes, log_of, replay, replay_difference
from raafl.lab.compare.report import Cells, difference, p_value, result, short, time_cell, with_interval
from raafl.lab.compare.results import differences, rules_of, with_holm
from raafl.lab.compare.runs import Run, Runner, provenance, resolve
from raafl.lab.compare.statistics import ALPHA, RankTest, holm, rank_test
from raafl.runfolder.schema import JOURNAL
from raafl.runfolder.seals import file_digest

SCHEMA = 2
_BY_INTERVALS = 1  # number of an older format, whose means left out seeds that did not reach the target
Row = Mapping[str, Any]


def grid_result(grid: Grid, runs: GridRuns, folder: Path) -> dict[str, Any]:
    """Return the result of a grid as JSON; for each task and fleet it also lists runs that are missing."""
    cells = [_cell(grid, runs, cell, folder) for cell in grid.cells]
    return {
        "schema": SCHEMA,
        "name": grid.name,
        "about": grid.about,
        **provenance(),
        "rules": rules_of(row for cell in cells for row in cell["rows"]),
        "seeds": list(grid.seeds),
        "search": asdict(grid.search),
        "tasks": {name: asdict(task) for name, task in grid.tasks.items()},
        "fleets": {name: asdict(fleet) for name, fleet in grid.fleets.items()},
        "methods": {name: asdict(method) for name, method in grid.methods.items()},
        "cells": cells,
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
    """Add the field ``accepted`` to a row: True = all replays gave equal models, False = one did not, None = some are missing."""
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
    """Return a method's sort key: by its median time or, if too few seeds reached the target, by how many did."""
    return (math.inf, -reached) if median_s is None else (median_s, 0.0)


def _first(targets: Mapping[str, Any], key: str | None = None) -> float | None:
    value = next(iter(targets.values()), None)
    found: float | None = value[key] if key is not None and value is not None else value
    return found


def _rank(values: Mapping[str, float | None], label: str) -> int:
    """Compute a row's rank as 1 + the number of rows with smaller values; rows without a value share the last rank."""
    own = values[label]
    return 1 + sum(value is not None and (own is None or value < own) for value in values.values())


def _dominates(one: tuple[float | None, float | None], other: tuple[float | None, float | None]) -> bool:
    """Check whether a row is at most another one in both time and bytes, and less in one of them; None counts as infinite."""
    ours, theirs = ([math.inf if value is None else value for value in pair] for pair in (one, other))
    return all(a <= b for a, b in zip(ours, theirs, strict=True)) and ours != theirs


def _behind(rows: Sequence[Row], leader: str) -> dict[str, dict[str, Any]]:
    """Compare each row's times to the first target with the times of the row ``leader``, by a rank test.

    Returns:
        For each row: how many of its seeds reached the target; the ratio of its median time to the leader's; in how
        many pairs of runs it is later; and two p-values of the Mann-Whitney test, uncorrected and with Holm's
        correction for all pairs of rows of the cell. The leader itself has no test.
    """
    # the same times have made this row the leader, as they could have made any: a correction for the tests with it alone
    # would show a difference between ten equal rows in a tenth of all cells
    times = {row["row"]: times_of(row) for row in rows}
    medians = {row["row"]: _first(row["time_to"], "median_s") for row in rows}
    pairs = ((label, other) if other == leader else (other, label) for other, label in combinations(times, 2))
    tested = tested_by_holm({(one, other): rank_test([(times[one], times[other])]) for one, other in pairs})
    return {
        label: {
            "of": leader,
            "reached": sum(one is not None for one in own),
            "seeds": len(own),
            "ratio": _ratio(medians[label], medians[leader]),
            **tested[label, leader],
        }
        for label, own in times.items()
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


def tested_by_holm(tests: Mapping[Any, RankTest | None]) -> Mapping[Any, dict[str, Any]]:
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
        failed = f" ({row['failed']} failed)" if row["failed"] else ""  # a mean of the others
        line += [with_interval(row.get("final")) + failed, with_interval(row.get("best"))]
        line.append(difference(row.get("difference")))
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
    """Format a row's time as a multiple of the fastest row's, with the rank test: `1.8 x (9 of 9 pairs, p 0.1)`."""
    if behind is None or behind["of"] == label:
        return ""
    ratio = "never" if behind["ratio"] is None else f"{short(behind['ratio'])} x"
    if behind["p_holm"] is None:
        return ratio
    end = "" if behind["shown"] else ", not shown"
    return f"{ratio} ({behind['later']:g} of {behind['pairs']} pairs, p {p_value(behind['p_holm'])}{end})"


def verify_grid(grid: Grid, path: Path, share: float, folder: Path, jobs: int) -> Iterator[dict[str, Any]]:
    """Check another person's result: train a random share of its runs anew and compare the models with it.

    Each new run is also replayed (computed again from its event log). Yields for each run its `cell` (task and fleet),
    `row` and `seed`, and `why`: None if the journal and the model have the digests in the result, else what differs.
    Nothing in the result is executed: the grid's own files configure the runs, and a method's settings are taken from
    the result only if the grid's search would try them.

    Raises:
        BadInput: the file has no result, or the result of another grid.
    """
    asked = _drawn(grid, load_grid(path), share)
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
            yield verdict | {"why": replay_difference(said, log_of(outcome.folder))}


def _drawn(grid: Grid, found: Mapping[str, Any], share: float) -> dict[Run, tuple[str, Mapping[str, Any]]]:
    """Draw a share of a result's runs at random to repeat them; return each with its cell's name and its entry in the result."""
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
    for cell, row, run in random.Random(0).sample(listed, math.ceil(share * len(listed))):
        settings = _settings(grid, cell, row)
        key = (str(cell["task"]), str(cell["fleet"]))
        comparison = grid.only([row["row"]]).comparison(key, {row["row"]: settings})
        options = comparison.options_of(row["row"])
        (made,) = resolve(comparison.config, row["row"], options, [int(run["seed"])])
        asked[made] = ("--".join(key), run)
    return asked


def _settings(grid: Grid, cell: Mapping[str, Any], row: Mapping[str, Any]) -> Options:
    """Read a row's settings from a result; raise `BadInput` unless the grid's search would try them."""
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
