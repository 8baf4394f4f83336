"""Learn from a grid's result which method suits which fleet, and what such choices are worth on fleets left out.

The result is that of `raafl compare benchmarks/unequal/small.yaml`; what is learnt is the table of `algorithm: auto`
(`raafl/lab/plan/choices.json`), and its error goes to `benchmarks/results/auto.json`.

    python -m benchmarks.choices [GRID.json] [--check]
    python -m benchmarks.choices --unseen GRID/result.json [FILE.json ...]
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, mode
from typing import Any

import yaml

from benchmarks.common import Row, report, table
from raafl.config.experiment import Experiment
from raafl.config.parse import parse
from raafl.lab.compare.grid_result import add_rows, tested_by_holm
from raafl.lab.compare.report import p_value
from raafl.lab.compare.statistics import censored_median, geometric, rank_test
from raafl.lab.plan.choose import NOT_REACHED, TABLE, Candidate, Cell, FleetSummary, Table, auto, choose
from raafl.lab.plan.dry import World
from raafl.runfolder.schema import JOURNAL

GRID = Path(__file__).parent / "results" / "unequal-small.json"
BESIDE = Path(__file__).parent / "results" / "unequal-fed-buff-defaults.json"
"""Result of the grid with FedBuff's defaults alone; auto is compared with it, and does not choose it."""
JOINED = (Path(__file__).parent / "results" / "unequal-fed-raa.json",)
"""Results of further methods in the same grid, under the same rules, which are candidates, too."""
DEFAULTS = "FedBuff-10"
ALL_DEFAULTS = DEFAULTS, "FedBuff, defaults"
"""Labels of FedBuff with its defaults in that result and in the grid of unseen fleets."""
UNSEEN = Path(__file__).parent / "results" / "auto-unseen.json"
RESULT = Path(__file__).parent / "results" / "auto.json"

Key = tuple[str, str]
"""Names of a fleet and of a task."""


@dataclass(frozen=True)
class MethodRuns:
    """Runs of one method in one cell of the grid, over seeds.

    `seconds`: seconds to the target of each run; None = it failed, or did not reach it. `updates`: median of updates to
    the target; only here a run that did not reach it counts, with `NOT_REACHED` times its merged updates.
    """

    seconds: tuple[float | None, ...]
    updates: float

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> MethodRuns | None:
        """Read the runs from a row of a cell; return None if no run of the row has ended."""
        done = [run for run in row["runs"] if "error" not in run and run["updates"]]
        if not done:
            return None
        seconds = [_first(run.get("time_to", {})) for run in row["runs"]]
        shares = [(_first(run["time_to"]) or NOT_REACHED * run["time_s"]) / run["time_s"] for run in done]
        updates = [share * run["updates"] for share, run in zip(shares, done, strict=True)]
        return cls(tuple(seconds), median(updates))

    @property
    def reached(self) -> int:
        """Number of runs that have reached the target."""
        return sum(one is not None for one in self.seconds)

    @property
    def median_s(self) -> float:
        """Median seconds to the target; runs that did not reach it are later than all others, so it can be infinite."""
        found = censored_median(self.seconds)
        return math.inf if found is None else found

    def over(self, other: MethodRuns) -> float | None:
        """Divide this method's median by another's; None if neither has one, infinite if only the other has."""
        if math.isinf(other.median_s):
            return None if math.isinf(self.median_s) else 0.0
        return self.median_s / other.median_s


def _first(targets: Mapping[str, float | None]) -> float | None:
    return next(iter(targets.values()), None)


def learn(grid: Mapping[str, Any]) -> tuple[Table, dict[Key, dict[str, MethodRuns]], dict[Key, Experiment]]:
    """Learn the table of `algorithm: auto` from a grid's result; return it, and by fleet and task what was measured."""
    seen: dict[Key, dict[str, MethodRuns]] = {}
    experiments: dict[Key, Experiment] = {}
    cells, fleets = [], {}
    for cell in grid["cells"]:
        found = {row["row"]: one for row in cell["rows"] if (one := MethodRuns.of(row)) is not None}
        if len(found) < 2:
            continue
        key = cell["fleet"], cell["task"]
        command = next(run["command"] for row in cell["rows"] for run in row["runs"])
        experiments[key] = replace(parse("simulate", _options(command)).experiment, algorithm=auto())
        seen[key], fleets[key] = found, FleetSummary.of(World(experiments[key]))
        updates = {label: round(one.updates, 2) for label, one in found.items()}
        cells.append(Cell(*key, fleets[key].features, updates))
    if not cells:
        raise SystemExit("the grid's result has no cell with two methods")
    sample = next(iter(fleets.values()))
    first = next(iter(seen))[1]
    candidates = [
        candidate(label, method, grid, first, sample)
        for label, method in grid["methods"].items()
        if any(label in found for found in seen.values())
    ]
    return Table(candidates, cells), seen, experiments


