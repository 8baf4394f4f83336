"""Chart the staleness of merged updates, and how often each region (separately merged piece) and submodel was trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raafl.lab.report.groups import Group
from raafl.lab.report.page import Cell, Chart, Table, View, axis, gap, rounded, split_evenly
from raafl.lab.report.timeline import KIND_COLOURS, lanes_height
from raafl.runfolder.reading import Numbers, RecordedRun
from raafl.runfolder.reading import number as as_number
from raafl.runfolder.schema import KINDS, MERGED

_MAX_BARS = 50
_MAX_SPECS = 12
_MAX_AXES = 200
_LONGEST_SPEC = 60


def staleness(groups: Sequence[Group]) -> Chart:
    """Return a chart of the staleness of merged updates."""
    values = {group.label: _of_merged(group, "staleness") for group in groups}
    known = [some for some in values.values() if len(some)]
    if not known:
        return Chart("staleness", "Staleness", "No update has been merged.", {})
    most = int(max(some.max() for some in known))
    width = max(1, -(-(most + 1) // _MAX_BARS))
    edges = np.arange(0, most + width + 1, width)
    names = [str(low) if width == 1 else f"{low}-{low + width - 1}" for low in edges[:-1].tolist()]
    traces, rows = [], []
    for group in groups:
        some = values[group.label]
        if not len(some):
            continue
        share = np.histogram(some, edges)[0] / len(some)
        traces.append(
            {
                "type": "bar",
                "name": group.label,
                "x": names,
                "y": rounded(share),
                "marker": {"color": group.colour},
                "hovertemplate": "staleness %{x}: %{y:.1%} of the merged updates",
            }
        )
        quarters = np.percentile(some, [50, 90, 99]).tolist()
        rows.append([group.label, len(some), round(float(some.mean()), 3), *quarters, int(some.max())])
    layout = {
        "xaxis": axis("merges between a task's version and its own merge", type="category", showgrid=False),
        "yaxis": axis("share of merged updates", tickformat=".1~%"),
        "barmode": "group",
        "bargap": gap(len(names)),
    }
    table = Table(["runs", "merged updates", "mean", "median", "90 %", "99 %", "most"], rows)
    return Chart(
        "staleness",
        "Staleness",
        "How many merges came between the version a task began with and its own merge.",
        {(): View(traces, layout)},
        [table],
    )


def regions(groups: Sequence[Group]) -> Chart:
    """Return a chart of the merges of each region (a piece of the model that is merged separately).

    It shows the number and the staleness of the merges, and the time since the last merge.
    """
    figures = {group.label: _regions(group) for group in groups}
    numbers = sorted({region for some in figures.values() for region in some})
    if not numbers:
        return Chart("regions", "Coverage and staleness per region", "No update has been merged.", {})
    bands = split_evenly(numbers, _MAX_BARS)
    names = [f"{band[0]}" if len(band) == 1 else f"{band[0]}-{band[-1]}" for band in bands]
    measures = {
        "merged updates": (0, "merged updates, mean over runs"),
        "mean staleness": (1, "mean staleness"),
        "longest pause": (2, "most versions in a row without it"),
    }
    views: dict[tuple[str, ...], View] = {}
    for choice, (place, title) in measures.items():
        traces = []
        for group in groups:
            mine = figures[group.label]
            heights = [_over(mine, band, place) for band in bands]
            traces.append(
                {
                    "type": "bar",
                    "name": group.label,
                    "x": names,
                    "y": rounded(heights),
                    "marker": {"color": group.colour},
                    "hovertemplate": f"region %{{x}}: %{{y}} {choice}",
                }
            )
        layout = {
            "xaxis": axis("region", type="category", showgrid=False),
            "yaxis": axis(title, rangemode="tozero"),
            "bargap": gap(len(names)),
            "barmode": "group",
        }
        views[(choice,)] = View(traces, layout)
    rows: list[list[Cell]] = [
        [group.label, region, *rounded(figures[group.label][region])]
        for group in groups
        for region in sorted(figures[group.label])[:_MAX_BARS]
    ]
    note = (
        "A region is what an algorithm counts merges of: a fragment, a window, a rate; 0 where tasks train on all of it, or"
        " where the algorithm keeps no count. The longest pause is how many versions were made in a row without the region."
        " How much of the model each version trained is a metric of the curves above: coverage."
    )
    if len(bands) < len(numbers):
        note += f" {len(numbers):,} regions are drawn as {len(bands)} bands, each the mean of its own."
    said = f"The first {_MAX_BARS} regions of each." if len(numbers) > _MAX_BARS else ""
    table = Table(["runs", "region", "merged updates", "mean staleness", "longest pause, versions"], rows, said)
    choices = {"Show": list(measures)}
    return Chart("regions", "Coverage and staleness per region", note, views, [table], choices)


def specs(groups: Sequence[Group]) -> Chart:
    """Return a table of the submodels that were assigned, with the outcomes of their tasks."""
    views: dict[tuple[str, ...], View] = {}
    tables, choices, shortened = [], [], False
    for group in groups:
        counts: Counter[str] = Counter(spec for run in group.runs for spec in run.tasks.spec)
        if not counts:
            continue
        most = counts.most_common(_MAX_SPECS)
        shortened = shortened or len(counts) > _MAX_SPECS
        rows = [_spec_row(group, spec, count) for spec, count in most]
        names = [_short(spec) for spec, _ in most]
        names = [f"{name} #{i}" if names.count(name) > 1 else name for i, name in enumerate(names, start=1)]
        traces = [
            {
                "type": "bar",
                "orientation": "h",
                "y": names,
                "x": [row[place] for row in rows],
                "name": kind,
                "marker": {"color": KIND_COLOURS[place - 2]},
                "hovertemplate": "%{x} " + kind,
            }
            for place, kind in enumerate(KINDS, start=2)
            if any(row[place] for row in rows)
        ]
        layout = {
            "barmode": "stack",
            "height": lanes_height(len(names)),
            "xaxis": axis("tasks"),
            "hovermode": "y unified",
            "yaxis": {"autorange": "reversed", "automargin": True, "type": "category"},
        }
        views[(group.label,)] = View(traces, layout)
        choices.append(group.label)
        tables.append(
            Table(
                ["submodel", "tasks", *KINDS, "mean seconds", "peak MB"],
                rows,
                f"{group.label}: the {len(rows)} most frequent of {len(counts):,} submodels.",
            )
        )
    if not views:
        return Chart("submodels", "Submodels", "No task has ended.", {})
    note = "The parts of the model that clients were assigned, and how the tasks ended."
    note += f" The {_MAX_SPECS} most frequent." if shortened else ""
    return Chart("submodels", "Submodels", note, views, tables, {"Of": choices})


def axes(groups: Sequence[Group]) -> Chart:
    """Return tables of the model's axes (dimensions that submodels cut, such as the neurons of a layer), for each group.

    The tables also show which share of the parameters a submodel has if it keeps a given share (rate) of each axis.
    """
    tables: list[Table] = []
    for group in groups:
        summary: Mapping[str, Any] = next((run.summary for run in group.runs if run.summary), {})
        axes, shares, whole = (summary.get(name) for name in ("axes", "rates_leave", "kept_whole"))
        rows: list[list[Cell]] = [
            [str(one.get("name")), str(one.get("size")), ", ".join(map(str, one["parameters"]))]
            for one in (axes if isinstance(axes, list) else ())
            if isinstance(one, Mapping) and isinstance(one.get("parameters"), list)
        ]
        rates: list[list[Cell]] = [
            [rate, as_number(one.get("parameters")), as_number(one.get("flops"))]
            for rate, one in (shares.items() if isinstance(shares, Mapping) else ())
            if isinstance(one, Mapping)
        ]
        kept: list[list[Cell]] = [[str(k), str(v)] for k, v in whole.items()] if isinstance(whole, Mapping) else []
        of = f"{group.label}: "
        if rows:
            tables += [
                Table(
                    ["axis", "size", "on it"], rows[:_MAX_AXES], f"{of}{len(rows):,} axes, whose units shrink together."
                ),
                Table(["rate", "parameters", "FLOPs"], rates, f"{of}what a share of every axis leaves."),
                Table(["stays whole", "reason"], kept[:_MAX_AXES], f"{of}what no submodel is without."),
            ]
    note = (
        "What of the model a client may be without."
        if tables
        else "Every client was assigned the whole model, or it is not known."
    )
    return Chart("axes", "Axes", note, {}, [table for table in tables if table.rows])


def _of_merged(group: Group, column: str) -> Numbers:
    """Collect the values of one column over the merged tasks of all runs, without missing values."""
    values = np.concatenate([run.tasks[column][run.tasks.are(MERGED)] for run in group.runs])
    found: Numbers = values[np.isfinite(values) & (values >= 0)]
    return found


def _regions(group: Group) -> dict[int, list[float]]:
    """Compute by region: merged updates per run, mean staleness, and the longest pause of any run, in versions.

    A region's pause is a number of consecutive versions that include no update of that region.
    """
    region, stale = (
        np.concatenate([run.tasks[name][run.tasks.are(MERGED)] for run in group.runs])
        for name in ("region", "staleness")
    )
    found: dict[int, list[float]] = {}
    pauses = [_pauses(run) for run in group.runs]
    for number in np.unique(region[np.isfinite(region)]):
        mine = region == number
        known = stale[mine][np.isfinite(stale[mine])]
        pause = max(some.get(int(number), 0.0) for some in pauses)
        found[int(number)] = [mine.sum() / len(group.runs), float(known.mean()) if len(known) else np.nan, pause]
    return found


def _pauses(run: RecordedRun) -> dict[int, float]:
    """Find by region the largest number of consecutive versions that include no update of it."""
    merged = run.tasks.are(MERGED) & np.isfinite(run.tasks["merged_version"]) & np.isfinite(run.tasks["region"])
    region, version = run.tasks["region"][merged], run.tasks["merged_version"][merged]
    if not len(version):
        return {}
    last, pauses = version.max(), {}
    order = np.lexsort((version, region))
    region, version = region[order], version[order]
    for part, number in zip(
        np.split(version, np.flatnonzero(np.diff(region)) + 1), np.unique(region).tolist(), strict=True
    ):
        gaps = np.diff(np.concatenate([[0.0], part, [last + 1]])) - 1
        pauses[int(number)] = max(float(gaps.max()), 0.0)
    return pauses


def _over(figures: dict[int, list[float]], band: Sequence[int], place: int) -> float:
    values = [figures[region][place] for region in band if region in figures]
    return float(np.mean(values)) if values else float("nan")


def _spec_row(group: Group, spec: str, count: int) -> list[Cell]:
    kinds: Counter[int] = Counter()
    seconds, peaks = [], []
    for run in group.runs:
        rows = np.array([i for i, name in enumerate(run.tasks.spec) if name == spec], np.int64)
        kinds.update(run.tasks.kind[rows].tolist())
        seconds.append((run.tasks["arrived_s"] - run.tasks["assigned_s"])[rows])
        peaks.append(run.tasks["peak_bytes"][rows])
    all_s, all_peaks = np.concatenate(seconds), np.concatenate(peaks)
    mean_s = float(np.nanmean(all_s)) if np.isfinite(all_s).any() else np.nan
    peak = float(np.nanmax(all_peaks)) / 1e6 if np.isfinite(all_peaks).any() else np.nan
    return [_short(spec), count, *(kinds[i] for i in range(len(KINDS))), *rounded([mean_s, peak], 4)]


def _short(spec: str) -> str:
    return spec if len(spec) <= _LONGEST_SPEC else spec[: _LONGEST_SPEC - 1] + "…"
