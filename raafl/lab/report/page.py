"""Write the report page: one HTML file that contains everything and loads nothing from a network.

Whatever comes from a run folder is escaped: in HTML, in the charts' JSON, and in the texts that plotly reads as markup. The
page's content security policy forbids loading anything, should something slip through.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from raafl.errors import installing
from raafl.runfolder.reading import Numbers

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_OWN_MARKUP = ("hovertemplate",)
_ESCAPED_IN_SCRIPT = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def escaped(text: str) -> str:
    """Escape a text for HTML; control characters and invisible characters become spaces."""
    if not text.isprintable():
        text = "".join(one if one.isprintable() or one in "\n\t" else " " for one in text)
    return html.escape(text)


def shown(value: Cell) -> str:
    """Format the value of a table cell: numbers with five digits, a dash for None."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.5g}"
    return f"{value:,}" if isinstance(value, int) else value


def table_html(table: Table, colours: Mapping[str, str] | None = None) -> str:
    """Return a table as HTML; names in ``colours`` are marked with their colour."""
    words = [any(isinstance(row[place], str) for row in table.rows) for place in range(len(table.columns))]
    head = "".join(
        f"<th{_words(text)}>{_swatch(str(name), colours)}{escaped(str(name))}</th>"
        for name, text in zip(table.columns, words, strict=True)
    )
    lines = []
    for row in table.rows:
        cells = []
        for place, value in enumerate(row):
            swatch = _swatch(str(value), colours) if place == 0 else ""
            cells.append(f"<td{_words(words[place])}>{swatch}{escaped(shown(value))}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    caption = f"<caption>{escaped(table.caption.strip())}</caption>" if table.caption.strip() else ""
    body = "\n".join(lines)
    return f'<div class="scroll" tabindex="0"><table>{caption}<thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _swatch(name: str, colours: Mapping[str, str] | None) -> str:
    colour = (colours or {}).get(name)
    return f'<span class="swatch" style="background:{colour}"></span>' if colour else ""


def _words(is_text: bool) -> str:
    return ' class="words"' if is_text else ""


def collapsible(title: str, inner: str) -> str:
    """Return an HTML block that opens when its title is clicked."""
    return f'<details><summary>{escaped(title)}</summary><div class="inner">{inner}</div></details>'


def chart_html(chart: Chart, *, still: bool = False) -> str:
    """Return the HTML section of a chart: title, note, selectors, empty space for the chart, tables.

    `still`: without scripts: the chart's own SVG, if it has one, in place of selectors and space.
    """
    parts = [f'<section id="{chart.name}"><h2>{escaped(chart.title)}</h2><p class="soft">{escaped(chart.note)}</p>']
    if still:
        parts.append(chart.still)
    elif chart.views:
        selects = []
        for name, options in chart.choices.items():
            items = "".join(f'<option value="{escaped(o)}">{escaped(o)}</option>' for o in options)
            hidden = " hidden" if len(options) < 2 else ""
            selects.append(f"<label{hidden}>{escaped(name)} <select>{items}</select></label>")
        parts.append(
            f'<figure data-chart="{chart.name}" style="margin:0"><div class="controls">{"".join(selects)}</div>'
            f'<div class="chart" role="img" aria-label="{escaped(chart.title)}"></div>'
            '<p class="missing soft" hidden>This is not known.</p></figure>'
        )
    if chart.tables:
        parts.append(
            collapsible("Table" if len(chart.tables) == 1 else "Tables", "".join(map(table_html, chart.tables)))
        )
    parts.append("</section>")
    return "\n".join(parts)


def data_json(charts: Sequence[Chart]) -> str:
    """Return all plots of the charts, with their data, as JSON that is safe inside an HTML script element."""
    data = {
        chart.name: {
            "height": chart.height,
            "views": [
                {"key": list(map(_clean, key)), "data": _plain(list(view.data)), "layout": _plain(view.layout)}
                for key, view in chart.views.items()
            ],
        }
        for chart in charts
    }
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return re.sub("[<>&\u2028\u2029]", lambda found: _ESCAPED_IN_SCRIPT[found[0]], text)


def _clean(text: str) -> str:
    """Convert the text of a menu's option to what the browser's select element returns for it."""
    return html.unescape(escaped(text))


def _plain(value: object) -> object:
    """Escape all texts of a plotly figure that plotly would read as markup, except in fields that raafl itself fills."""
    if isinstance(value, Mapping):
        return {name: item if name in _OWN_MARKUP else _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return escaped(value) if isinstance(value, str) else value


def plotly_js() -> str | None:
    """Return the source of plotly.js, compressed and in base64; None where plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return None
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


def page(title: str, subtitle: str, top: str, charts: Sequence[Chart], bottom: str, links: Mapping[str, str]) -> str:
    """Return the complete HTML of the report page; without plotly one with tables and the charts' own SVG, without scripts."""
    plotly = plotly_js()
    files = resources.files("raafl.lab.report")
    style, script = (files.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    links = {chart.name: chart.title for chart in charts} | dict(links)
    nav = "".join(f'<a href="#{name}">{escaped(text)}</a>' for name, text in links.items())
    body = "\n".join(chart_html(chart, still=plotly is None) for chart in charts)
    if plotly is None:
        note = f"The other charts are tables here, since plotly, which draws them, is not installed: {installing('report')}"
        notice = f'<div class="notes"><p>{escaped(note)}</p></div>'
        scripts = ""
    else:
        notice = '<noscript><p class="notes">The charts need JavaScript; the table of each is below its title.</p></noscript>'
        scripts = f"""<script type="application/json" id="charts">{data_json(charts)}</script>
<!-- plotly.js, https://plotly.com/javascript, Copyright Plotly, Inc., MIT license; gzip in base64 -->
<script type="text/plain" id="plotly">{plotly}</script>
<script>
{script}</script>
"""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="raafl report">
<title>{escaped(title)}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<h1>{escaped(title)}</h1>
<p class="soft">{escaped(subtitle)}</p>
<nav>{nav}</nav>
{notice}
{top}
{body}
{bottom}
{scripts}</body>
</html>
"""


Cell = str | int | float | None
MAX_ROWS = 200
"""Rows of the longest table."""
_MOST_ACROSS = 10
"""Largest number of columns of a table on a page."""


@dataclass(frozen=True, slots=True)
class Table:
    """Table on a report page; ``caption`` tells which rows were left out."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """One of the plots among which a chart's reader selects: plotly traces and layout. Texts are not yet escaped for HTML."""

    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart on a report page, with one or more plots (views) among which the reader selects."""

    name: str  # id of the chart in the page, of the form `[a-z-]+`
    title: str
    note: str  # how to read the chart, and what it leaves out
    # views by selected options; empty = nothing to show, for a reason that the note gives
    views: Mapping[tuple[str, ...], View]
    tables: Sequence[Table] = ()
    # options of each selector above the chart, by the selector's name
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    height: int = 380  # height of the chart in pixels
    still: str = ""  # SVG of the chart for pages without plotly; "" = the tables suffice there


def rounded(values: Sequence[float] | Numbers | npt.NDArray[Any], digits: int = 5) -> list[float | None]:
    """Round numbers to significant digits; values that are not finite become None, which leaves a gap in a line."""
    return [
        None if not math.isfinite(value) else float(f"{value:.{digits}g}")
        for value in np.asarray(values, np.float64).tolist()
    ]


def thinned(length: int, most: int) -> npt.NDArray[np.int64]:
    """Return at most ``most`` evenly spaced indices from 0 to ``length`` - 1, including both."""
    if length <= most:
        return np.arange(length)
    return np.unique(np.linspace(0, length - 1, max(most, 2)).round().astype(np.int64))


def thin_rows(rows: Sequence[Sequence[Cell]], most: int = MAX_ROWS) -> tuple[list[Sequence[Cell]], str]:
    """Return at most ``most`` evenly spaced rows, and a caption if some were left out."""
    places = thinned(len(rows), most)
    said = f"{len(places)} of {len(rows):,} rows, evenly picked." if len(places) < len(rows) else ""
    return [rows[place] for place in places], said


def transpose_wide(table: Table) -> Table:
    """Transpose a table that is too wide for the page and has few rows."""
    if len(table.columns) <= _MOST_ACROSS or len(table.rows) > _MOST_ACROSS:
        return table
    rows = [[name, *(row[place] for row in table.rows)] for place, name in enumerate(table.columns)]
    return Table([table.columns[0], *(str(row[0]) for row in table.rows)], rows[1:], table.caption)


def gap(num_bars: int) -> float:
    """Return the share of a bar chart's width to leave empty, so that few bars do not become too wide."""
    return max(0.2, 1 - num_bars / 10)


def briefly(value: float) -> str:
    """Format a positive number with three digits and an SI prefix, such as 2.5 G."""
    power = min(max(math.floor(math.log10(value) / 3), 0), 5)
    return f"{value / 1000**power:.3g} {('', 'k', 'M', 'G', 'T', 'P')[power]}"


def split_evenly(items: Sequence[int], most: int) -> list[list[int]]:
    """Split items, in order, into at most ``most`` groups of nearly equal size."""
    places = np.array_split(np.arange(len(items)), min(most, len(items)) or 1)
    return [[items[place] for place in band] for band in places if len(band)]


def axis(title: str, **more: object) -> dict[str, Any]:
    """Return the settings of a plotly axis with a title."""
    return {"title": {"text": title}, **more}
