"""Format the summary of a finished run for people."""

from __future__ import annotations

from pathlib import Path

from raafl.runfolder.schema import Summary
from raafl.units import duration, quantity, size

REASONS = {
    "max_updates": "max_updates reached",
    "max_time": "max_time is up",
    "target": "target reached",
    "epsilon": "privacy.max_epsilon reached",
}
"""Why runs end, in words; any other reason is one already."""


def summary_lines(summary: Summary, folder: Path) -> list[str]:
    """Format the summary of a run as the lines of text that are printed at its end."""
    final = "  ".join(f"{name} {value:.4f}" for name, value in summary["final"].items())
    clock = "virtual" if summary["runtime"] == "simulated" else "wall-clock"
    real = f" ({duration(summary['wall_s'])} real)" if summary["runtime"] == "simulated" else ""
    lines = [
        "",
        f"finished: {REASONS.get(summary['finished'], summary['finished'])} after "
        f"{quantity(summary['updates_merged'], 'update')}, {quantity(summary['versions'], 'version')}, "
        f"{duration(summary['time_s'])} of {clock} time{real}",
        f"global model on the held-out data: {final}",
    ]
    for target, at in summary["time_to"].items():
        lines.append(f"time to {target}: " + (duration(at) if at is not None else "not reached"))
    lines += _participation(summary["participation"])
    staleness = summary["staleness"]
    lines.append(
        f"staleness mean {staleness['mean']:.2f}, max {staleness['max']}; "
        f"clients at work {summary['utilisation']:.0%} of the time; "
        f"{size(summary['bytes_down'])} down, {size(summary['bytes_up'])} up"
    )
    bad = {f"refused as {reason}": n for reason, n in summary["updates_refused"].items()}
    if summary["updates_lost"]:
        bad["lost"] = summary["updates_lost"]
    if bad:
        lines.append("not merged: " + ", ".join(f"{n} {reason}" for reason, n in bad.items()))
    lines += [f"not written: {n} of {name}" for name, n in summary["unwritten"].items()]
    lines += [f"logger {name}: {n['failed']} calls failed" for name, n in summary["loggers"].items() if n["failed"]]
    lines.append(f"model digest {summary['model_digest'][:16]}")
    if summary.get("model"):
        lines.append(f"final model: {folder / summary['model']}")
    lines.append(f"run folder: {folder}")
    if mirror := summary.get("mirror"):
        lines.append(f"copy in {mirror['url']}" + ("" if mirror["whole"] else f", not whole: {mirror['error']}"))
    return lines


def _participation(participation: dict[str, int]) -> list[str]:
    """Return a bar for each of the first clients."""
    total = max(sum(participation.values()), 1)
    shown = list(participation.items())[:16]
    widest = max((n for _, n in shown), default=1) or 1
    lines = ["who worked how much (merged updates of each client):"]
    lines += [f"  client {c:>3}  {n:5d}  {n / total:6.1%}  {'#' * round(30 * n / widest)}".rstrip() for c, n in shown]
    if len(participation) > len(shown):
        lines.append(f"  ... and {len(participation) - len(shown)} more, in summary.json")
    return lines
