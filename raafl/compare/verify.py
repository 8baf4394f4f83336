"""Replay a share of a comparison's runs and compare the digests with those that the result names."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from raafl.compare.processes import in_processes, start


def chosen(result: Mapping[str, Any], share: float, seed: int = 0) -> list[dict[str, Any]]:
    """Draw a random share of a comparison's runs, rounded up, to be replayed.

    Args:
        result: result of the comparison.
        share: share of the runs to draw, above 0, at most 1.
        seed: seed of the draw.
    """
    runs = [run | {"row": row["row"]} for row in result["rows"] for run in row["runs"] if "error" not in run]
    return random.Random(seed).sample(runs, math.ceil(share * len(runs)))


def verify(runs: Sequence[Mapping[str, Any]], root: Path, jobs: int = 1) -> Iterator[dict[str, Any]]:
    """Replay runs in separate processes; yield `row`, `seed`, `equal`, and `why` if they are unequal.

    Args:
        runs: runs, as the result lists them.
        root: folder of the comparison.
        jobs: number of replays at a time.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM was received; the replays in progress have been ended.
    """

    def replay(run: Mapping[str, Any]) -> BaseProcess:
        log = _log(root, run)
        log.unlink(missing_ok=True)
        return start(["replay", str(root / run["folder"]), "--json"], log)

    for run, process, _ in in_processes(list(runs), jobs, replay, lambda _: None):
        why = _difference(run, _log(root, run), process)
        verdict = {"row": run["row"], "seed": run["seed"], "equal": why is None}
        yield verdict if why is None else verdict | {"why": why}


def _log(root: Path, run: Mapping[str, Any]) -> Path:
    return (root / str(run["folder"])).with_suffix(".replay.log")


def _difference(run: Mapping[str, Any], log: Path, process: BaseProcess) -> str | None:
    """Return why a replay does not give what the result says; None where it does."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    try:
        replayed = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    except (StopIteration, ValueError):
        return lines[-1] if lines else f"the replay ended with exit code {process.exitcode}"
    if replayed["model_digest"] != run["model_digest"]:
        return f"the result says {run['model_digest'][:16]}, the replay {replayed['model_digest'][:16]}"
    if not replayed["equal"]:
        return f"the run folder's summary says {str(replayed['recorded_digest'])[:16]}"
    return None