def joined(grid: Mapping[str, Any], paths: Sequence[Path] = JOINED) -> dict[str, Any]:
    """Add rows of other results for the same tasks, fleets and options to a grid's result."""
    found = dict(grid)
    for path in paths:
        found = add_rows(found, path)
        found["methods"] = {**found["methods"], **json.loads(path.read_text())["methods"]}
    return found


def _options(command: str | Sequence[str]) -> list[str]:
    words = shlex.split(command) if isinstance(command, str) else list(command)
    return words[words.index("simulate") + 1 :]


def candidate(
    label: str, method: Mapping[str, Any], grid: Mapping[str, Any], task: str, fleet: FleetSummary
) -> Candidate:
    """Make a candidate for `algorithm: auto` of a grid's method, with the settings that the search on one task has found.

    `label`: label of its rows. `method`: its options. `fleet`: fleet of its cells.
    """
    rows = [row for cell in grid["cells"] if cell["task"] == task for row in cell["rows"] if row["row"] == label]
    searched = [row["searched"]["settings"] for row in rows if row.get("searched")]
    words = [*method["options"], *method["tasks"].get(task, ()), *(searched[0] if searched else ())]
    pairs = dict(zip(words[::2], words[1::2], strict=True))
    settings: dict[str, Any] = {}
    for option, value in pairs.items():
        name = option.removeprefix("--algorithm.")
        if name == option:
            continue
        value = yaml.safe_load(value) if isinstance(value, str) and "{" not in value else value
        if name.startswith("submodel."):
            settings["submodel"] = {**settings.get("submodel", {}), name.removeprefix("submodel."): value}
        elif name == "submodel":
            settings["submodel"] = {}
        else:
            settings[name] = value
    return Candidate(label, pairs["--algorithm"], settings, fleet.num_clients, fleet.steps)


def learning_rates(grid: Mapping[str, Any]) -> list[Row]:
    """Return a row for each method with the client's learning rate that its search found best, by task.

    Methods whose search had only one learning rate are left out.
    """
    found: dict[str, Row] = {}
    for cell in grid["cells"]:
        for row in cell["rows"]:
            trials = [_rate(trial["settings"]) for trial in (row.get("searched") or {}).get("trials", ())]
            if len(set(trials)) > 1:
                found.setdefault(row["row"], {})[cell["task"]] = _rate(row["searched"]["settings"])
    return [{"method": label, **rates} for label, rates in found.items()]


def _rate(settings: Sequence[str]) -> float | None:
    """Find the client's learning rate among options and their values; None if it is not set."""
    pairs = dict(zip(settings[::2], settings[1::2], strict=True))
    return float(pairs["--model.lr"]) if "--model.lr" in pairs else None


def agreement(rates: Sequence[Row]) -> dict[str, int]:
    """Count the pairs of a method and a task, and those whose best rate is the one that most methods have for the task."""
    tasks = {name for row in rates for name in row if name != "method"}
    columns = [[row[task] for row in rates if task in row] for task in sorted(tasks)]
    return {"pairs": sum(map(len, columns)), "same": sum(column.count(mode(column)) for column in columns)}


def left_out(
    table: Table, seen: Mapping[Key, Mapping[str, MethodRuns]], choose_for: Callable[[Key, Table], str]
) -> list[Row]:
    """Choose for each cell by what the other fleets have shown; return rows with its times beside the best's and FedBuff's.

    Times are medians over seeds (see `MethodRuns`), and a ratio is null where a median run did not reach the target.
    `seen`: runs of each method, by fleet and task. `choose_for`: function that chooses a label for a fleet and task by
    a table.
    """
    rows = []
    for cell in table.cells:
        others = replace(table, cells=[one for one in table.cells if one.fleet != cell.fleet])
        here = seen[cell.fleet, cell.task]
        label = choose_for((cell.fleet, cell.task), others)
        mine = here[label]
        rows.append(
            {
                "fleet": cell.fleet,
                "task": cell.task,
                "chosen": label,
                **_over_best(mine, here),
                "reached": mine.reached,
                "seeds": len(mine.seconds),
                **_beside(mine, {name: here[name] for name in _fed_buffs(table) if name in here}),
            }
        )
    return rows


