"""Group runs that differ only by seed and ended by the same limits, and name the groups."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raafl.config.targets import Goals
from raafl.lab.report.page import Chart, Table, View, axis, rounded, thin_rows, thinned
from raafl.runfolder.events import is_ended
from raafl.runfolder.reading import Numbers, RecordedRun
from raafl.runfolder.schema import MERGED, TIME_TO

NOT_THE_EXPERIMENT = (
    "seed",
    "output",
    "resume",
    "name",
    "json",
    "progress",
    "logger",
    "workers",
    "batch_clients",
    "checkpoint_every",
    "checkpoint_s",
    "keep_checkpoints",
    "samples",
    "monitor",
    "monitor_clients",
    "monitor_stall_s",
)
"""Fields in which runs of one experiment may differ; of these only the seed changes results."""
_MAX_IN_LABEL = 3
_LONGEST_VALUE = 40
COLOURS = (
    "#4269d0",
    "#e8684a",
    "#3ca951",
    "#c98a00",
    "#a463f2",
    "#d6588f",
    "#2f9fb5",
    "#9c6b4e",
    "#7f7f7f",
    "#97a600",
)


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that differ only by seed and ended at the same limit; an interrupted run forms a group of its own."""

    label: str  # how the group differs from other groups, in short
    colour: str  # colour of the group's lines
    runs: tuple[RecordedRun, ...]
    differs: Mapping[str, str]  # settings that differ between groups, with this group's values


def group_runs(runs: Sequence[RecordedRun]) -> list[Group]:
    """Group runs that differ only by seed, in the order of their first appearance."""
    found: dict[str, list[RecordedRun]] = {}
    for run in runs:
        found.setdefault(_key(run), []).append(run)
    members = list(found.values())
    fields = [flat(_experiment(some[0])) for some in members]
    for some, mine in zip(members, fields, strict=True):
        mine["clock"] = "virtual" if some[0].is_simulated else "wall"
        mine["algorithm"] = algorithm_of(some[0])
        if _cut_short(some[0]):
            mine["ended"] = str((some[0].summary or {}).get("finished", "not ended"))
    labels = _labels(members, fields)
    names = sorted({name for mine in fields for name in mine})
    differing = [name for name in names if len({mine.get(name) for mine in fields}) > 1]
    return [
        Group(label, COLOURS[i % len(COLOURS)], tuple(some), {name: mine.get(name, "–") for name in differing})
        for i, (label, some, mine) in enumerate(zip(labels, members, fields, strict=True))
    ]


def algorithm_of(run: RecordedRun) -> str:
    """Return the name of a run's algorithm."""
    named = (run.summary or {}).get("algorithm")
    if not named:
        section = run.config.get("algorithm")
        named = section.get("class_path") if isinstance(section, Mapping) else section
    return str(named or "unknown").rpartition(".")[2]


