"""Run folders written by hand, so that every figure of a report can be worked out on paper."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raafl.runfolder.schema import CLIENT_COLUMNS

LINKS = {"down_bytes_per_s": 1000.0, "up_bytes_per_s": 500.0, "latency_s": 0.5}
FREE = {"down_bytes_per_s": None, "up_bytes_per_s": None, "latency_s": 0.0}

CONFIG = {"algorithm": {"class_path": "raafl.fed_raa", "init_args": {"alpha": 0.5}}, "seed": 0, "clients": 2}
QUICK = {"num_samples": 30, "profile": {"name": "quick", "flops_per_s": 2e9, **LINKS}}
SLOW = {"num_samples": 10, "profile": {"name": "slow", "flops_per_s": 1e9, **FREE}}
EVENTS = [
    {"time_s": 0.0, "event": "run", "runtime": "simulated"},
    {"time_s": 0.0, "event": "joined", "client": 1, "incarnation": 0, **QUICK},
    {"time_s": 0.0, "event": "joined", "client": 2, "incarnation": 0, **SLOW},
    {"time_s": 6.0, "event": "lost", "client": 2, "reason": "gone", "incarnation": 0},
    {"time_s": 8.0, "event": "joined", "client": 2, "incarnation": 1, **SLOW},
    {"time_s": 8.0, "event": "assigned", "id": 6, "client": 2},
]
TASK = ("client", "assignment", "spec", "region", "version", "merged_version", "staleness", "assigned_s", "outcome")
LOW, HIGH = ("a[0:4]", 1), ("a[4:8]", 2)
SENT = {"bytes_down": 1000, "bytes_up": 500}
TASKS = [
    dict(zip(TASK, (1, 1, *LOW, 0, 1, 0, 0.0, "merged"), strict=True), arrived_s=4.0, **SENT),
    dict(zip(TASK, (2, 2, *HIGH, 0, 2, 1, 0.0, "merged"), strict=True), arrived_s=5.0, **SENT),
    dict(zip(TASK, (1, 3, *LOW, 1, 3, 1, 4.0, "merged"), strict=True), arrived_s=9.0, **SENT),
    dict(zip(TASK, (2, 4, *HIGH, 2, 2, 0, 5.0, "lost:gone"), strict=True)),
    dict(zip(TASK, (1, 5, *HIGH, 3, 3, 0, 9.0, "unused"), strict=True)),
]
METRICS = [
    {"version": 0, "time_s": 0.0, "wall_s": 0.0, "accuracy": 0.1, "bytes_up": 0, "bytes_down": 0},
    {"version": 2, "time_s": 5.0, "wall_s": 0.5, "accuracy": 0.5, "bytes_up": 1000, "bytes_down": 2000},
    {"version": 3, "time_s": 9.0, "wall_s": 0.9, "accuracy": 0.9, "bytes_up": 1500, "bytes_down": 4000},
]
SUMMARY = {
    "algorithm": "fed_raa",
    "runtime": "simulated",
    "seed": 0,
    "finished": "max_updates",
    "versions": 3,
    "updates_merged": 3,
    "time_s": 10.0,
    "wall_s": 1.0,
    "bytes_up": 1500,
    "bytes_down": 4000,
    "utilisation": 0.9,
    "staleness": {"mean": 2 / 3, "max": 1},
    "coverage": {"mean": 0.5},
    "final": {"accuracy": 0.9},
    "time_to": {"accuracy=0.5": 5.0},
    "unwritten": {},
    "warnings": [],
}


def write(
    folder: Path,
    *,
    config: Mapping[str, Any] | None = CONFIG,
    events: Sequence[Mapping[str, Any]] | None = EVENTS,
    tasks: Sequence[Mapping[str, Any]] | None = TASKS,
    metrics: Sequence[Mapping[str, Any]] | None = METRICS,
    summary: Mapping[str, Any] | None = SUMMARY,
) -> Path:
    """Write a run folder; None leaves a file out."""
    folder.mkdir(parents=True)
    if config is not None:
        (folder / "config.yaml").write_text(json.dumps(config))  # which is YAML too
    if events is not None:
        (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if tasks is not None:
        _table(folder / "clients.csv", CLIENT_COLUMNS, tasks)
    if metrics is not None:
        _table(folder / "metrics.csv", list(metrics[0]) if metrics else [], metrics)
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def _table(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    import csv

    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
