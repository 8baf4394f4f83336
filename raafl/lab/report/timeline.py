"""Chart when each client worked, waited or was lost, and how its time was spent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from raafl.lab.report.page import Cell, Chart, Table, View, axis, briefly, rounded, split_evenly, thin_rows
from raafl.runfolder.intervals import TaskIntervals, counts_from_s, task_intervals
from raafl.runfolder.reading import ClientRecord, Numbers, RecordedRun, number
from raafl.runfolder.schema import KINDS, MERGED

_MAX_LANES, _BANDS = 40, 24
_MAX_TASKS = 2500
_STEPS = 120
_LABEL = 18
USE_COLOURS = ("#4269d0", "#6cc5b0", "#4269d0", "#e8684a", "#b9b9c2", "rgba(128,128,128,0.18)")
_WAITING = "rgba(140,140,150,0.35)"


def fastest_first(run: RecordedRun) -> list[int]:
    """Return the ids of a run's clients, the fastest device first, those of unknown speed last."""

    def speed(client: int) -> tuple[float, int]:
        known = run.clients.get(client)
        flops_per_s = known.flops_per_s if known is not None else math.nan
        return (math.inf if math.isnan(flops_per_s) else -flops_per_s, client)

    return sorted(run.client_ids(), key=speed)


def lane(run: RecordedRun, client: int) -> str:
    """Return the label of a client in a chart: its id and device."""
    device = run.clients[client].device if client in run.clients else ""
    device = device if len(device) <= _LABEL else device[: _LABEL - 1] + "…"
    return f"{client} {device}".strip()


def lanes_height(lanes: int) -> int:
    """Return the height in pixels of a chart with ``lanes`` horizontal bars."""
    return 130 + 26 * lanes


def _bands_of(run: RecordedRun, order: Sequence[int]) -> dict[str, list[int]]:
    """Assign clients to the rows of a chart; return each row's client ids by its label.

    Each client has a row; if there are too many, clients of similar speed share one.
    """
    if len(order) <= _MAX_LANES:
        return {lane(run, client): [client] for client in order}
    named: dict[str, list[int]] = {}
    for place, band in enumerate(split_evenly(order, _BANDS), start=1):
        speeds = [run.clients[client].flops_per_s for client in band if client in run.clients]
        known = [speed for speed in speeds if speed > 0]
        name = f"{len(band)} at {briefly(float(np.median(known)))}FLOP/s" if known else f"{len(band)} clients"
        named[f"{name} ({place})" if name in named else name] = band
    return named


def timeline(runs: Sequence[tuple[str, RecordedRun]], left_out: int = 0) -> Chart:
    """Return a chart of each client's tasks over time, for each run; ``left_out`` further runs are not shown."""
    views: dict[tuple[str, ...], View] = {}
    tables, large, unknown = [], False, False
    for name, run in runs:
        found = task_intervals(run)
        if not len(found.client) or run.end_s <= 0:
            continue
        order = fastest_first(run)
        if len(order) <= _MAX_LANES and len(found.client) <= _MAX_TASKS:
            views[(name,)] = _lanes(run, order, found)
        else:
            views[(name,)], large = _heat(run, order, found), True
        unknown = unknown or not run.has_journal
        tables.append(_tasks_table(name, run, found))
    if not views:
        return Chart("timeline", "Who did what when", "No task has been assigned.", {})
    note = "One lane for each client, the fastest devices on top; the grey between tasks is waiting, no lane at all is away."
    if large:
        note = (
            f"Where a run has more than {_MAX_LANES} clients or {_MAX_TASKS:,} tasks: the share of its time that each band of"
            f" clients was at work, in {_STEPS} steps, the fastest devices on top. " + note
        )
    if unknown:
        note += " Without a journal it is not known who was there when: all are drawn as present."
    note += _others(left_out)
    return Chart("timeline", "Who did what when", note, views, tables, {"Run": [name for (name,) in views]})


