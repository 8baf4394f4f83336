"""Verify a comparison's result: replay some of its runs and compare the digests of their models."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from raafl.lab.compare.processes import in_processes, start
from raafl.runfolder.schema import Summary


def chosen(result: Mapping[str, Any], share: float, seed: int = 0) -> list[dict[str, Any]]:
    """Choose a random share of a comparison's runs, to be replayed as a check; the number of runs is rounded up."""
    runs = [run | {"row": row["row"]} for row in result["rows"] for run in row["runs"] if "error" not in run]
    return random.Random(seed).sample(runs, math.ceil(share * len(runs)))


def verify(runs: Sequence[Mapping[str, Any]], root: Path, jobs: int = 1) -> Iterator[dict[str, Any]]:
    """Check runs by replaying them in separate processes, that is, computing their models again from their event logs.

    Yields for each run its `row`, its `seed`, whether the replayed model is `equal` to the recorded one, and if not, `why`.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM was received; replays in progress were ended.
    """

    def replay_one(run: Mapping[str, Any]) -> BaseProcess:
        return replay(root / run["folder"])

    for run, _, _ in in_processes(list(runs), jobs, replay_one, lambda _: None):
        why = difference(run, log_of(root / run["folder"]))
        verdict = {"row": run["row"], "seed": run["seed"], "equal": why is None}
        yield verdict if why is None else verdict | {"why": why}


def replay(folder: Path) -> BaseProcess:
    """Start the replay of a run in a new process, which writes its output to the file ``log_of(folder)``."""
    log = log_of(folder)
    log.unlink(missing_ok=True)
    return start(["replay", str(folder), "--json"], log)


def log_of(folder: Path) -> Path:
    """Return the file for the output of a run's replay."""
    return folder.with_suffix(".replay.log")


def difference(run: Mapping[str, Any] | Summary | None, log: Path) -> str | None:
    """Explain why the replay of a run does not give the recorded model; None if it does."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    try:
        replayed = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    except (StopIteration, ValueError):
        return lines[-1] if lines else "the replay printed nothing"
    said = str(run["model_digest"]) if run is not None else ""
    if replayed["model_digest"] != said:
        return f"the result says {said[:16]}, the replay {str(replayed['model_digest'])[:16]}"
    if not replayed["equal"]:
        return f"the run folder's summary says {str(replayed['recorded_digest'])[:16]}"
    return None
