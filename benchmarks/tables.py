"""Write the tables of docs from committed results: python -m benchmarks.tables [--check].

A table stands between `<!-- table: benchmarks/results/NAME.json -->` and `<!-- end of table -->`; what is between is replaced.
Results of `raafl compare` need no more; `; also: best, Gini` adds columns. For the result of a grid the marker also names
the task, whose times it shows (`; task: mnist-mlp`). For the result of a benchmark the marker has a name from tables.yaml
(`<!-- table: plan -->`), which gives the file (`result`) and what to show of it:

- `columns: model, flops:.2f as FLOPs`: keys of a row, with a format and a title where wanted;
- `across: rate of ratio:.2f`: a column for each value of one key, filled with another key; rows with equal columns are one;
- `where: part=comparison, rate=0.5`: rows with these values alone;
- `alike: one row`: rows that differ in their first column alone are one row, with all names in it.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import machine_of, paper_file
from benchmarks.unequal_picture import RESULT, beside_grid
from raafl.config.targets import exact
from raafl.lab.compare.comparison import read
from raafl.lab.compare.grid_result import anew, load_grid, overall
from raafl.lab.compare.report import Cells, cells, p_value, quoted, short, time_cell, warnings
from raafl.lab.compare.results import with_holm
from raafl.lab.compare.runs import machine_name
from raafl.rules import CURRENT, recorded_revision

ROOT = Path(__file__).parent.parent
_TABLE = re.compile(r"(<!-- table: (\S+?)(?:; ([^\n]*))? -->\n).*?(<!-- end of table -->)", re.S)
_COLUMN = re.compile(r"(?P<key>[^\s:]+)(?::(?P<format>\S+))?(?: as (?P<title>.+))?")


# columns of a comparison that a page shows; a marker adds others (`; also: MB, utilisation`)
_SHOWN = ("row", "settings", "published")
_RULES = ROOT / "benchmarks" / "results" / "rules.json"


def _wrapped(text: str) -> str:
    """Wrap a sentence to lines under 120 characters."""
    return "\n".join(textwrap.wrap(text, 118, break_on_hyphens=False))


def markdown(table: Cells) -> str:
    """Format a table as Markdown."""
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in table]
    return "\n".join([lines[0], "| " + " | ".join("---" for _ in table[0]) + " |", *lines[1:]])


def written(result: dict[str, Any], source: str, also: str = "", up: str = "../../") -> str:
    """Format a comparison's result for a page: source, table, and rows that were not run.

    `source`: file of the result, from the root. `also`: titles of additional columns, separated by commas. `up`: path
    from the page's folder to the root.
    """
    seeds = max(len(row["seeds"]) for row in result["rows"])
    seeds_shown = f"Means over {seeds} seeds" if seeds > 1 else "One seed"
    lines = [_measured(_file_of(result["name"]), result), f"{seeds_shown}; [all columns and seeds]({up}{source})."]
    has_targets = any(row["time_to"] for row in result["rows"])
    lines += [*map(_wrapped, warnings(result)), *_since(result)] if has_targets or "best" in also else []
    missing = ""
    if result.get("not_run"):
        missing = _wrapped(
            f"Not run (`raafl compare {_file_of(result['name'])}` runs them): {'; '.join(result['not_run'])}."
        )
    return "\n\n".join(filter(None, ["\n".join(lines), markdown(_chosen_cells(result, also)), missing]))


def _since(result: dict[str, Any]) -> list[str]:
    """Return a sentence on the present interval of evaluations, if the result is older than it."""
    file, variant = paper_file(result["name"])
    if result.get("eval_every") is not None or not (ROOT / file).is_file():
        return []
    every = read(ROOT / file, variant).eval_every
    return [] if every is None else [f"These runs were made before the file had `eval_every: {every}`."]


def _chosen_cells(result: dict[str, Any], also: str) -> Cells:
    """Select the columns of a comparison that a page shows; a difference whose interval excludes 0 is bold."""
    table, metric = cells(result), result["metric"]
    wanted = {*_SHOWN, metric, *(title.strip() for title in also.split(","))}
    prefixes = ("minus ", "s to ")
    places = [i for i, title in enumerate(table[0]) if title in wanted or title.startswith(prefixes)]
    gaps = [i for i, title in enumerate(table[0]) if title.startswith("minus ")]  # none where there is one row
    failed = [
        f"{line[0]} ({found[0]})" if (found := re.findall("[0-9]+ failed", line[-1])) else line[0] for line in table
    ]
    for line, label in zip(table, failed, strict=True):
        line[0] = label
        for gap in gaps:
            if line is not table[0] and "±" in line[gap]:
                shown = not line[gap].endswith(" (not shown)")
                line[gap] = f"**{line[gap]}**" if shown else line[gap].removesuffix(" (not shown)")
            line[gap] = line[gap].removesuffix(" (one seed)")
    return [[line[i] for i in places] for line in table]


def _measured(file: str, result: dict[str, Any]) -> str:
    """Return a sentence on a result's command, day, machine and commit."""
    made = f"{machine_name(result['hardware'])}, commit `{(result['commit'] or 'unknown')[:8]}`"
    rules = recorded_revision(result)
    made += "" if rules == CURRENT else f", `rules: {rules}`{_moved(result['name'], rules)}"
    return _wrapped(f"`raafl compare {file}`, {result['date'][:10]} ({made}).")


