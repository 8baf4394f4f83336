"""Format a run's method, and its summary at the end, for people."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

from raafl.runfolder.schema import Summary
from raafl.units import duration, quantity, size

REASONS = {
    "max_updates": "max_updates reached",
    "max_time": "max_time is up",
    "target": "target reached",
    "epsilon": "privacy.max_epsilon reached",
}
"""Sentences for the codes with which runs reach their end; any other reason is a sentence already."""


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
    lines += [
        f"while a client trained, {staleness['mean']:.2f} updates of others were merged on average, at most "
        f"{staleness['max']} (staleness)",
        f"clients worked {summary['utilisation']:.0%} of the time; {size(summary['bytes_down'])} were sent to them, "
        f"{size(summary['bytes_up'])} came back",
    ]
    if summary.get("tokens"):
        lines.append(f"trained on {summary['tokens']:,} tokens, {summary['tokens_per_s'] or 0:,.0f} a second")
    bad = {f"refused as {reason}": n for reason, n in summary["updates_refused"].items()}
    if summary["updates_lost"]:
        bad["lost"] = summary["updates_lost"]
    if bad:
        lines.append("not merged: " + ", ".join(f"{n} {reason}" for reason, n in bad.items()))
    lines += [f"not written: {n} of {name}" for name, n in summary["unwritten"].items()]
    lines += [f"logger {name}: {n['failed']} calls failed" for name, n in summary["loggers"].items() if n["failed"]]
    lines.append(f"model digest {summary['model_digest'][:16]} (a replay of the run ends with the same)")
    if summary.get("model"):
        lines.append(f"final model: {folder / summary['model']}")
    lines.append(f"run folder: {folder}")
    if mirror := summary.get("mirror"):
        lines.append(f"copy in {mirror['url']}" + ("" if mirror["whole"] else f", not whole: {mirror['error']}"))
    lines.append(f"next: {report_command(folder)}")
    return lines


def report_command(folder: Path) -> str:
    """Return the shell command that reports on a run, by raafl's name if it is on PATH, else by this Python with ``-m``."""
    python, here = Path(sys.executable), Path.cwd()
    started = str(python.relative_to(here) if python.is_relative_to(here) else python)
    program = ["raafl"] if shutil.which("raafl") else [started, "-m", "raafl"]
    return shlex.join([*program, "report", str(folder)])


def _participation(participation: dict[str, int]) -> list[str]:
    """Draw a text bar for each of the first 16 clients, as long as its share of the merged updates."""
    total = max(sum(participation.values()), 1)
    shown = list(participation.items())[:16]
    widest = max((n for _, n in shown), default=1) or 1
    lines = ["merged updates of each client:"]
    lines += [f"  client {c:>3}  {n:5d}  {n / total:6.1%}  {'#' * round(30 * n / widest)}".rstrip() for c, n in shown]
    if len(participation) > len(shown):
        lines.append(f"  ... and {len(participation) - len(shown)} more, in summary.json")
    return lines
