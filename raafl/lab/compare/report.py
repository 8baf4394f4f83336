"""Collect the result of a comparison and write it as JSON, CSV, LaTeX, a figure and an HTML page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raafl.atomic_file import atomic_file
from raafl.errors import BadInput
from raafl.lab.compare.comparison import Comparison
from raafl.lab.compare.provenance import machine_name, provenance
from raafl.lab.compare.results import differences, gains, measure, summarize
from raafl.lab.compare.runs import Outcome
from raafl.lab.compare.search import Trial
from raafl.lab.compare.tables import as_csv, cells, latex, sentences, warnings
from raafl.lab.report.curves import curves
from raafl.lab.report.figure import Table
from raafl.lab.report.groups import COLOURS, Group
from raafl.lab.report.page import escaped, page, plotly_js, table_html
from raafl.lab.report.static import check_figure, draw
from raafl.runfolder.reading import read


def result(
    comparison: Comparison,
    outcomes: Sequence[Outcome],
    trials: Mapping[str, Sequence[Trial]],
    best: Mapping[str, Trial],
    root: Path,
) -> dict[str, Any]:
    """Return the result of a comparison as JSON: the measured values of every run and trial, commands, and versions."""
    runs: dict[str, list[dict[str, Any]]] = {label: [] for label in comparison.rows}
    for outcome in outcomes:
        runs[outcome.run.label].append(measure(outcome, comparison, root))
    gaps, gaining = differences(runs, comparison.reference), gains(runs, comparison.reference)
    rows = []
    for label, some in runs.items():
        row = summarize(label, some, comparison) | {"difference": gaps[label]}
        if gaining[label] is not None:
            row["clients_gaining"] = gaining[label]
        if label in comparison.published:
            row["published"] = comparison.published[label]
        if label in trials:
            row["searched"] = _searched(trials[label], best[label])
        rows.append(row | {"runs": some})
    return {
        "name": comparison.name,
        "about": comparison.about,
        "config": comparison.config,
        "metric": comparison.metric,
        "options": list(comparison.options),
        "smooth": comparison.smooth,
        "eval_every": comparison.eval_every,
        "reference": comparison.reference,
        **provenance(),
        "rows": rows,
    }


def _searched(trials: Sequence[Trial], best: Trial) -> dict[str, Any]:
    listed = [
        {
            "settings": list(trial.settings),
            "scores": {str(seed): score for seed, score in trial.scores.items()},
            **({"cut_after": trial.fraction} if trial.fraction < best.fraction else {}),
        }
        for trial in trials
    ]
    return {"settings": list(best.settings), "trials": listed}


def write(result: Mapping[str, Any], folder: Path, *, draws: bool = True) -> list[Path]:
    """Write result.json, table.csv, table.tex, curves.svg and index.html; return their paths."""
    table = cells(result)
    paths = _save(
        folder,
        {
            "result.json": (json.dumps(result, indent=1) + "\n").encode(),
            "table.csv": as_csv(table).encode(),
            "table.tex": latex(table).encode(),
        },
    )
    groups = _groups(result, folder) if draws else []  # after the numbers are saved: an error of the drawing loses none
    if groups:
        page_text = _page(result, table, groups)
        paths += _save(folder, {"curves.svg": draw(groups, ".svg"), "index.html": page_text.encode()})
    return paths


def _save(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    for name, data in files.items():
        with atomic_file(folder / name) as file:
            file.write(data)
    return [folder / name for name in files]


def _groups(found: Mapping[str, Any], folder: Path) -> list[Group]:
    groups = []
    for place, row in enumerate(found["rows"]):
        folders = [folder / run["folder"] for run in row["runs"] if "error" not in run]
        if folders:
            groups.append(Group(row["row"], COLOURS[place % len(COLOURS)], tuple(map(read, folders)), {}))
    return groups


def _page(found: Mapping[str, Any], table: Sequence[Sequence[str]], groups: Sequence[Group]) -> str:
    colours = {group.label: group.colour for group in groups}
    about = "".join(f"<p>{escaped(line)}</p>" for line in found["about"].split("\n\n") if line.strip())
    shown = "".join(
        f"<li>{escaped(line)}</li>"
        for line in (*warnings(found), *sentences(found["rows"], found["reference"], found["metric"]))
    )
    note = (
        "Mean ± half of the 95 % interval over seeds (Student's t). Differences are paired by seed, and shown where their "
        "p-value is at most 0.05 after Holm's correction for all rows of the table. Times to a target are medians over all "
        "seeds; a seed that never got there counts as later."
    )
    top = (
        f'<section id="overview">{about}{table_html(Table(table[0], table[1:], note), colours)}'
        f'<div class="notes"><ul>{shown}</ul></div></section>'
    )
    searched = _search_tables(found)
    commands = "".join(f"<pre>{escaped(run['command'])}</pre>" for row in found["rows"] for run in row["runs"][:1])
    bottom = f'{searched}<section id="commands"><h2>Commands</h2>{commands}</section>'
    title = f"{found['name']}: {len(found['rows'])} rows"
    subtitle = f"raafl compare, {found['date'][:10]}, {machine_name(found['hardware'])}, commit {found['commit']}"
    return page(title, subtitle, top, [curves(groups, first=found["metric"])], bottom, {"commands": "Commands"})


def _search_tables(found: Mapping[str, Any]) -> str:
    rows = [
        [row["row"], " ".join(trial["settings"]), *(f"{score:.4g}" for score in trial["scores"].values())]
        for row in found["rows"]
        if row.get("searched")
        for trial in row["searched"]["trials"]
    ]
    if not rows:
        return ""
    width = max(map(len, rows))
    rows = [[*row, *[""] * (width - len(row))] for row in rows]
    head = ["row", "settings", *(f"seed {i}" for i in range(1, width - 1))]
    note = "Each row had the same number of trials, scored on training data that no client had, on seeds not reported."
    return f'<section id="search"><h2>Search</h2>{table_html(Table(head, rows, note))}</section>'


def check_drawing() -> None:
    """Raise `BadInput` unless plotly and matplotlib are installed."""
    plotly_js()
    check_figure(Path("curves.svg"))


def load(folder: Path) -> dict[str, Any]:
    """Read the result of a comparison from its folder; raise `BadInput` if the folder has none."""
    path = folder / "result.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"'{path}' is not a result of raafl compare ({error}): run the comparison first") from None
    return found