def _moved(name: str, rules: int) -> str:
    """Return a sentence on whether tasks take as long under the present rules as under a result's; "" = not known."""
    rows = json.loads(_RULES.read_text(encoding="utf-8"))["rows"]
    found = [row["moved"] for row in rows if (row["result"], row["rules"]) == (name, rules)]
    if not found or None in found:
        return ""
    most = max(found)
    return (
        "; the present rules give the same task times"
        if most < 1e-9
        else f"; by the present rules a task takes up to {most:.1%} more or less time"
    )


def _file_of(name: str) -> str:
    """Return a result's comparison file, and the option that names its variant."""
    if (ROOT / "benchmarks" / f"{name}.yaml").is_file():
        return f"benchmarks/{name}.yaml"
    file, variant = paper_file(name)
    return file + (f" --variant {variant}" if variant else "")


def task_of(result: dict[str, Any], task: str) -> str:
    """Format a grid's times to the first target for a task, methods by fleets, with what the intervals show for each fleet."""
    beside = ""
    if len(result["methods"]) == 1:  # a row that was measured later, on its own
        small = load_grid(RESULT)
        beside = (
            f"\nThe rows beside {', '.join(result['methods'])}: {_measured('benchmarks/unequal/small.yaml', small)}"
        )
        result = beside_grid(result)
    cells = {cell["fleet"]: cell for cell in result["cells"] if cell["task"] == task}
    rows = {(fleet, row["row"]): row for fleet, cell in cells.items() for row in cell["rows"]}
    target = exact(result["tasks"][task]["targets"][0])
    table = [["s to " + target, *cells]]
    for label in result["methods"]:
        found = [rows.get((fleet, label)) for fleet in cells]
        table.append([label, *("not run" if row is None else time_cell(row["time_to"][target]) for row in found)])
    shown = "\n".join(f"- `{fleet}`: {_shown_of(cell)}" for fleet, cell in cells.items())
    missing = sum(len(seeds) for cell in cells.values() for seeds in cell["not_run"].values())
    verdicts = [row["accepted"] for row in rows.values()]
    grid = f"benchmarks/unequal/{result['name'].removeprefix('unequal-')}.yaml"
    source = f"{_measured(grid, result)}{beside}\nEach time is the median over {len(result['seeds'])} seeds."
    source += f"\nNot run yet: {missing} of the runs." if missing else ""
    source += f"\n{verdicts.count(True)} of {len(verdicts)} rows were accepted (runs that were repeated gave the same results)"
    source += f", {verdicts.count(False)} refused."
    if any(warnings(cell) for cell in cells.values()):
        source += (
            "\nMethods were measured by their own versions, so at different distances in time.\n"
            "Where two times differ by less than such a distance, that alone may be why."
        )
    return "\n\n".join([source, markdown(table), shown, _over_fleets(list(cells.values()))])


def _shown_of(cell: dict[str, Any]) -> str:
    """Return a sentence on which rows of a cell were later than the first in every pair of runs."""
    behind = {row["row"]: row["behind"] for row in cell["rows"] if row["behind"] is not None}
    if not behind:
        return "no method reached the target."
    first = next(iter(behind.values()))["of"]
    behind.pop(first)
    groups = {
        "shown to be slower": [label for label, one in behind.items() if one["shown"]],
        "later in each pair of runs": [
            label for label, one in behind.items() if not one["shown"] and one["later"] == one["pairs"]
        ],
    }
    parts = [f"{what}: {', '.join(map(quoted, labels))}" for what, labels in groups.items() if labels]
    return "; ".join([f"{quoted(first)} is first", *parts]) + "."


