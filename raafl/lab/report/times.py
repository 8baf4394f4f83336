"""Compute how much of each client's time was spent on download, training, upload and waiting."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raafl.runfolder.reading import ClientRecord, Numbers, RecordedRun, number
from raafl.runfolder.schema import KINDS, LOST, MERGED

OPEN = len(KINDS)
"""Kind of a task that was under way when the run ended."""
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


@dataclass(frozen=True, slots=True)
class TaskIntervals:
    """Time intervals of the tasks of a run, one entry per task."""

    client: npt.NDArray[np.int64]  # id of the client that had the task
    start_s: Numbers  # start of the task, in seconds on the run's clock
    stop_s: Numbers  # end of the task, in seconds on the run's clock
    kind: npt.NDArray[np.int64]  # index of the task's outcome, such as merged or lost, in `KIND_NAMES`
    row: npt.NDArray[np.int64]  # index of the task in the run's table of tasks; -1 if the table lacks it


def task_intervals(run: RecordedRun) -> TaskIntervals:
    """Return the time interval of each task of a run.

    A task ends with the arrival of its update. A lost task ends when its client was lost or, if that is unknown, when
    the client starts its next task. Any other task ends with the run.
    """
    tasks, end_s = run.tasks, run.end_s
    start_s, stop_s = tasks["assigned_s"].copy(), tasks["arrived_s"].copy()
    rows = np.flatnonzero(np.isfinite(start_s))
    begun: dict[int, list[float]] = {}
    for row in rows:
        begun.setdefault(int(tasks.client[row]), []).append(float(start_s[row]))
    for times in begun.values():
        times.sort()
    kind = tasks.kind.copy()
    for row in rows[~np.isfinite(stop_s[rows])]:
        client, since = int(tasks.client[row]), float(start_s[row])
        stop_s[row] = end_s
        if kind[row] == KINDS.index(LOST):
            lost_s = _first(run.lost_at.get(client, ()), since, end_s)
            stop_s[row] = min(lost_s, _first(begun[client], math.nextafter(since, math.inf), end_s), end_s)
    num_open = len(run.open_tasks)
    return TaskIntervals(
        np.concatenate([tasks.client[rows], np.array([client for client, _ in run.open_tasks], np.int64)]),
        np.concatenate([start_s[rows], np.array([since for _, since in run.open_tasks], np.float64)]),
        np.concatenate([np.maximum(stop_s[rows], start_s[rows]), np.full(num_open, end_s)]),
        np.concatenate([kind[rows], np.full(num_open, OPEN, np.int64)]),
        np.concatenate([rows, np.full(num_open, -1, np.int64)]),
    )


def _first(times: Sequence[float], since: float, otherwise: float) -> float:
    """Return the first of ascending times at or after ``since``; ``otherwise`` if there is none."""
    place = bisect_left(times, since)
    return times[place] if place < len(times) else otherwise


def uses(run: RecordedRun, intervals: TaskIntervals) -> dict[int, dict[str, float]]:
    """Compute how many seconds of the run each client spent on training, transfers, waiting and the other `USES` of time.

    The times of transfers are computed from the bytes and the link speeds of the device. If these are unknown or vary,
    a task's time counts as "training and transfer" as a whole.
    """
    end_s = run.end_s
    times = {client: dict.fromkeys(USES, 0.0) for client in run.client_ids()}
    lasted = np.clip(intervals.stop_s, None, end_s) - np.clip(intervals.start_s, None, end_s)
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
    """Return seconds per byte down and up, and the latency; NaN for a real link of unknown speed, and for one that varies."""
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
    shares = np.zeros((len(clients), len(edges) - 1))
    widths = np.diff(edges)
    for band, members in enumerate(clients):
        mine = bands == band
        worked = np.zeros(len(edges))
        for edge in range(len(edges)):  # seconds worked until then
            until = np.minimum(intervals.stop_s[mine], edges[edge]) - np.minimum(intervals.start_s[mine], edges[edge])
            worked[edge] = until.sum()
        shares[band] = np.diff(worked) / (widths * max(len(members), 1))
    return np.clip(shares, 0.0, 1.0)
