"""Write the tables of docs from committed results: python -m benchmarks.tables [--check].

A table stands between `<!-- table: benchmarks/results/NAME.json -->` and `<!-- end of table -->`; what is between is replaced.
Results of `raafl compare` need no more. For the result of a grid the marker also names the task, whose times it shows
(`; task: mnist-mlp`), or a cell (`; cell: mnist-mlp, gpus`). For the result of a benchmark the marker has a name from
tables.yaml (`<!-- table: plan -->`), which gives the file (`result`) and what to show of it:

- `columns: model, flops:.2f as FLOPs`: keys of a row, with a format and a title where wanted;
- `across: rate of ratio:.2f`: a column for each value of one key, filled with another key; rows with equal columns are one;
- `where: part=comparison, rate=0.5`: rows with these values alone.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from raafl.compare.grid_result import cell_table
from raafl.compare.provenance import machine_name
from raafl.compare.tables import Cells, cells, quoted, short, time_cell

ROOT = Path(__file__).parent.parent
_TABLE = re.compile(r"(<!-- table: (\S+?)(?:; ([^\n]*))? -->\n).*?(<!-- end of table -->)", re.S)
_COLUMN = re.compile(r"(?P<key>[^\s:]+)(?::(?P<format>\S+))?(?: as (?P<title>.+))?")


def markdown(table: Cells) -> str:
    """Return a table as Markdown."""
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in table]
    return "\n".join([lines[0], "| " + " | ".join("---" for _ in table[0]) + " |", *lines[1:]])


def written(result: dict[str, Any]) -> str:
    """Return a result as text for a page: its source, the table, and the rows that were not run."""
    seeds = max(len(row["seeds"]) for row in result["rows"])
    source = _measured(_file_of(result["name"]), result) + "\n"
    if seeds > 1:
        source += f"Values are means over {seeds} seeds; the number after ± is half the width of the 95 % confidence interval.\n"
        source += 'A difference is marked "not shown" if its interval contains 0.'
    else:
        source += "Each value is of one seed."
    missing = ""
    if result.get("not_run"):
        missing = (
            f"These rows have not been run; `raafl compare {_file_of(result['name'])}` without `--rows` runs them:\n"
        )
        missing += "; ".join(result["not_run"]) + "."
    return "\n\n".join(filter(None, [source, markdown(cells(result)), missing]))


def _measured(file: str, result: dict[str, Any]) -> str:
    """Return a sentence on the command, the day, the machine and the commit of a result."""
    made = f"{machine_name(result['hardware'])}, commit `{(result['commit'] or 'unknown')[:8]}`"
    return f"Measured with `raafl compare {file}` on {result['date'][:10]} ({made})."


def _file_of(name: str) -> str:
    """Return a result's comparison file, and the variant of it where the name is FILE-VARIANT."""
    folder = Path("configs/papers")
    for place in [len(name), *(found.start() for found in reversed(list(re.finditer("-", name))))]:
        if (ROOT / folder / f"{name[:place]}.yaml").is_file():
            variant = name[place + 1 :]
            return f"{folder}/{name[:place]}.yaml" + (f" --variant {variant}" if variant else "")
    return f"{folder}/{name}.yaml"


def task_of(result: dict[str, Any], task: str) -> str:
    """Return the times to the first target of a task of a grid, methods by fleets, and what the intervals show of each fleet."""
    cells = {cell["fleet"]: cell for cell in result["cells"] if cell["task"] == task}
    rows = {(fleet, row["row"]): row for fleet, cell in cells.items() for row in cell["rows"]}
    target = f"{result['tasks'][task]['targets'][0]:g}"
    table = [["s to " + target, *cells]]
    for label in result["methods"]:
        found = [rows.get((fleet, label)) for fleet in cells]
        table.append([label, *("not run" if row is None else time_cell(row["time_to"][target]) for row in found)])
    shown = "\n".join(f"- On the fleet `{fleet}` {_shown_of(cell)}" for fleet, cell in cells.items())
    missing = sum(len(seeds) for cell in cells.values() for seeds in cell["not_run"].values())
    verdicts = [row["accepted"] for row in rows.values()]
    grid = f"benchmarks/unequal/{result['name'].removeprefix('unequal-')}.yaml"
    source = f"{_measured(grid, result)}\nEach time is the median over {len(result['seeds'])} seeds."
    source += f"\nNot run yet: {missing} of the runs." if missing else ""
    source += f"\n{verdicts.count(True)} of {len(verdicts)} rows were accepted (runs that were repeated gave the same results)"
    source += f", {verdicts.count(False)} refused."
    return "\n\n".join([source, markdown(table), shown])


def _shown_of(cell: dict[str, Any]) -> str:
    """Return a sentence on which rows a cell's intervals show to be slower than its first."""
    behind = {row["row"]: row["behind"] for row in cell["rows"] if row["behind"] is not None}
    if not behind:
        return "no method reached the target."
    first = next(iter(behind.values()))["of"]
    slower = [f"{quoted(label)} ({one['ratio']:.1f} times)" for label, one in behind.items() if one["shown"]]
    never = [quoted(label) for label, one in behind.items() if not one["reached"]]
    level = [quoted(label) for label, one in behind.items() if label != first and not one["shown"] and one["reached"]]
    parts = [f"{quoted(first)} has the best median time to the target."]
    parts += [f"Shown to be slower: {', '.join(slower)}."] if slower else []
    parts += [f"No difference from {quoted(first)} is shown for: {', '.join(level)}."] if level else []
    parts += [f"Never reached the target: {', '.join(never)}."] if never else []
    return "\n  ".join(parts)


def cell_of(result: dict[str, Any], spec: str) -> str:
    """Return all columns of one cell of a grid, `TASK, FLEET`."""
    task, fleet = spec.split(", ")
    cell = next(cell for cell in result["cells"] if (cell["task"], cell["fleet"]) == (task, fleet))
    return markdown(cell_table(cell))


def chosen(result: dict[str, Any], parts: dict[str, str]) -> str:
    """Return the table of a benchmark's result with the columns and rows that an entry of tables.yaml asks for."""
    columns = [_column(text) for text in parts["columns"].split(", ")]
    wanted = [text.split("=", 1) for text in parts["where"].split(", ")] if "where" in parts else []
    rows = [row for row in result["rows"] if all(str(row.get(key)) == value for key, value in wanted)]
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
    return f"Measured {result['date'][:10]} on {result['hardware']['cpu']}.\n\n{markdown([head, *lines])}"


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


def renewed(text: str) -> str:
    """Return a page with each of its tables made anew."""
    named = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

    def anew(found: re.Match[str]) -> str:
        shown = named.get(found[2], {"result": found[2]})
        result, spec = json.loads((ROOT / shown["result"]).read_text()), found[3] or ""
        if "columns" in shown:
            text = chosen(result, shown)
        elif spec:
            text = (cell_of if spec.startswith("cell") else task_of)(result, spec[6:])
        else:
            text = written(result)
        return f"{found[1]}\n{text}\n\n{found[4]}"

    return _TABLE.sub(anew, text)


def pages() -> list[Path]:
    """Return the pages that may have tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> int:
    """Write the pages; with --check only name those that differ, and return 1 where any does."""
    stale = [page for page in pages() if renewed(page.read_text()) != page.read_text()]
    for page in stale:
        print(f"{page.relative_to(ROOT)}: {'differs from its results' if '--check' in sys.argv else 'written'}")
        if "--check" not in sys.argv:
            page.write_text(renewed(page.read_text()))
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    raise SystemExit(main())
