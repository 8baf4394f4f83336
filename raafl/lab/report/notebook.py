"""Show results in a notebook: a title, tables and an inline SVG curve, as HTML without scripts, links or styles of a page.

All texts are escaped as on the report page (`page.py`), since labels and metrics may come from other people.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raafl.errors import BadInput
from raafl.lab.report.groups import TIME, TITLES, Group, band, group_runs, lines_of, metric_names
from raafl.lab.report.overview import notes_of, runs_table
from raafl.lab.report.page import Cell, Table, escaped, shown, table_html
from raafl.runfolder.outcome import report_command
from raafl.runfolder.reading import Numbers, read

_WIDTH, _HEIGHT = 620, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 40  # margins around the plot, in pixels
_TICKS = 5  # wanted number of ticks on each axis
_MAX_POINTS = 200
_MOST = 1e300  # largest value that has a tick: differences of larger ones may be infinite
_RUN = ("algorithm", "clock", "ended", "merged updates", "versions", "seconds", "MB down", "MB up", "utilisation")


def fragment(title: str, *parts: str, notes: Iterable[str] = (), code: str = "") -> str:
    """Return an HTML fragment: a title, parts that are HTML already, notes that are text, and a command to go on with."""
    listed = "".join(f"<li>{escaped(note)}</li>" for note in notes)
    after = f"<ul>{listed}</ul>" if listed else ""
    after += f"<p>next: <code>{escaped(code)}</code></p>" if code else ""
    return f"<div><p><b>{escaped(title)}</b></p>{''.join(parts)}{after}</div>"


def rows_html(title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a table of a title, columns and rows as HTML."""
    return table_html(Table(columns, rows, title))


def run_html(folder: Path, summary: Mapping[str, Any]) -> str:
    """Return the HTML of a run: its figures in a table, and the curve of its first metric.

    `folder`: run folder; where it is gone or damaged, the summary alone is shown.
    `summary`: content of its summary.json.
    """
    final = [(name, value) for name, value in summary.get("final", {}).items() if not name.startswith("rank_energy/")]
    facts: list[tuple[str, Cell]] = list(final)
    drawn, notes = "", []
    try:
        run = read(folder)
    except BadInput as error:
        notes = [str(error)]
        facts += [(name, str(summary.get(name))) for name in ("finished", "updates_merged", "versions", "time_s")]
    else:
        groups = group_runs([run])
        table = runs_table(groups)
        known = dict(zip(table.columns, table.rows[0], strict=True))
        facts += [(name, known[name]) for name in _RUN if known.get(name) is not None]
        drawn, notes = curve_svg(groups), notes_of(run)
    head = [name for name, _ in facts]
    values = table_html(Table(head, [[value for _, value in facts]]))
    title = f"{summary.get('algorithm', 'run')} in {folder}"
    return fragment(title, values, drawn, notes=notes, code=report_command(folder))


def curve_svg(groups: Sequence[Group], metric: str | None = None) -> str:
    """Draw the curve of a metric over time for each group of runs as SVG with a legend; several runs are a mean in a band.

    `metric`: name of the metric; None = the most important by its name.

    Returns:
        HTML; empty where no run has measured the metric.
    """
    names = metric_names(groups)
    metric = metric or next(iter(names), "")
    lines = {group.label: (group.colour, _line(group, metric)) for group in groups}
    lines = {label: (colour, line) for label, (colour, line) in lines.items() if len(line[0])}
    if not lines:
        return ""
    xs = np.concatenate([line[0] for _, line in lines.values()])
    ys = np.concatenate([np.concatenate(line[2:]) for _, line in lines.values()])
    x_ticks, y_ticks = ticks(min(float(xs.min()), 0.0), float(xs.max())), ticks(float(ys.min()), float(ys.max()))

    def x_of(value: float) -> float:
        return _LEFT + (value - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (_WIDTH - _LEFT - _RIGHT)

    def y_of(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (_HEIGHT - _TOP - _BOTTOM)

    def points(x: Numbers, y: Numbers) -> str:
        return " ".join(f"{x_of(a):.1f},{y_of(b):.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))

    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = [_text(x_of(x), bottom + 16, shown(x), "middle") for x in x_ticks]
    for y in y_ticks:
        parts.append(f'<path d="M{_LEFT} {y_of(y):.1f}H{right}" stroke="currentColor" stroke-opacity=".15"/>')
        parts.append(_text(_LEFT - 6, y_of(y) + 4, shown(y), "end"))
    parts.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" stroke="currentColor" stroke-opacity=".5" fill="none"/>')
    parts.append(_text((_LEFT + right) / 2, _HEIGHT - 6, TITLES[TIME], "middle"))
    for colour, (x, mean, least, most) in lines.values():
        if (least < most).any():
            area = f"{points(x, least)} {points(x[::-1], most[::-1])}"
            parts.append(f'<polygon points="{area}" fill="{colour}" fill-opacity=".2"/>')
        parts.append(f'<polyline points="{points(x, mean)}" fill="none" stroke="{colour}" stroke-width="2"/>')
    legend = " ".join(
        f'<span style="white-space:nowrap"><span style="color:{colour}">&#9632;</span> {escaped(label)}</span>'
        for label, (colour, _) in lines.items()
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'style="max-width:100%;height:auto" aria-label="{escaped(metric)}">{"".join(parts)}</svg>'
        f"<p>{escaped(metric)}: {legend}</p>"
    )


def _line(group: Group, metric: str) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Compute a group's curve: x values, and mean, minimum and maximum over its runs; empty if no run has the metric."""
    lines, empty = lines_of(group, metric, TIME), np.empty(0)
    return band(lines, _MAX_POINTS) if lines else (empty, empty, empty, empty)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" fill="currentColor" text-anchor="{anchor}">{escaped(text)}</text>'


def ticks(least: float, most: float) -> list[float]:
    """Return evenly spaced round numbers that enclose ``least`` and ``most``: multiples of 1, 2 or 5 times a power of 10."""
    least, most = max(least, -_MOST), min(most, _MOST)
    width = (most - least) or abs(most) or 1.0
    # ticks that are closer together would have one and the same label of five digits, or be one and the same float
    width = max(width, 1e-4 * max(abs(least), abs(most)), 1 / _MOST)
    power = 10.0 ** math.floor(math.log10(width / _TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if width / (power * factor) <= _TICKS)
    first, last = math.floor(least / step + 1e-9), math.ceil(most / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, max(last, first + 1) + 1)]