def _over_best(mine: MethodRuns, here: Mapping[str, MethodRuns]) -> Row:
    """Return the best method of a cell, and the ratios to its median of the median of ``mine`` and of each method's."""
    known = _methods(here)
    best = _best(known)
    return {
        "best": best,
        "ratio": _finite(mine.over(known[best])),
        **{f"always {label}": _finite(one.over(known[best])) for label, one in known.items()},
    }


def _methods(here: Mapping[str, MethodRuns]) -> dict[str, MethodRuns]:
    """Return the runs of a cell's methods that auto may choose."""
    return {label: one for label, one in here.items() if label not in ("auto", *ALL_DEFAULTS)}


def _best(known: Mapping[str, MethodRuns]) -> str:
    return min(known, key=lambda label: (known[label].median_s, -known[label].reached))


def _beside(mine: MethodRuns, others: Mapping[str, MethodRuns]) -> Row:
    """Compare a method's runs with each other method's: ratio of medians, and number of pairs in which it is sooner."""
    row: Row = {"seconds": {"auto": list(mine.seconds), **{name: list(one.seconds) for name, one in others.items()}}}
    for label, other in others.items():
        name, test = label.lower().replace(", ", "-"), rank_test([(mine.seconds, other.seconds)])
        row[f"over_{name}"] = _finite(mine.over(other))
        row[f"sooner_{name}"] = "" if test is None else f"{test.pairs - test.later:g} of {test.pairs}"
    return row


def _by_other_seeds(here: Mapping[str, MethodRuns]) -> float | None:
    """Return the time over the best of one who takes, for each seed, the method that is best by the other seeds; None = never.

    It is what the choice could be worth: the best of a cell was found by the seeds that it is measured with.
    """
    known = _methods(here)
    times = {label: [math.inf if one is None else one for one in runs.seconds] for label, runs in known.items()}
    taken = []
    for seed in range(min(map(len, times.values()))):
        label = min(times, key=lambda one: sum(times[one][:seed] + times[one][seed + 1 :]))
        taken.append(known[label].seconds[seed])
    return _finite(MethodRuns(tuple(taken), math.nan).over(known[_best(known)]))


def _finite(ratio: float | None) -> float | None:
    return None if ratio is None or math.isinf(ratio) else ratio


def _fed_buffs(table: Table) -> list[str]:
    """Return the labels of FedBuff with the whole model: that of the grid, and that with default settings."""
    return [
        *(one.label for one in table.candidates if one.method == "fed_buff" and "submodel" not in one.settings),
        DEFAULTS,
    ]


def summary(rows: Sequence[Row], seen: Mapping[Key, Mapping[str, MethodRuns]], labels: Sequence[str]) -> dict[str, Any]:
    """Summarise choices: median and worst ratio of auto and of each method, and auto beside FedBuff.

    A cell whose median run did not reach the target counts as worse than all others, so a median or worst ratio may be
    null. Beside FedBuff the geometric mean and its interval are over cells in which both medians reached the target;
    the rank test is over all runs of all cells, compared within each. `rows`: result of `left_out`. `labels`: labels of
    the methods.
    """
    always = {label: _worst([row[f"always {label}"] for row in rows if f"always {label}" in row]) for label in labels}
    fed_buffs = {
        label: f"over_{label.lower()}"
        for label in dict.fromkeys([*labels, DEFAULTS])
        if any(f"over_{label.lower()}" in row for row in rows)
    }
    tests = {label: rank_test([_pair(seen, row, label) for row in rows]) for label in fed_buffs}
    tested = tested_by_holm(tests)
    over = {}
    for label, name in fed_buffs.items():
        ratios = [row[name] for row in rows if row.get(name)]
        over[name] = {**geometric(ratios), "cells": len(ratios), **tested[label]}
    return {
        **_worst([row["ratio"] for row in rows]),
        "cells": len(rows),
        "over": over,
        "always": {label: one for label, one in always.items() if one},
    }


def _pair(seen: Mapping[Key, Mapping[str, MethodRuns]], row: Row, label: str) -> tuple[Sequence[float | None], ...]:
    here = seen[row["fleet"], row["task"]]
    return here[row["chosen"]].seconds, here[label].seconds if label in here else ()


def _worst(ratios: Sequence[float | None]) -> dict[str, float | None]:
    """Return the median and the largest of ratios, where null is larger than all; empty without ratios."""
    if not ratios:
        return {}
    known = [math.inf if one is None else one for one in ratios]
    return {"median": _finite(median(known)), "worst": _finite(max(known))}


