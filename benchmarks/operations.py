"""Compare how fast each kind of operation of a training step moves bytes with raafl's cost model.

Local steps of models of `benchmarks.submodels`, whole and at the smallest rate, each in a process that keeps what it frees as
a client's does. Each operation is timed by itself, the fastest of its calls with the same shapes; what it multiplies, padding as
well, is taken off at the speed of matrix products, and the rest is divided by the bytes of its operands and results, at the
speed of the layer of `raafl.devices.measure`. So `measured` is how many times its bytes count by the clock, `counted` how many
times they count by `raafl/submodel/cost/kernels.py`. Rows are of one step, those that take longest first; operations that take
less than a five-hundredth of it are left out.

    python -m benchmarks.operations [--json] [--out FILE] [--quick] [--models NAME ...]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.common import Row, in_process, main
from benchmarks.submodels import ALL, RATES
from benchmarks.workloads import WORKLOADS, client_of, spec_of, submodels_of, values_of
from raafl.local import malloc

MODELS, QUICK = (*ALL, "resnet20"), ("mlp",)
STEPS, THREADS = 6, 1
LEAST_SHARE = 0.002
PROBES = {"num_samples": 8192, "num_calls": 20}
"""How large a measurement of this machine's speeds is."""


def rows(models: Sequence[str] = MODELS, rates: Sequence[float] = (RATES[0], RATES[-1])) -> list[Row]:
    """Return a row for each model, rate and kind of operation."""
    found: list[Row] = []
    for case in ([model, rate] for model in models for rate in rates):
        found += in_process("operations", ["--case", json.dumps(case)], THREADS)
        print("measured", *case, file=sys.stderr, flush=True)
    return found


def measured(model: str, rate: float) -> list[Row]:
    """Return the rows of one submodel, measured in this process."""
    from raafl.devices.measure import Probes

    work = WORKLOADS[model]
    client, submodels = client_of(work, time.process_time), submodels_of(work)
    spec = spec_of(submodels, rate, "all" if rate == 1 else "bottom")
    trainer, values = client.make(submodels), values_of(submodels.layout(spec))
    client.train(trainer, spec, values, 2)
    probes = Probes(clock=time.process_time, **PROBES)
    for _ in range(5):
        probes.take()
    flops_per_s, bytes_per_s, _ = probes.speeds()
    timed = _timed()
    with timed:
        client.train(trainer, spec, values, STEPS)
    sums: dict[str, list[float]] = {}
    for (name, *_), calls, numbers in timed.calls():
        one = sums.setdefault(name, [0.0] * 6)
        for place, number in enumerate((1.0, *numbers)):
            one[place] += number * calls / STEPS
    whole_s = sum(seconds for _, seconds, *_ in sums.values())
    found: list[Row] = []
    for name, (calls, seconds, flops, padding_flops, num_bytes, moved_bytes) in sorted(
        sums.items(), key=lambda item: -item[1][1]
    ):
        if num_bytes and seconds >= LEAST_SHARE * whole_s:
            found.append(
                {
                    "model": model,
                    "rate": rate,
                    "operation": name,
                    "calls": calls,
                    "seconds": seconds,
                    "share": seconds / whole_s,
                    "flops": flops,
                    "padding_flops": padding_flops,
                    "bytes": num_bytes,
                    "measured": (seconds - (flops + padding_flops) / flops_per_s) * bytes_per_s / num_bytes,
                    "counted": moved_bytes / num_bytes,
                }
            )
    return found


def _timed() -> Any:
    """Return a dispatch mode that times every operation, and records raafl's counts for it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from raafl.submodel.cost.ledger import OperationCost, counted
    from raafl.submodel.nested_batch import tensors_in

    class Timed(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self._num: Counter[Any] = Counter()
            self._best_s: dict[Any, float] = {}
            self._counted: dict[Any, OperationCost] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            shapes = [tuple(tensor.shape) for tensor in tensors_in((args, kwargs))]
            key = (str(getattr(func, "_overloadpacket", func)), *shapes)
            begin_s = time.process_time()
            result = func(*args, **kwargs)
            seconds = time.process_time() - begin_s
            self._num[key] += 1
            self._best_s[key] = min(self._best_s.get(key, seconds), seconds)
            if key not in self._counted:
                self._counted[key] = counted(func, args, kwargs, result)
            return result

        def calls(self) -> Any:
            for key, number in self._num.items():
                yield key, number, (self._best_s[key], *self._counted[key][:4])  # without the arithmetic

    return Timed()


def _run(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operations", add_help=False)
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--case", type=json.loads)
    parser.add_argument("--threads", type=int, default=THREADS)
    options, rest = parser.parse_known_args(argv)
    if options.case:
        malloc.keep_freed()
        import torch

        torch.set_num_threads(options.threads)
        print(json.dumps(measured(*options.case)))
        return
    main("operations", lambda: rows(options.models or (QUICK if options.quick else MODELS)), rest)


if __name__ == "__main__":
    _run()
