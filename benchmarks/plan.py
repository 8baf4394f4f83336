"""Compare the times of `raafl plan` with those of real runs: ranks on this machine, slowed down to the same devices.

For each algorithm the plan goes through the run without training, and `raafl fit --local` runs it: a server and its clients,
each slowed down to its device: a quarter of the quick start's, so that its tasks take seconds and what else the machine
does is little beside them. What is compared is the time of a version (and of an update) on the run's own clock; the start
of the processes is no part of it.

    python -m benchmarks.plan [--json] [--out FILE]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import Row, main

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "configs/quickstart.yaml"
SLOWER = 4.0
CASES = {"fed_raa": 100, "fed_avg": 16, "fed_buff": 42, "timely_fl": 24, "fed_rolex": 40}
"""Updates of each run, by algorithm."""


def rows(config: str = CONFIG, cases: dict[str, int] | None = None, options: Sequence[str] = ()) -> list[Row]:
    """Plan and run each algorithm; return a row for each; ``cases`` None = `CASES`, ``options``: further options of the runs."""
    return [_row(config, name, updates, options) for name, updates in (cases or CASES).items()]


def _row(config: str, name: str, updates: int, options: Sequence[str]) -> Row:
    devices = json.dumps(_slower(yaml.safe_load((ROOT / config).read_text())["devices"]))
    chosen = [
        "--config",
        config,
        "--algorithm",
        name,
        "--max_updates",
        str(updates),
        "--eval_every",
        "1000",
        "--devices",
        devices,
        *options,
    ]
    if name == "fed_buff":
        chosen += ["--algorithm.buffer_size", "3"]
    plan = raafl(["plan", *chosen, "--algorithms", "", "--json"])["algorithms"][0]
    with tempfile.TemporaryDirectory(prefix="raafl-plan-") as folder:
        run = raafl(
            ["fit", *chosen, "--local", "4", "--output", f"{folder}/run", "--progress", "quiet", "--json"],
        )
    row: Row = {"algorithm": name, "updates": run["updates_merged"], "versions": run["versions"]}
    row["planned_version_s"], row["real_version_s"] = plan["version_s"], run["time_s"] / run["versions"]
    row["version_ratio"] = row["planned_version_s"] / row["real_version_s"]
    row["update_ratio"] = plan["update_s"] / (run["time_s"] / run["updates_merged"])
    row["planned_utilisation"], row["real_utilisation"] = plan["utilisation"], run["utilisation"]
    row["load"] = os.getloadavg()[0]
    return row


def _slower(devices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: float(v) / SLOWER if k.endswith("_per_s") else v for k, v in one.items()} for one in devices]


def raafl(arguments: Sequence[str], timeout_s: float = 600.0) -> Any:
    """Run a command of raafl in a process with one thread, and return the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "raafl", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        timeout=timeout_s,
        check=True,
    )
    return json.loads(done.stdout)


if __name__ == "__main__":
    main("plan", rows)