def _lanes(run: RecordedRun, order: Sequence[int], found: TaskIntervals) -> View:
    end_s = run.end_s
    labels = {client: lane(run, client) for client in order}
    spells: list[tuple[str, float, float]] = []
    for client in order:
        known = run.clients.get(client)
        for since, to in known.spells if known is not None else [(0.0, end_s)]:
            spells.append((labels[client], min(since, end_s), min(to, end_s)))
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": "waiting",
            "marker": {"color": _WAITING},
            "width": 0.22,
            "y": [spell[0] for spell in spells],
            "base": rounded([spell[1] for spell in spells], 7),
            "x": rounded([spell[2] - spell[1] for spell in spells], 7),
            "hoverinfo": "skip",
        }
    ]
    for kind, name in enumerate(KIND_NAMES):
        mine = np.flatnonzero(found.kind == kind)
        if not len(mine):
            continue
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "width": 0.72,
                "marker": {"color": KIND_COLOURS[kind], "line": {"width": 0.5, "color": "rgba(255,255,255,0.6)"}},
                "y": [labels[int(client)] for client in found.client[mine]],
                "base": rounded(found.start_s[mine], 7),
                "x": rounded(found.stop_s[mine] - found.start_s[mine], 7),
                "customdata": [_told(run, int(row)) for row in found.row[mine]],
                "hovertemplate": "%{y}, %{base:.4s} s for %{x:.4s} s<br>%{customdata}<extra>" + name + "</extra>",
            }
        )
    layout = {
        "barmode": "overlay",
        "hovermode": "closest",
        "height": lanes_height(len(order)),
        "xaxis": axis("seconds on the run's clock", range=[0, float(f"{end_s:.7g}")]),
        "yaxis": {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": list(labels.values()),
            "autorange": "reversed",
            "automargin": True,
            "showgrid": False,
        },
    }
    return View(traces, layout)


def _told(run: RecordedRun, row: int) -> str:
    if row < 0:
        return "no row in clients.csv"
    tasks = run.tasks
    version, stale = tasks["version"][row], tasks["staleness"][row]
    spec = tasks.spec[row] if len(tasks.spec[row]) <= _MAX_LANES else tasks.spec[row][: _MAX_LANES - 1] + "…"
    return f"version {version:.0f}, {spec}, staleness {stale:.0f}, {tasks.outcome[row]}"


def _heat(run: RecordedRun, order: Sequence[int], found: TaskIntervals) -> View:
    bands = _bands_of(run, order)
    edges = np.linspace(0.0, run.end_s, _STEPS + 1)
    shares = busy_share(found, list(bands.values()), edges)
    trace = {
        "type": "heatmap",
        "x": rounded((edges[1:] + edges[:-1]) / 2),
        "y": list(bands),
        "z": [rounded(row, 3) for row in shares],
        "zmin": 0,
        "zmax": 1,
        "colorscale": "theme",
        "colorbar": {"tickformat": ".0%", "thickness": 10, "outlinewidth": 0, "len": 0.9},
        "hovertemplate": "%{y}: at work %{z:.0%} of the time around %{x:.4s} s<extra></extra>",
    }
    layout = {
        "xaxis": axis("seconds on the run's clock"),
        "hovermode": "closest",
        "height": lanes_height(len(bands)),
        "yaxis": {"type": "category", "autorange": "reversed", "automargin": True},
    }
    return View([trace], layout)


def _tasks_table(name: str, run: RecordedRun, found: TaskIntervals) -> Table:
    order = np.argsort(found.start_s, kind="stable")
    tasks = run.tasks
    places, said = thin_rows([[int(i)] for i in order], 100)
    rows: list[list[Cell]] = []
    for i in (int(str(place[0])) for place in places):
        row, stop_s = int(found.row[i]), float(found.stop_s[i])
        begun = rounded([found.start_s[i], stop_s, stop_s - found.start_s[i]])
        if row < 0:
            rows.append([int(found.client[i]), *begun, "", None, None, KIND_NAMES[-1]])
        else:
            numbers = rounded([tasks["version"][row], tasks["staleness"][row]])
            rows.append([int(found.client[i]), *begun, tasks.spec[row], *numbers, tasks.outcome[row]])
    return Table(
        ["client", "from, s", "to, s", "seconds", "submodel", "version", "staleness", "outcome"],
        rows,
        f"{name}. {said}",
    )


