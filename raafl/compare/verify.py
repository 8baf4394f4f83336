"""Replay a share of a comparison's runs and compare the digests with those that the result names."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raafl.compare.runs import start


def chosen(found: Mapping[str, Any], share: float, seed: int = 0) -> list[dict[str, Any]]:
    """Draw the runs to replay: that share of them, rounded up, at random.

    Args:
        found: a result.
        share: above 0, at most 1.
        seed: of the draw.
    """
    runs = [run | {"row": row["row"]} for row in found["rows"] for run in row["runs"] if "error" not in run]
    return random.Random(seed).sample(runs, math.ceil(share * len(runs)))


def verify(run: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """Replay one run in a process of its own.

    Args:
        run: as the result lists it.
        root: the comparison's folder.

    Returns:
        `row`, `seed`, `equal`, and where it is not equal, `why`.
    """
    folder = root / run["folder"]
    log = folder.with_suffix(".replay.log")
    log.unlink(missing_ok=True)
    process = start(["replay", str(folder), "--json"], log)
    process.join()
    verdict = {"row": run["row"], "seed": run["seed"], "equal": False}
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    try:
        replayed = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    except (StopIteration, ValueError):
        return verdict | {"why": lines[-1] if lines else f"the replay ended with exit code {process.exitcode}"}
    if replayed["model_digest"] != run["model_digest"]:
        return verdict | {
            "why": f"the result says {run['model_digest'][:16]}, the replay {replayed['model_digest'][:16]}"
        }
    if not replayed["equal"]:
        return verdict | {"why": f"the run folder's summary says {str(replayed['recorded_digest'])[:16]}"}
    return verdict | {"equal": True}
