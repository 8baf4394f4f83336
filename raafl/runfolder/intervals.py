"""Find from a run folder when each task began and ended, and how long each client was at work."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raafl.runfolder.reading import Numbers, RecordedRun
from raafl.runfolder.schema import KINDS, LOST

OPEN = len(KINDS)
"""Kind of a task that was in progress when the run ended."""


@dataclass(frozen=True, slots=True)
class TaskIntervals:
    """Time intervals of the tasks of a run, one entry per task."""

    client: npt.NDArray[np.int64]  # id of the client that had the task
    start_s: Numbers  # seconds on the run's clock at which the task began
    stop_s: Numbers  # seconds on the run's clock at which the task ended
    kind: npt.NDArray[np.int64]  # index in `KINDS` of the task's outcome, such as merged or lost; `OPEN` = in progress
    row: npt.NDArray[np.int64]  # row of the task in the run's table of tasks; -1 = it is not there


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
    """Find the first of ascending ``times`` that is not before ``since``; ``otherwise`` if there is none."""
    place = bisect_left(times, since)
    return times[place] if place < len(times) else otherwise


def counts_from_s(intervals: TaskIntervals) -> Numbers:
    """Return the second from which each task counts, so that no second of a client counts twice.

    With `overlap` a client trains its next task while its last update travels.
    """
    counts, until_s = intervals.start_s.copy(), dict[int, float]()
    for task in np.lexsort((intervals.stop_s, intervals.start_s)).tolist():
        client, stop_s = int(intervals.client[task]), float(intervals.stop_s[task])
        before_s = until_s.get(client, 0.0)
        counts[task] = min(max(float(counts[task]), before_s), stop_s)
        until_s[client] = max(before_s, stop_s)
    return counts


def worked_s(run: RecordedRun) -> dict[int, float]:
    """Return by client for how many seconds it was in tasks, of whatever outcome, up to the end of the run."""
    intervals = task_intervals(run)
    lasted_s = np.clip(intervals.stop_s, None, run.end_s) - np.clip(counts_from_s(intervals), None, run.end_s)
    found: dict[int, float] = dict.fromkeys(run.client_ids(), 0.0)
    for client, seconds in zip(intervals.client.tolist(), lasted_s.tolist(), strict=True):
        found[client] += seconds
    return found
