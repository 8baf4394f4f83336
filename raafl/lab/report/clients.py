"""Chart how often each client takes part against its speed, and its share of the samples and classes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from raafl.errors import BadInput
from raafl.lab.report.groups import Group
from raafl.lab.report.page import Cell, Chart, Table, View, axis, rounded, split_evenly, thin_rows
from raafl.lab.report.timeline import fastest_first, lane, lanes_height
from raafl.runfolder.reading import RecordedRun
from raafl.runfolder.schema import MERGED

if TYPE_CHECKING:
    from raafl.data.federated import FederatedData

_MAX_DOTS = 1500
_BANDS = 40
_MAX_BARS = 60
_MAX_CLASSES = 100
Classes = Mapping[int, Sequence[int]]
"""Samples of each class, by client."""


@dataclass(frozen=True, slots=True)
class _Point:
    """Client of a run, drawn as one point of a chart."""

    name: str  # label of the client
    tasks: int  # number of tasks that have ended
    flops_per_s: float  # FLOP/s of the client's device
    task_s: float  # median seconds of a task
    merged: int  # number of the client's updates that were merged
    share: float  # share of the model's versions that include an update of the client, 0 to 1


def participation_chart(groups: Sequence[Group]) -> Chart:
    """Return a chart of each client's merged updates against its speed, for all groups of runs."""
    speeds = {
        "a device's speed": ("flops_per_s", "FLOP/s of the device, by its profile"),
        "time of a task": ("task_s", "median seconds of a task"),
    }
    measures = {
        "merged updates": ("merged", "merged updates"),
        "share of versions": ("share", "share of the versions it took part in"),
    }
    of_runs = {id(run): _points(run) for group in groups for run in group.runs}
    points = {group.label: [point for run in group.runs for point in of_runs[id(run)]] for group in groups}
    views: dict[tuple[str, ...], View] = {}
    for speed, (x, speed_title) in speeds.items():
        if not any(math.isfinite(getattr(point, x)) for some in points.values() for point in some):
            continue
        for measure, (y, title) in measures.items():
            traces = [trace for group in groups for trace in _dots(group, points[group.label], x, y)]
            layout = {
                "xaxis": axis(speed_title, type="log"),
                "hovermode": "closest",
                "yaxis": axis(title, rangemode="tozero", **({"tickformat": ".0%"} if y == "share" else {})),
            }
            views[(measure, speed)] = View(traces, layout)
    tables = [_table(group, of_runs) for group in groups]
    if not views:
        note = "Neither the journal nor clients.csv says how fast the clients are."
        return Chart("participation", "Participation and speed", note, {}, tables)
    note = "One dot for each client of each run."
    if any(len(some) > _MAX_DOTS for some in points.values()):
        note += f" More than {_MAX_DOTS:,} are drawn as {_BANDS} bands of clients of similar speed: their mean, and"
        note += " from the least to the most."
    choices = {
        "Show": [m for m in measures if any(m in key for key in views)],
        "Against": [s for s in speeds if any(s in key for key in views)],
    }
    return Chart("participation", "Participation and speed", note, views, tables, choices)


def _points(run: RecordedRun) -> list[_Point]:
    tasks, merged = run.tasks, run.tasks.are(MERGED)
    lasted_s = tasks["arrived_s"] - tasks["assigned_s"]
    versions = float(np.nanmax(tasks["merged_version"], initial=0.0)) or 1.0
    rows = tasks.by_client()
    points = []
    for client in run.client_ids():
        mine = rows.get(client, np.empty(0, np.intp))
        seconds = lasted_s[mine][np.isfinite(lasted_s[mine])]
        took_part = np.unique(tasks["merged_version"][mine][merged[mine]])
        speed = run.clients[client].flops_per_s if client in run.clients else math.nan
        median_s = float(np.median(seconds)) if len(seconds) else math.nan
        num_merged = int(merged[mine].sum())
        points.append(_Point(lane(run, client), len(mine), speed, median_s, num_merged, len(took_part) / versions))
    return points


