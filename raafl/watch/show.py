"""Format a snapshot of a run: as a line, as a terminal table, and as plain data."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from typing import TYPE_CHECKING, Any

from raafl.units import duration, quantity, size
from raafl.watch.snapshot import ClientProgress, ProgressState

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_ROWS = 16
WIDTH = 100
"""Columns that a line of a log has at most."""


def sentence(state: ProgressState, width: int = WIDTH) -> str:
    """Format a run's progress as one line of at most ``width`` characters; less important parts are left out to make it fit."""
    parts = [(0, _moment(state.time_s, state.version)), (0, _updates(state)), *_rates(state)]
    if state.clients or state.num_clients:
        working, there = _counts(state)
        parts.append((2, f"{working} of {there} at work"))
    if (ends := _ends(state)) is not None:
        parts.append((0, ends))
    room, chosen = width + 2, set[str]()
    for rank, text in sorted(parts, key=lambda part: part[0]):
        if not rank or len(text) + 2 <= room:
            chosen.add(text)
            room -= len(text) + 2
    return "  ".join(text for _, text in parts if text in chosen)


def evaluation(state: ProgressState, width: int = WIDTH) -> str:
    """Format the last evaluation as one line of at most ``width`` characters, with as many metrics as fit."""
    metrics, head = _metrics(state), f"{_moment(*(state.evaluated or (state.time_s, state.version)))}  eval:"
    shown = len(metrics)
    while len(line := "  ".join([head, *metrics[:shown], *_more(len(metrics) - shown)])) > width and shown > 1:
        shown -= 1
    return line


def wrapped(text: str, width: int = WIDTH) -> str:
    """Wrap a text to ``width`` columns, with continuation lines indented."""
    return textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def table(state: ProgressState, title: str = "") -> RenderableType:
    """Return the progress table for a terminal: title, a row per client, the run's counts, metrics and remaining time."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = Table(box=None, pad_edge=False)
    for name, right in (("client", 0), ("trains", 0), ("version", 1), ("for", 1), ("back in", 1), ("merged", 1)):
        rows.add_column(name, justify="right" if right else "left", no_wrap=name != "trains")
    for client in state.clients[:MAX_ROWS]:
        rows.add_row(*(Text(cell) for cell in _cells(client)))
    if hidden := (state.num_clients or len(state.clients)) - len(state.clients[:MAX_ROWS]):
        at_work = _counts(state)[0] - sum(bool(client.doing) for client in state.clients[:MAX_ROWS])
        rows.add_row("...", f"{hidden} more, {at_work} at work")
    rates = [text for _, text in _rates(state)]
    head = [f"version {state.version}", _updates(state), f"{state.time_s:.1f} s", *rates, *_troubles(state)]
    lines: list[RenderableType] = [Text(line) for line in dict.fromkeys((title, state.title)) if line]
    lines += [rows, Text("  ".join(head)), Text("  ".join(_metrics(state)), style="bold")]
    lines += [Text(line) for line in (_goals(state), _ends(state)) if line]
    return Group(*lines)


def plain(state: ProgressState) -> dict[str, Any]:
    """Convert a snapshot of a run's progress to plain data, for JSON."""
    metrics = {name: value if math.isfinite(value) else None for name, value in state.metrics.items()}
    now = "running" if state.finished is None else "finished"
    return {**dataclasses.asdict(state), "metrics": metrics, "state": now}


def _metrics(state: ProgressState) -> list[str]:
    """Format the global model's metrics, without the many shares of ranks, which are for reports."""
    return [f"{name} {value:.4g}" for name, value in state.metrics.items() if not name.startswith("rank_energy/")]


def _cells(client: ClientProgress) -> tuple[str, ...]:
    name = f"{client.client} {client.device}".strip()
    if not client.doing:
        return (name, "idle" if client.there else "gone", "", "", "", str(client.num_tasks))
    version = "" if client.version is None else f"{client.version}"
    version += f" (-{client.behind})" if client.behind else ""
    since = "" if client.since_s is None else duration(client.since_s)
    due = client.due_in_s
    back = "?" if due is None else duration(due) if due >= 0 else f"late {duration(-due)}"
    return (name, client.doing, version, since, "" if client.since_s is None else back, str(client.num_tasks))


def _counts(state: ProgressState) -> tuple[int, int]:
    working = sum(bool(client.doing) for client in state.clients) if state.num_working is None else state.num_working
    return working, len(state.clients) if state.num_there is None else state.num_there


def _updates(state: ProgressState) -> str:
    done, goal = state.num_updates, state.num_updates_goal
    return quantity(done, "update") if goal is None else f"{done} of {quantity(goal, 'update')}"


def _moment(time_s: float, version: int) -> str:
    return f"{time_s:9.1f} s  version {version}"


def _more(num: int) -> list[str]:
    return [f"and {num} more"] if num else []


def _rates(state: ProgressState) -> list[tuple[int, str]]:
    """Return the run's rates with priorities: a figure of higher number is left out sooner."""
    if state.updates_per_s is None or state.bytes_per_s is None:
        return []
    rates = [(1, f"{state.updates_per_s:.3g} updates/s"), (4, f"{size(state.bytes_per_s)}/s")]
    if state.simulated and state.speed is not None:
        rates.append((5, f"{state.speed:.3g} times real time"))
    if state.trainings_per_s is not None:
        rates.append((6, f"{state.trainings_per_s:.3g} trainings/s{_how(state)}"))
    return [*rates, (3, f"staleness {state.staleness_mean:.3g} (at most {state.staleness_max})")]


def _how(state: ProgressState) -> str:
    processes = f" in {state.num_processes} processes" if (state.num_processes or 1) > 1 else ""
    if not state.share_batched or state.mean_cohort is None:
        return processes
    return f"{processes} ({state.share_batched:.0%} in batches of {state.mean_cohort:.3g} clients)"


def _troubles(state: ProgressState) -> list[str]:
    return [f"{num} {kind}" for kind, num in sorted(state.outcomes.items()) if kind != "merged" and num]


def _goals(state: ProgressState) -> str:
    found = [f"{eta.goal} {_when(state, eta.in_s)}" for eta in state.etas]
    return "  ".join(found) if len(found) > 1 else ""


def _ends(state: ProgressState) -> str | None:
    if state.finished is not None:
        return f"ended: {state.finished}"
    if state.ends_in_s is None:
        return None
    return f"ends {_when(state, state.ends_in_s)}" if state.ends_in_s > 0 else "ends now"


def _when(state: ProgressState, in_s: float | None) -> str:
    if in_s is None:
        return "at an unknown time"
    if in_s == 0:
        return "reached"
    here = f", here {duration(in_s / state.speed)}" if state.simulated and state.speed else ""
    return f"in {duration(in_s)}{here}"
