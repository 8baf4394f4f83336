"""Count the axes found in the architectures of `tests/submodel/architectures.py`, which raafl has no rules for.

- `axes` is their number, `parameters` and `flops` are the shares of the whole that a quarter of each leaves, rounded up, the
  residual width whole: FLOPs of a training step, predicted. Every axis counted is proven.
- `seconds` is the CPU time that it takes to find the axes and to prove them, in this process.

The models are as tiny as the tests': what cannot shrink (tables, heads, norms, one key-value head of two) weighs more in them
than in models of the usual sizes.

    OMP_NUM_THREADS=1 python -m benchmarks.axes [--json] [--out FILE]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch

from benchmarks.common import Row, main
from raafl.parts.select.axis_report import facts
from raafl.submodel import Submodels
from raafl.submodel.prove.proof import refuted
from tests.submodel.architectures import ARCHITECTURES

RATE = 0.25


def rows() -> Iterator[Row]:
    """Yield a row for each architecture, then one with the medians."""
    found = []
    for name, architecture in ARCHITECTURES.items():
        torch.manual_seed(0)
        module, batch = architecture.make(), architecture.batch()
        begin_s = time.process_time()
        submodels = Submodels(module, batch)
        submodels.keep_whole(refuted(submodels, module, batch))
        seconds = time.process_time() - begin_s
        known = facts(submodels, [RATE], 2)
        found.append({"model": name, "axes": len(known["axes"]), **known["rates"][f"{RATE:g}"], "seconds": seconds})
        yield found[-1]
    names = ("axes", "parameters", "flops", "seconds")
    yield {"model": "median", **{name: statistics.median(row[name] for row in found) for name in names}}


if __name__ == "__main__":
    main("axes", lambda: list(rows()))
