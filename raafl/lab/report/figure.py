"""Define the elements of a report page: charts with selectable views, and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from raafl.runfolder.reading import Numbers

Cell = str | int | float | None
MAX_ROWS = 200
"""Rows of the longest table."""
_MOST_ACROSS = 10
"""Columns that a page has room for."""


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
    note: str  # explanation of how to read the chart, and what it leaves out
    # views by the selected options; empty if there is nothing to show, as the note explains
    views: Mapping[tuple[str, ...], View]
    tables: Sequence[Table] = ()
    # options of each selector above the chart, by the selector's name; may be empty
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    height: int = 380  # height of the chart in pixels


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
    return [
        band.tolist() for band in np.array_split(np.array(items, np.int64), min(most, len(items)) or 1) if len(band)
    ]


def axis(title: str, **more: object) -> dict[str, Any]:
    """Return the settings of a plotly axis with a title."""
    return {"title": {"text": title}, **more}
