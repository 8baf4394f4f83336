"""Are the books of a run folder in order? Read with json and csv alone, so that raafl's own readers are not trusted."""

from __future__ import annotations

import csv
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

NAMES = {
    "config.yaml",
    "events.jsonl",
    "metrics.csv",
    "clients.csv",
    "checkpoints",
    "summary.json",
    "seals.jsonl",
    "logs",
    "model",
}
EVENTS = ("joined", "arrived", "lost", "timer", "stop")
Row = dict[str, Any]


def journal(folder: Path) -> list[Row]:
    """Every row of the journal; a torn line anywhere but at the end raises ValueError."""
    lines = (folder / "events.jsonl").read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1]]


def that_count(rows: list[Row]) -> list[Row]:
    """The rows that are part of the run's history: a resumed run goes back behind the events after its checkpoint."""
    kept: list[Row] = []
    for row in rows:
        if row["event"] == "resumed":
            events = [place for place, earlier in enumerate(kept) if earlier["event"] in EVENTS]
            if row["kept"] < len(events):
                del kept[events[row["kept"]] :]
        kept.append(row)
    return kept


def audit(folder: Path) -> dict[str, list[str]]:
    """What is wrong with a finished run's folder, by check; empty lists where nothing is."""
    rows, summary = journal(folder), json.loads((folder / "summary.json").read_text())
    with (folder / "clients.csv").open(newline="") as file:
        tasks = list(csv.DictReader(file))
    return {
        "ids are never reused": _ids(rows),
        "every assignment is accounted for once": _accounts(rows, tasks),
        "what was merged has arrived once": _arrivals(rows, tasks),
        "the summary agrees with the tables": _totals(summary, tasks),
        "metrics go on": _metrics(folder, summary),
        "nothing else is in the folder": _leftovers(folder),
    }


def _ids(rows: list[Row]) -> list[str]:
    ids = [row["id"] for row in rows if row["event"] == "assigned"]
    return [f"assignment {b} was handed out after {a}" for a, b in itertools.pairwise(ids) if b <= a]


def _accounts(rows: list[Row], tasks: list[Row]) -> list[str]:
    assigned = {str(row["id"]): row for row in rows if row["event"] == "assigned"}
    settled = Counter(task["assignment"] for task in tasks if task["assignment"])
    problems = [f"assignment {number} has no row" for number in assigned if number not in settled]
    problems += [f"assignment {number} has {n} rows" for number, n in settled.items() if n > 1]
    problems += [f"assignment {number} was never handed out" for number in settled if number not in assigned]
    for task in tasks:
        kind, _, reason = task["outcome"].partition(":")
        if kind not in ("merged", "refused", "lost", "unused") or bool(reason) != (kind in ("refused", "lost")):
            problems.append(f"a row of client {task['client']} has the outcome '{task['outcome']}'")
        if not task["assignment"] and kind != "refused":
            problems.append(f"a row of client {task['client']} is {kind}, of no assignment")
        if task["assignment"] in assigned and str(assigned[task["assignment"]]["client"]) != task["client"]:
            problems.append(f"assignment {task['assignment']} is accounted to client {task['client']}")
    return problems


def _arrivals(rows: list[Row], tasks: list[Row]) -> list[str]:
    sound = Counter(
        str(row["assignment"]) for row in that_count(rows) if row["event"] == "arrived" and row["refusal"] is None
    )
    merged = [task["assignment"] for task in tasks if task["outcome"] == "merged"]
    return [f"assignment {number} was merged but never arrived" for number in merged if not sound[number]]


def _totals(summary: Row, tasks: list[Row]) -> list[str]:
    outcomes = Counter(task["outcome"] for task in tasks)

    def by_reason(kind: str) -> dict[str, int]:
        return {name.partition(":")[2]: n for name, n in outcomes.items() if name.startswith(f"{kind}:")}

    merged = Counter(task["client"] for task in tasks if task["outcome"] == "merged")
    expected = {
        "updates_merged": outcomes["merged"],
        "updates_unused": outcomes["unused"],
        "updates_refused": by_reason("refused"),
        "updates_lost_by_reason": by_reason("lost"),
        "updates_lost": sum(by_reason("lost").values()),
        "participation": {client: merged[client] for client in summary["participation"]},
    }
    problems = [f"{k} is {summary[k]}, the rows say {v}" for k, v in expected.items() if summary[k] != v]
    if sum(summary["participation"].values()) != summary["updates_merged"]:
        problems.append(f"participation sums up to {sum(summary['participation'].values())}")
    return problems


def _metrics(folder: Path, summary: Row) -> list[str]:
    with (folder / "metrics.csv").open(newline="") as file:
        versions = [int(row["version"]) for row in csv.DictReader(file)]
    problems = [f"version {b} after {a}" for a, b in itertools.pairwise(versions) if b <= a]
    if not versions or versions[-1] != summary["versions"]:
        problems.append(f"the last evaluation is of version {versions[-1:]}, the run ended at {summary['versions']}")
    return problems


def _leftovers(folder: Path) -> list[str]:
    found = [file for file in folder.rglob("*") if file.is_file() or file.parent == folder]
    return [f"{file.relative_to(folder)} was left" for file in sorted(found) if not _belongs(file.relative_to(folder))]


def _belongs(file: Path) -> bool:
    if file.parts[0] not in NAMES or file.name.startswith("."):
        return False
    return file.parts[0] != "checkpoints" or file.suffix == ".ckpt" or len(file.parts) == 1