def rules(shown: Mapping[str, Any]) -> list[Row]:
    """Return a row for auto, and one for each method if it is always taken, the best first; ``shown``: result of `summary`."""
    auto_row = {"rule": "auto", "median": _said(shown["median"]), "worst": _said(shown["worst"])}
    for name, one in shown["over"].items():
        if one["low"] is not None:
            auto_row[name] = f"{one['ratio']:.2f} ({one['low']:.2f} to {one['high']:.2f})"
        if one["p_holm"] is not None:
            auto_row[name.replace("over_", "sooner_")] = (
                f"{one['pairs'] - one['later']:g} of {one['pairs']}, p {p_value(one['p_holm'])}"
            )
    always = sorted(
        shown["always"].items(), key=lambda item: (item[1]["median"] or math.inf, item[1]["worst"] or math.inf)
    )
    return [
        auto_row,
        *({"rule": f"always {label}", **{name: _said(one) for name, one in each.items()}} for label, each in always),
    ]


def _said(ratio: float | None) -> str:
    return "not reached" if ratio is None else f"{ratio:.2f}"


def unseen(paths: Sequence[Path]) -> list[Row]:
    """Return a row for each cell of grids with auto as a row: what it chose, and its time as a ratio to the others'.

    `paths`: results of `raafl compare benchmarks/unequal/auto.yaml`, each beside its run folders, and files with
    earlier rows of this function; of a method that several have, the first one counts.
    """
    cells: dict[Key, dict[str, tuple[MethodRuns | None, Row]]] = {}
    for path in paths:
        for key, label, runs, choice in _measured(path):
            cells.setdefault(key, {}).setdefault(label, (runs, choice))
    rows = []
    for (fleet, task), known in cells.items():
        here = {label: runs for label, (runs, _) in known.items() if runs is not None}
        if "auto" not in here:
            continue
        rows.append(
            {
                "fleet": fleet,
                "task": task,
                "seeds": len(here["auto"].seconds),
                "reached": here["auto"].reached,
                **known["auto"][1],
                **_over_best(here["auto"], here),
                "other seeds": _by_other_seeds(here),
                **_beside(here["auto"], {label: one for label, one in here.items() if label != "auto"}),
            }
        )
    return rows


def _measured(path: Path) -> Iterator[tuple[Key, str, MethodRuns | None, Row]]:
    """Yield cell, method, runs, and what was chosen where the method is auto; see `unseen`."""
    found = json.loads(path.read_text())
    for cell in found.get("cells", ()):
        for row in cell["rows"]:
            choice = _choice(path.parent, row) if row["row"] == "auto" else {}
            yield (cell["fleet"], cell["task"]), row["row"], MethodRuns.of(row), choice
    for row in (row for row in found.get("rows", ()) if "seconds" in row):
        choice = {name: row[name] for name in ("chosen", "adjusted")}
        for label, seconds in row["seconds"].items():
            yield (row["fleet"], row["task"]), label, MethodRuns(tuple(seconds), math.nan), choice


def _choice(folder: Path, row: Mapping[str, Any]) -> Row:
    """Return the methods that the runs of a row chose, and how often each adjusted them in the median."""
    ended = [run for run in row["runs"] if "error" not in run]
    journals = [(folder / run["folder"] / JOURNAL).read_text().splitlines() for run in ended]
    adjusted = [sum('"event":"adjusted"' in line for line in journal) for journal in journals]
    methods = sorted({json.loads(journal[0])["chosen"]["method"] for journal in journals})
    return {"chosen": " or ".join(methods), "adjusted": median(adjusted) if adjusted else 0}


def unseen_rules(rows: Sequence[Row]) -> list[Row]:
    """Return a row for auto, for the best by other seeds, and for each method if it is always taken: ratios to the best.

    `rows`: result of `unseen`.
    """
    names = {
        "auto": "ratio",
        "the best by the other seeds": "other seeds",
        **{name: name for row in rows for name in row if name.startswith("always")},
    }
    found = []
    for rule, name in names.items():
        ratios = [row[name] for row in rows if name in row]
        if ratios:
            found.append(
                {"rule": rule, "cells": len(ratios), **{key: _said(one) for key, one in _worst(ratios).items()}}
            )
    return found