def _over_fleets(cells: list[dict[str, Any]]) -> str:
    """Format the rank tests over all fleets of a task, each method beside the baseline."""
    reference = cells[0]["reference"]
    tests = overall(cells, reference)
    head = ["over all fleets", f"sooner than {reference}, of all pairs of runs", "p", "shown"]
    rows = [
        [
            label,
            f"{one['pairs'] - one['later']:g} of {one['pairs']}",
            p_value(one["p_holm"]),
            "yes" if one["shown"] else "no",
        ]
        for label, one in tests.items()
        if one["pairs"]
    ]
    return markdown([head, *rows])


def chosen(result: dict[str, Any], parts: dict[str, str]) -> str:
    """Format a benchmark's result as a table, with the columns and rows that an entry of tables.yaml selects."""
    columns = [_column(text) for text in parts["columns"].split(", ")]
    wanted = [text.split("=", 1) for text in parts["where"].split(", ")] if "where" in parts else []
    rows = [row for row in result["rows"] if all(str(row.get(key)) == value for key, value in wanted)]
    if not rows:
        return f"`{parts['result']}` has no rows with {parts['where']} yet."
    head = [column["title"] or column["key"] for column in columns]
    if "across" in parts:
        key, _, text = parts["across"].partition(" of ")
        values, table = list(dict.fromkeys(row[key] for row in rows)), {}
        for row in rows:
            first = tuple(_shown(row, column) for column in columns)
            table.setdefault(first, {})[row[key]] = _shown(row, _column(text))
        head += [str(value) for value in values]
        lines = [[*first, *(cells.get(value, "") for value in values)] for first, cells in table.items()]
    else:
        lines = [[_shown(row, column) for column in columns] for row in rows]
    if "alike" in parts:
        names: dict[tuple[str, ...], list[str]] = {}
        for first, *others in lines:
            names.setdefault(tuple(others), []).append(first)
        lines = [[", ".join(firsts), *others] for others, firsts in names.items()]
    measured = {(row.get("date", result["date"])[:10], row.get("machine", machine_of(result))) for row in rows}
    moments = " and ".join(f"{day} on {machine}" for day, machine in sorted(measured))
    return f"Measured {moments}.\n\n{markdown([head, *lines])}"


def _column(text: str) -> dict[str, str]:
    found = _COLUMN.fullmatch(text)
    assert found, f"no column: {text}"
    return found.groupdict()


def _shown(row: dict[str, Any], column: dict[str, str]) -> str:
    value = row.get(column["key"])
    if value is None:
        return ""
    if column["format"]:
        return format(value, column["format"])
    return short(value) if isinstance(value, float) else str(value)


def _corrected(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result whose tests are computed by the present rules from its runs, if an older version wrote it."""
    if "cells" in result:
        return anew(result)
    rows = result["rows"] if isinstance(result.get("rows"), list) else []
    if not any(isinstance(row, dict) and "row" in row for row in rows):
        return result
    gaps = with_holm({row["row"]: row.get("difference") for row in rows})
    return {**result, "rows": [row | {"difference": gaps[row["row"]]} for row in rows]}


def renewed(text: str, up: str = "../../") -> str:
    """Return a page's text with each of its tables made anew; ``up`` leads from the page's folder to the root."""
    named = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

    def anew(found: re.Match[str]) -> str:
        shown = named.get(found[2], {"result": found[2]})
        result, spec = _corrected(json.loads((ROOT / shown["result"]).read_text())), found[3] or ""
        if "columns" in shown:
            text = chosen(result, shown)
        elif spec.startswith("also: ") or not spec:
            text = written(result, shown["result"], spec[6:], up)
        else:
            text = task_of(result, spec.removeprefix("task: "))
        return f"{found[1]}\n{text}\n\n{found[4]}"

    return _TABLE.sub(anew, text)


def pages() -> list[Path]:
    """List the pages that may have tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def renewed_page(page: Path) -> str:
    """Return the text of one of this project's pages with each of its tables made anew."""
    return renewed(page.read_text(), "../" * (len(page.relative_to(ROOT).parts) - 1))


def main() -> int:
    """Write the pages; with --check only name those that differ, and return 1 if any does."""
    stale = [page for page in pages() if renewed_page(page) != page.read_text()]
    for page in stale:
        print(f"{page.relative_to(ROOT)}: {'differs from its results' if '--check' in sys.argv else 'written'}")
        if "--check" not in sys.argv:
            page.write_text(renewed_page(page))
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    raise SystemExit(main())