def _dots(group: Group, points: Sequence[_Point], x: str, y: str) -> list[dict[str, object]]:
    speed, measure = attrgetter(x), attrgetter(y)
    known = [point for point in points if speed(point) > 0]
    if not known:
        return []
    dots: dict[str, object] = {
        "type": "scatter",
        "mode": "markers",
        "name": group.label,
        "marker": {"color": group.colour, "size": 9, "opacity": 0.75},
    }
    if len(known) <= _MAX_DOTS:
        return [
            {
                **dots,
                "x": rounded([speed(point) for point in known]),
                "y": rounded([measure(point) for point in known]),
                "customdata": [f"client {point.name}, {point.tasks} tasks" for point in known],
                "hovertemplate": "%{customdata}<br>%{y} at %{x:.4s}<extra></extra>",
            }
        ]
    known.sort(key=speed)
    bands = [
        np.array([(speed(known[i]), measure(known[i])) for i in band])
        for band in split_evenly(range(len(known)), _BANDS)
    ]
    means = np.array([band[:, 1].mean() for band in bands])
    return [
        {
            **dots,
            "x": rounded([float(np.median(band[:, 0])) for band in bands]),
            "y": rounded(means),
            "error_y": {
                "type": "data",
                "symmetric": False,
                "thickness": 1,
                "width": 2,
                "array": rounded(np.array([band[:, 1].max() for band in bands]) - means),
                "arrayminus": rounded(means - np.array([band[:, 1].min() for band in bands])),
            },
            "customdata": [f"{len(band)} clients" for band in bands],
            "hovertemplate": "%{customdata}<br>%{y} on average at %{x:.4s}<extra></extra>",
        }
    ]


def _table(group: Group, points: Mapping[int, Sequence[_Point]]) -> Table:
    rows: list[list[Cell]] = []
    for run in group.runs:
        for client, point in zip(run.client_ids(), points[id(run)], strict=True):
            num_samples = run.clients[client].num_samples if client in run.clients else None
            numbers = rounded([point.flops_per_s, point.task_s])
            share = rounded([point.share], 3)
            rows.append([run.name, point.name, num_samples, *numbers, point.tasks, point.merged, *share])
    kept, said = thin_rows(rows)
    columns = ["run", "client", "samples", "FLOP/s", "median task, s", "tasks", "merged", "share of versions"]
    return Table(columns, kept, f"{group.label}. {said}")


def classes_of(run: RecordedRun, deal_out: Callable[[RecordedRun], FederatedData]) -> Classes | str:
    """Return the number of samples of each class by client, or the reason why it is unknown.

    Run folders do not contain the classes, so ``deal_out`` loads the data of the run and divides them among clients.
    """
    if not run.config:
        return "there is no config from which to divide the data"
    try:
        data = deal_out(run)
        labels = data.labels()
    except (BadInput, OSError, ImportError, ValueError, TypeError, AttributeError) as error:
        return f"the data cannot be divided again: {' '.join(str(error).split())[:300]}"
    names, numbers = np.unique(labels, return_inverse=True)
    if len(names) > _MAX_CLASSES:
        return f"the samples have {len(names):,} classes, too many to show"
    found: dict[int, Sequence[int]] = {}
    for client in range(1, data.num_clients + 1):
        rows = data.indices(client).numpy()
        known = run.clients.get(client)
        if known is None or known.own_data:
            continue
        if known.num_samples != len(rows):
            return (
                f"the config's data are not those of the run: client {client} had {known.num_samples:,} samples, "
                f"and would have {len(rows):,}"
            )
        found[client] = np.bincount(numbers[rows], minlength=len(names)).tolist()
    return found


def partition(
    runs: Sequence[tuple[str, RecordedRun]], classes: Mapping[int, Classes | str], left_out: int = 0
) -> Chart:
    """Return a chart of each client's number of samples, divided by class if the classes are known."""
    views: dict[tuple[str, ...], View] = {}
    tables, reasons, grouped = [], [], False
    for name, run in runs:
        sizes = {client: run.clients[client].num_samples for client in fastest_first(run) if client in run.clients}
        found = classes.get(id(run), "")
        if isinstance(found, str):
            reasons += [f"{name}: {found}"] if found else []
            found = {}
        if not sizes:
            continue
        grouped = grouped or len(sizes) > _MAX_BARS
        views[(name,)] = _bars(run, sizes, found) if len(sizes) <= _MAX_BARS else _histogram(sizes, found)
        tables.append(_partition_table(name, run, sizes, found))
    if not views:
        return Chart(
            "partition", "Data of the clients", "Without a journal it is not known who has how many samples.", {}
        )
    note = "Training samples of each client, the fastest devices on top."
    if grouped:
        note = f"Training samples of each client; of more than {_MAX_BARS}: how many of them have how many samples."
    if not any(not isinstance(found, str) for found in classes.values()):
        note += (
            " A run folder does not hold the classes of the samples: raafl report --labels reads the data that the "
            "config names, divides them again and shows them."
        )
    if left_out:
        note += f" {left_out} more runs are left out here: the first of each group is shown."
    note += "".join(f" {reason}" for reason in reasons)
    return Chart("partition", "Data of the clients", note, views, tables, {"Run": [name for (name,) in views]})


