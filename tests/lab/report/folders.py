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
EVENTS = [
    {"time_s": 0.0, "event": "run", "runtime": "simulated"},
    {
        "time_s": 0.0,
        "event": "joined",
        "client": 1,
        "incarnation": 0,
        "num_samples": 30,
        "profile": {"name": "quick", "flops_per_s": 2e9, **LINKS},
    },
    {
        "time_s": 0.0,
        "event": "joined",
        "client": 2,
        "incarnation": 0,
        "num_samples": 10,
        "profile": {"name": "slow", "flops_per_s": 1e9, **FREE},
    },
    {"time_s": 6.0, "event": "lost", "client": 2, "reason": "gone", "incarnation": 0},
    {
        "time_s": 8.0,
        "event": "joined",
        "client": 2,
        "incarnation": 1,
        "num_samples": 10,
        "profile": {"name": "slow", "flops_per_s": 1e9, **FREE},
    },
    {"time_s": 8.0, "event": "assigned", "id": 6, "client": 2},
]
TASKS = [
    {
        "client": 1,
        "assignment": 1,
        "spec": "a[0:4]",
        "region": 1,
        "version": 0,
        "merged_version": 1,
        "staleness": 0,
        "assigned_s": 0.0,
        "arrived_s": 4.0,
        "bytes_down": 1000,
        "bytes_up": 500,
        "outcome": "merged",
    },
    {
        "client": 2,
        "assignment": 2,
        "spec": "a[4:8]",
        "region": 2,
        "version": 0,
        "merged_version": 2,
        "staleness": 1,
        "assigned_s": 0.0,
        "arrived_s": 5.0,
        "bytes_down": 1000,
        "bytes_up": 500,
        "outcome": "merged",
    },
    {
        "client": 1,
        "assignment": 3,
        "spec": "a[0:4]",
        "region": 1,
        "version": 1,
        "merged_version": 3,
        "staleness": 1,
        "assigned_s": 4.0,
        "arrived_s": 9.0,
        "bytes_down": 1000,
        "bytes_up": 500,
        "outcome": "merged",
    },
    {
        "client": 2,
        "assignment": 4,
        "spec": "a[4:8]",
        "region": 2,
        "version": 2,
        "merged_version": 2,
        "staleness": 0,
        "assigned_s": 5.0,
        "outcome": "lost:gone",
    },
    {
        "client": 1,
        "assignment": 5,
        "spec": "a[4:8]",
        "region": 2,
        "version": 3,
        "merged_version": 3,
        "staleness": 0,
        "assigned_s": 9.0,
        "outcome": "unused",
    },
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