def flat(value: object, prefix: str = "") -> dict[str, str]:
    """Flatten nested mappings and lists to one mapping with dotted keys and texts as values."""
    items: Any = ()
    if isinstance(value, Mapping):
        items = [(str(name), item) for name, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        items = [(str(i), item) for i, item in enumerate(value)]
    if not items:
        return {prefix: value if isinstance(value, str) else json.dumps(value, default=str)}
    found: dict[str, str] = {}
    for name, item in items:
        found |= flat(item, f"{prefix}.{name}" if prefix else name)
    return found


def of_experiment(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config that results depend on; ``batch_clients`` is one where it is fast."""
    is_fast = config.get("batch_clients") == "fast"
    return {
        name: value
        for name, value in config.items()
        if name not in NOT_THE_EXPERIMENT or (name == "batch_clients" and is_fast)
    }


def _experiment(run: RecordedRun) -> dict[str, Any]:
    found = of_experiment(run.config)
    if run.goals:  # a resumed run may have got other limits than its config has
        goals = Goals.from_json(run.goals)
        targets = list(map(str, goals.targets))
        target = targets[0] if len(targets) == 1 else targets or None
        found |= {"max_updates": goals.max_updates, "max_time": goals.max_time_s, "target": target}
    return found


def _cut_short(run: RecordedRun) -> bool:
    """Check whether a run ended before any of its limits was reached."""
    return not is_ended(run.summary)


def _key(run: RecordedRun) -> str:
    if not run.config or _cut_short(run):
        return f"alone {run.path}"
    # flat, since a mapping with numbers and texts as keys, which YAML allows, has no order
    return json.dumps([flat(_experiment(run)), run.runtime], sort_keys=True)


def _labels(members: Sequence[Sequence[RecordedRun]], fields: Sequence[Mapping[str, str]]) -> list[str]:
    """Label each group by its algorithm, and by the settings in which groups of the same algorithm differ."""
    labels: list[str] = []
    for some, mine in zip(members, fields, strict=True):
        alike = [other for other in fields if other["algorithm"] == mine["algorithm"]]
        names = sorted({name for other in alike for name in other}, key=lambda name: (name.count("."), name))
        told = [name for name in names if len({other.get(name) for other in alike}) > 1]
        parts = list(dict.fromkeys(_part(name, mine.get(name, ""), some[0].name) for name in told))[:_MAX_IN_LABEL]
        labels.append(", ".join([mine["algorithm"], *parts]))
    repeated = {label for label in labels if labels.count(label) > 1}
    return [
        f"{label} ({some[0].name})" if label in repeated else label for label, some in zip(labels, members, strict=True)
    ]


def _part(name: str, value: str, folder: str) -> str:
    if name == "clock":
        return f"{value} clock"
    if name == "ended":
        return _short(value)
    if any(part.isdecimal() for part in name.split(".")):  # do not spell out entries of lists, such as devices
        return f"{name.partition('.')[0]} of {folder}"
    return f"{name.rpartition('.')[2]} {_short(value)}"


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST_VALUE else value[: _LONGEST_VALUE - 1] + "…"


def names_of(groups: Sequence[Group]) -> dict[int, str]:
    """Return a unique name for each run, by `id(run)`: its group's label and seed, and its folder if these are not unique."""
    called: dict[int, str] = {}
    for group in groups:
        for run in group.runs:
            seed = f", seed {run.seed}" if run.seed is not None else ""
            called[id(run)] = f"{group.label}{seed}"
    all_names = list(called.values())
    for group in groups:
        for run in group.runs:
            if all_names.count(called[id(run)]) > 1:
                called[id(run)] += f" ({run.name})"
    return called


TIME, WALL, UPDATES, VERSIONS, BYTES = AXES = ("time", "wall time", "updates", "versions", "bytes")
TITLES = {
    TIME: "seconds on the run's clock",
    WALL: "seconds on the wall clock",
    UPDATES: "merged updates",
    VERSIONS: "versions",
    BYTES: "MB down and up",
}
_NOT_METRICS = ("version", "time_s", "wall_s")
_FIRST = ("accuracy", "loss")
_MAX_METRICS = 24
_MAX_POINTS, _LEAST_POINTS, _MAX_NUMBERS = 300, 40, 250_000
_TABLE_ROWS = 30


def curves(groups: Sequence[Group], first: str | None = None) -> Chart:
    """Return a chart of every metric against time, updates, versions or bytes, as the reader selects.

    `first`: metric that the chart shows at first; None = the most important by its name.
    """
    metrics = metric_names(groups, first)
    choices = {"Metric": metrics, "Against": list(AXES)}
    tables = [_table(run, metrics) for group in groups for run in group.runs]
    lines = sum(3 if len(group.runs) > 1 else 1 for group in groups)
    points = int(np.clip(_MAX_NUMBERS / max(len(AXES) * (len(metrics) + 1) * lines, 1), _LEAST_POINTS, _MAX_POINTS))
    views: dict[tuple[str, ...], View] = {
        (metric, against): View(
            [trace for group in groups for trace in _traces(group, metric, against, points)],
            {"xaxis": axis(TITLES[against], rangemode="tozero"), "yaxis": axis(metric), "hovermode": "x unified"},
        )
        for metric in metrics
        for against in AXES
    }
    note = "Each evaluation of the global model on the held-out data."
    if any(len(group.runs) > 1 for group in groups):
        note += (
            " Runs that differ only by their seed are one line: their mean, in a band from the least to the most, as far as"
            " the shortest of them goes."
        )
        note += "".join(f" {text}" for text in map(_hidden, groups) if text)
    if any(len(run.metrics.get("version", ())) > points for group in groups for run in group.runs):
        note += f" Lines have {points} points at most, evenly picked."
    views = {key: view for key, view in views.items() if view.data}
    if not views:
        return Chart("curves", "Learning curves", "No run has an evaluation of its model yet.", {}, tables)
    shown = {
        name: [option for option in options if any(option in key for key in views)] for name, options in choices.items()
    }
    return Chart("curves", "Learning curves", note, views, tables, shown, height=420)


def _hidden(group: Group) -> str:
    """Return a note if a group's curves, which end with its shortest run, hide at least a tenth of its longest run."""
    ends = {run.name: run.end_s for run in group.runs}
    shortest = min(ends, key=ends.__getitem__)
    share = ends[shortest] / max(max(ends.values()), 1e-9)
    if share > 0.9:
        return ""
    return f"Of {group.label} the shortest, {shortest}, has {share:.0%} of the longest's seconds: the rest is in the tables."


def metric_names(groups: Sequence[Group], first: str | None = None) -> list[str]:
    """Return the names of the metrics that any run has evaluated, ``first`` and then the most important first."""
    names = list(
        dict.fromkeys(
            name
            for group in groups
            for run in group.runs
            for name, values in run.metrics.items()
            if name not in _NOT_METRICS and not name.startswith(TIME_TO) and np.isfinite(values).any()
        )
    )
    order = [first, *_FIRST]
    names.sort(key=lambda name: order.index(name) if name in order else len(order))
    return names[:_MAX_METRICS]


def x_values(run: RecordedRun, against: str) -> Numbers:
    """Return the x values of a run's evaluations; NaN if unknown."""
    metrics = run.metrics
    missing = np.full(len(metrics.get("version", ())), np.nan)
    if against == TIME:
        return metrics.get("time_s", missing)
    if against == WALL:
        return metrics.get("wall_s", missing)
    if against == VERSIONS:
        return metrics.get("version", missing)
    if against == BYTES:
        both: Numbers = (metrics.get("bytes_up", missing) + metrics.get("bytes_down", missing)) / 1e6
        return both
    merged = np.sort(run.tasks["merged_version"][run.tasks.are(MERGED)])
    return np.searchsorted(merged, metrics.get("version", missing), side="right").astype(np.float64)


def curve(run: RecordedRun, metric: str, against: str) -> tuple[Numbers, Numbers]:
    """Return x (ascending) and y values of a metric in a run; incomplete rows are left out."""
    if metric not in run.metrics:
        return np.empty(0), np.empty(0)
    x, y = x_values(run, against), run.metrics[metric]
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    order = np.argsort(x, kind="stable")
    return x[order], y[order]


def lines_of(group: Group, metric: str, against: str) -> list[tuple[Numbers, Numbers]]:
    """Return the curves of a group's runs; those without an evaluation of the metric are left out.

    Where several runs make a band against time, the last value of each holds to the end of its run, since its model did
    not change any more: else the band would end with the run whose last merge was first.
    """
    lines = []
    for run in group.runs:
        x, y = curve(run, metric, against)
        if len(group.runs) > 1 and against == TIME and run.summary is not None and len(x) and run.end_s > x[-1]:
            x, y = np.append(x, run.end_s), np.append(y, y[-1])
        if len(x):
            lines.append((x, y))
    return lines


def band(lines: Sequence[tuple[Numbers, Numbers]], points: int) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Return up to ``points`` values of x that all curves cover, and mean, minimum and maximum of the curves there."""
    lines = [(x, y) for x, y in lines if len(x)]
    since, until = max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines)
    places = np.unique(np.concatenate([x for x, _ in lines]))
    places = places[(places >= since) & (places <= until)]
    places = places[thinned(len(places), points)]
    values = np.stack([np.interp(places, x, y) for x, y in lines])
    return places, values.mean(0), values.min(0), values.max(0)


def _traces(group: Group, metric: str, against: str, points: int) -> list[dict[str, object]]:
    if not (lines := lines_of(group, metric, against)):
        return []
    name = group.label if len(group.runs) == 1 else f"{group.label} ({len(lines)} runs)"
    line = {"color": group.colour, "width": 2}
    if len(lines) == 1:
        x, y = lines[0]
        kept = thinned(len(x), points)
        mode = "lines+markers" if len(kept) <= 40 else "lines"
        return [
            {
                "type": "scatter",
                "mode": mode,
                "name": name,
                "x": rounded(x[kept]),
                "y": rounded(y[kept]),
                "line": line,
                "marker": {"size": 5},
            }
        ]
    x, mean, least, most = band(lines, points)
    if not len(x):
        return []
    places = rounded(x)
    edge = {
        "type": "scatter",
        "mode": "lines",
        "x": places,
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": name,
    }
    return [
        {**edge, "y": rounded(least), "line": {"width": 0, "color": group.colour}},
        {
            **edge,
            "y": rounded(most),
            "line": {"width": 0, "color": group.colour},
            "fill": "tonexty",
            "fillcolor": _see_through(group.colour),
        },
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "legendgroup": name,
            "x": places,
            "y": rounded(mean),
            "line": line,
            "customdata": [[a, b] for a, b in zip(rounded(least), rounded(most), strict=True)],
            "hovertemplate": "%{y} (%{customdata[0]} to %{customdata[1]})",
        },
    ]


def _see_through(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.2)"


def _table(run: RecordedRun, metrics: Sequence[str]) -> Table:
    names = [name for name in (*_NOT_METRICS, *metrics) if name in run.metrics]
    updates = rounded(x_values(run, UPDATES), 12)
    columns = [rounded(run.metrics[name]) for name in names]
    rows = [[updates[i], *(column[i] for column in columns)] for i in range(len(updates))]
    kept, said = thin_rows(rows, _TABLE_ROWS)
    return Table(["updates", *names], kept, f"{run.name}. {said}")