def time_spent(runs: Sequence[tuple[str, RecordedRun]], left_out: int = 0) -> Chart:
    """Return a chart of how each client, and all clients together, spent their time; ``left_out`` further runs are not shown."""
    views: dict[tuple[str, ...], View] = {}
    tables: list[Table] = []
    totals: dict[str, dict[str, float]] = {}
    for name, run in runs:
        if run.end_s <= 0 or not run.client_ids():
            continue
        spent = uses(run, task_intervals(run))
        all_s = max(run.end_s * len(spent), 1e-300)
        totals[name] = {use: sum(mine[use] for mine in spent.values()) / all_s for use in USES}
        order = fastest_first(run)
        shares = {
            label: {use: sum(spent[client][use] for client in band) / (run.end_s * len(band)) for use in USES}
            for label, band in _bands_of(run, order).items()
        }
        views[("each client", name)] = _stacked(shares)
        rows = [[lane(run, client), *rounded([spent[client][use] for use in USES], 4)] for client in order]
        kept, said = thin_rows(rows)
        tables.append(Table(["client", *(f"{use}, s" for use in USES)], kept, f"{name}. {said}"))
    if not views:
        return Chart("time-spent", "Where the time went", "No task has been assigned.", {})
    together = _stacked(totals)
    for name in totals:
        views[("all clients", name)] = together
    rows = [[name, *rounded([mine[use] for use in USES], 3)] for name, mine in totals.items()]
    tables.insert(0, Table(["run", *USES], rows, "Shares of all clients' time, from the start to the end of the run."))
    note = (
        "Shares of the time from the start to the end. Transfer is what a device's links take for the bytes of its tasks, by"
        " its profile; training is the rest of a task, which includes tests on a client's own samples. A task whose links vary,"
        " or in real time have no profile, is not divided. Work that was not merged was lost, refused, not used, or under way at"
        " the end. With overlap, what a client does while its last update travels counts as that update's task."
    ) + _others(left_out)
    many = any(len(run.client_ids()) > _MAX_LANES for _, run in runs)
    note += f" More than {_MAX_LANES} clients are drawn as {_BANDS} bands of clients of similar speed." if many else ""
    choices = {"Of": ["each client", "all clients"], "Run": list(totals)}
    return Chart("time-spent", "Where the time went", note, views, tables, choices)


def _stacked(shares: dict[str, dict[str, float]]) -> View:
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": use,
            "y": list(shares),
            "x": rounded([mine[use] for mine in shares.values()], 4),
            "marker": {"color": colour},
            "hovertemplate": "%{x:.1%} " + use,
        }
        for use, colour in zip(USES, USE_COLOURS, strict=True)
        if any(mine[use] > 0 for mine in shares.values()) or use == WAIT
    ]
    layout = {
        "barmode": "stack",
        "hovermode": "y unified",
        "height": lanes_height(len(shares)),
        "xaxis": {"tickformat": ".0%", "range": [0, 1]},
        "yaxis": {"type": "category", "autorange": "reversed", "automargin": True, "showgrid": False},
    }
    return View(traces, layout)


def _others(left_out: int) -> str:
    return f" {left_out} more runs are left out here: the first of each group is shown." if left_out else ""


KIND_NAMES = ("merged", "not used", "refused", "lost", "under way at the end")
KIND_COLOURS = ("#4269d0", "#97bbf5", "#efb118", "#e8684a", "#6cc5b0")

TRAIN, TRANSFER, TASK, NOTHING, WAIT, AWAY = USES = (
    "training",
    "transfer",
    "training and transfer",
    "work that was not merged",
    "waiting",
    "away",
)