def by_fleet(name: str, rows: Sequence[Row]) -> Row:
    """Compare auto with FedBuff's defaults: a geometric mean over fleets, each with the mean over its tasks.

    The rank test is over all runs, compared within each cell; one that did not reach the target is later than all
    others. `rows`: rows of cells; a ratio is missing or null where a median run did not reach the target.
    """
    test = rank_test([(row["seconds"]["auto"], row["seconds"][_defaults(row)]) for row in rows])
    assert test is not None, f"no cell of the fleets {name} has runs of auto and of FedBuff's defaults"
    logs: dict[str, list[float]] = {}
    for row in rows:
        if row.get("over_fedbuff-defaults"):
            logs.setdefault(row["fleet"], []).append(math.log(row["over_fedbuff-defaults"]))
    found = geometric([math.exp(fmean(values)) for values in logs.values()])
    return {
        "fleets": name,
        "number": len(logs),
        "cells": sum(bool(row.get("over_fedbuff-defaults")) for row in rows),
        **found,
        "slower": sum(fmean(v) > 0 for v in logs.values()),
        "sooner": f"{test.pairs - test.later:g} of {test.pairs}",
        "p": test.p,
    }


def _defaults(row: Row) -> str:
    """Find the label of FedBuff with default settings among a cell's rows."""
    return next(label for label in row["seconds"] if label in ALL_DEFAULTS)


def all_fleets(rows: Sequence[Row], left: Sequence[Row]) -> list[Row]:
    """Return rows of `by_fleet` for fleets that the table does not know, for those left out of it, and for all of them."""
    known = [{**row, "over_fedbuff-defaults": row["over_fedbuff-10"]} for row in left]
    groups = {"unknown to the table": rows, "left out of it in turn": known, "all of them": [*rows, *known]}
    return [by_fleet(name, group) for name, group in groups.items()]


def _short(row: Row) -> Row:
    """Return a row for printing, without its runs and the methods that are always taken."""
    return {name: value for name, value in row.items() if name != "seconds" and not name.startswith("always")}


def main(argv: Sequence[str] | None = None) -> None:
    """Write the table and its error; with ``--check`` only print them."""
    parser = ArgumentParser(prog="python -m benchmarks.choices")
    parser.add_argument("grid", type=Path, nargs="?", default=GRID, help="result of the grid")
    parser.add_argument(
        "--unseen", type=Path, nargs="+", help="results of grids with auto as a row: write results/auto-unseen.json"
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(argv)
    if options.unseen is not None:
        rows = unseen(options.unseen)
        left = [row for row in json.loads(RESULT.read_text())["rows"] if row["part"] == "cell"]
        groups, rules_of = all_fleets(rows, left), unseen_rules(rows)
        print(table([_short(row) for row in rows]), table(rules_of), table(groups), sep="\n\n")
        if not options.check:
            parts = [{"part": "cell", **row} for row in rows] + [{"part": "fleets", **row} for row in groups]
            parts += [{"part": "rule", **row} for row in rules_of]
            UNSEEN.write_text(json.dumps(report(parts), indent=2) + "\n")
        return
    grid = json.loads(options.grid.read_text())
    grid = joined(grid) if options.grid == GRID else grid
    found, seen, experiments = learn(grid)
    for cell in json.loads(BESIDE.read_text())["cells"] if BESIDE.is_file() else ():
        for row in cell["rows"]:
            if (key := (cell["fleet"], cell["task"])) in seen and (one := MethodRuns.of(row)) is not None:
                seen[key][DEFAULTS] = one
    rows = left_out(found, seen, lambda key, others: choose(experiments[key], others).candidate.label)
    shown = summary(rows, seen, [one.label for one in found.candidates])
    print(table([_short(row) for row in rows]))
    print(json.dumps(shown, indent=1))
    if options.check:
        return
    rates = learning_rates(grid)
    print(table(rates))
    held_out = {name: shown[name] for name in ("median", "worst", "cells")}
    found = replace(found, held_out=held_out, rates=agreement(rates))
    made = {"made": {"by": "python -m benchmarks.choices", "grid": grid["name"], "date": grid.get("date")}}
    TABLE.write_text(json.dumps({**made, **found.to_json()}, indent=1) + "\n")
    parts = [{"part": "cell", **row} for row in rows] + [{"part": "rule", **row} for row in rules(shown)]
    parts += [{"part": "rate", **row} for row in rates]
    # date and processor of the runs, not of today's summary
    of_runs = {"date": grid["date"], "hardware": {"cpu": grid["hardware"]["processor"]}}
    made_of = {**report(parts, grid=grid["name"], summary=shown), **of_runs}
    RESULT.write_text(json.dumps(made_of, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