def _bars(run: RecordedRun, sizes: Mapping[int, int], classes: Classes) -> View:
    names = [lane(run, client) for client in sizes]
    bar = {"type": "bar", "orientation": "h", "y": names}
    traces = [{**bar, "x": list(sizes.values()), "name": "samples", "hovertemplate": "%{x} samples"}]
    if classes:
        num_classes = max(len(counts) for counts in classes.values())
        traces = [
            {
                **bar,
                "x": [_count(classes, client, label) for client in sizes],
                "name": f"class {label}",
                "hovertemplate": f"%{{x}} of class {label}",
            }
            for label in range(num_classes)
        ]
        unknown = [0 if client in classes else size for client, size in sizes.items()]
        if any(unknown):
            traces.append({**bar, "x": unknown, "name": "data of its own", "hovertemplate": "%{x} of its own"})
    layout = {
        "barmode": "stack",
        "xaxis": axis("samples"),
        "hovermode": "y unified",
        "height": lanes_height(len(sizes)),
        "yaxis": {"type": "category", "autorange": "reversed", "automargin": True, "showgrid": False},
    }
    return View(traces, layout)


def _histogram(sizes: Mapping[int, int], classes: Classes) -> View:
    """Chart a large number of clients: a histogram of their sample counts or, with ``classes``, class shares by groups."""
    if not classes:
        counts, edges = np.histogram(list(sizes.values()), _BANDS)
        trace = {
            "type": "bar",
            "x": rounded((edges[1:] + edges[:-1]) / 2),
            "y": counts.tolist(),
            "name": "clients",
            "hovertemplate": "%{y} clients with about %{x} samples<extra></extra>",
        }
        return View([trace], {"xaxis": axis("samples"), "yaxis": axis("clients"), "bargap": 0.05})
    main = {client: int(np.argmax(counts)) for client, counts in classes.items()}
    order = sorted(classes, key=lambda client: (main[client], client))
    num_classes = max(len(counts) for counts in classes.values())
    bands = split_evenly(order, _BANDS)
    shares = []
    for band in bands:
        counts = np.array([sum(_count(classes, client, label) for client in band) for label in range(num_classes)])
        shares.append(rounded(counts / max(counts.sum(), 1), 3))
    names = [f"{len(band)} clients ({i})" for i, band in enumerate(bands, start=1)]
    trace = {
        "type": "heatmap",
        "x": [str(label) for label in range(num_classes)],
        "y": names,
        "z": shares,
        "zmin": 0,
        "colorscale": "theme",
        "colorbar": {"tickformat": ".0%", "thickness": 10, "outlinewidth": 0},
        "hovertemplate": "%{y}: %{z:.1%} of class %{x}<extra></extra>",
    }
    y = {"type": "category", "autorange": "reversed", "automargin": True}
    return View([trace], {"xaxis": axis("class", type="category"), "yaxis": y, "hovermode": "closest"})


def _count(classes: Classes, client: int, label: int) -> int:
    counts = classes.get(client, ())
    return counts[label] if label < len(counts) else 0


def _partition_table(name: str, run: RecordedRun, sizes: Mapping[int, int], classes: Classes) -> Table:
    num_classes = max((len(counts) for counts in classes.values()), default=0)
    rows: list[list[Cell]] = [
        [lane(run, client), size, *(_count(classes, client, label) for label in range(num_classes))]
        for client, size in sizes.items()
    ]
    kept, said = thin_rows(rows)
    total = Counter(run.clients[client].own_data for client in sizes)
    said += f" {total[True]} clients have data of their own." if total[True] else ""
    return Table(["client", "samples", *(f"class {label}" for label in range(num_classes))], kept, f"{name}. {said}")