def uses(run: RecordedRun, intervals: TaskIntervals) -> dict[int, dict[str, float]]:
    """Compute how many seconds of the run each client spent on training, transfers, waiting and the other `USES` of time.

    The times of transfers are computed from the bytes and the link speeds of the device. If these are unknown or vary,
    a task's time counts as "training and transfer" as a whole.
    """
    end_s = run.end_s
    times = {client: dict.fromkeys(USES, 0.0) for client in run.client_ids()}
    lasted = np.clip(intervals.stop_s, None, end_s) - np.clip(counts_from_s(intervals), None, end_s)
    transfers = transfer_s(run)
    for client, kind, row, seconds in zip(
        intervals.client.tolist(), intervals.kind.tolist(), intervals.row.tolist(), lasted.tolist(), strict=True
    ):
        mine = times[client]
        if kind != KINDS.index(MERGED):
            mine[NOTHING] += seconds
        elif math.isnan(transfers[row]):
            mine[TASK] += seconds
        else:
            on_the_way = min(float(transfers[row]), seconds)
            mine[TRANSFER] += on_the_way
            mine[TRAIN] += seconds - on_the_way
    for client, mine in times.items():
        busy = sum(mine.values())
        mine[WAIT] = max(_present_s(run, client, end_s) - busy, 0.0)
        mine[AWAY] = max(end_s - busy - mine[WAIT], 0.0)
    return times


def _present_s(run: RecordedRun, client: int, end_s: float) -> float:
    known = run.clients.get(client)
    if known is None:
        return end_s
    return sum(max(min(to, end_s) - min(since, end_s), 0.0) for since, to in known.spells)


def transfer_s(run: RecordedRun) -> Numbers:
    """Compute the seconds that the transfers of each task need, `(tasks,)`; NaN if the link speed is unknown."""
    tasks = run.tasks
    assignments = tasks["assignment"].tolist()
    down_s, up_s, latency_s = (np.full(len(tasks), math.nan) for _ in range(3))
    links = {client.id: _link(client, run.is_simulated) for client in run.clients.values()}
    for row, client in enumerate(tasks.client.tolist()):
        if client in links:
            down_s[row], up_s[row], latency_s[row] = links[client]
            latency_s[row] *= 1 + run.num_exchanges.get(assignments[row], 0)
    total: Numbers = (
        2 * latency_s + np.nan_to_num(tasks["bytes_down"]) * down_s + np.nan_to_num(tasks["bytes_up"]) * up_s
    )
    return total


def _link(client: ClientRecord, is_simulated: bool) -> tuple[float, float, float]:
    """Read a client's link from its profile: seconds per byte down and up, and latency in seconds.

    All are NaN if the link's speed is unknown or varies.
    """
    down, up = (number(client.profile.get(name)) for name in ("down_bytes_per_s", "up_bytes_per_s"))
    latency = number(client.profile.get("latency_s"))
    latency = 0.0 if math.isnan(latency) else latency
    if not client.profile or (not is_simulated and math.isnan(down) and math.isnan(up)):
        return math.nan, math.nan, math.nan
    if any(client.profile.get(name) for name in ("link_changes", "link_drift", "link_jitter")):
        return math.nan, math.nan, math.nan
    down_s, up_s = (0.0 if math.isnan(rate) or rate <= 0 else 1 / rate for rate in (down, up))
    return down_s, up_s, latency


def busy_share(intervals: TaskIntervals, clients: Sequence[Sequence[int]], edges: Numbers) -> npt.NDArray[np.float64]:
    """Compute the share, 0 to 1, of each time interval that a group of clients spent in tasks, `(groups, len(edges) - 1)`."""
    band_of = {client: band for band, members in enumerate(clients) for client in members}
    bands = np.array([band_of.get(client, -1) for client in intervals.client.tolist()], np.int64)
    start_s = counts_from_s(intervals)
    shares = np.zeros((len(clients), len(edges) - 1))
    widths = np.diff(edges)
    for band, members in enumerate(clients):
        mine = bands == band
        worked = np.zeros(len(edges))
        for edge in range(len(edges)):  # seconds of work, summed over clients, until each edge of the bins
            until = np.minimum(intervals.stop_s[mine], edges[edge]) - np.minimum(start_s[mine], edges[edge])
            worked[edge] = until.sum()
        shares[band] = np.diff(worked) / (widths * max(len(members), 1))
    return np.clip(shares, 0.0, 1.0)
