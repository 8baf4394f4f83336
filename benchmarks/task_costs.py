"""Compare the predicted cost of a task with the real task's, for each method, on three models, whole and at a quarter of each axis.

The real task is counted by torch's own counter of FLOPs and by its allocator: no time has a part in it. `flops` and `bytes` are
predicted over counted; `tests/core/test_own_steps.py` holds both within 5 %.

    OMP_NUM_THREADS=1 python -m benchmarks.task_costs [--json] [--out FILE] [--quick] [--models NAME ...]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import torch

from benchmarks.common import Row, main
from tests.helpers.counted_task import CASES, MODELS, case


def rows(models: Sequence[str] = tuple(MODELS), methods: Sequence[str] | None = None) -> Iterator[Row]:
    """Yield a row for each method and model; ``methods`` None = all."""
    torch.set_num_threads(1)
    for name, model, share in sorted(CASES, key=lambda one: (list(MODELS).index(one[1]), -one[2])):
        if model in models and (methods is None or name in methods):
            setting, task = case(name, model, share)
            flops, num_bytes = setting.counted(task).ratios
            yield _row(name, model, share, flops, num_bytes)
            print("counted", name, model, share, file=sys.stderr, flush=True)


def _row(name: str, model: str, share: float, flops: float, num_bytes: float) -> Row:
    case = model if share == 1 else f"{model}, 1/{1 / share:.0f}"
    both = f"{flops:.3f}, {num_bytes:.3f}"
    return {
        "algorithm": name,
        "model": model,
        "share": share,
        "flops": flops,
        "bytes": num_bytes,
        "case": case,
        "both": both,
    }


def _run(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.task_costs", add_help=False)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--quick", action="store_true")
    options, rest = parser.parse_known_args(argv)
    main("task_costs", lambda: list(rows(options.models, ["fed_avg", "scaffold"] if options.quick else None)), rest)


if __name__ == "__main__":
    _run()
