"""What a smaller submodel costs its client: seconds and memory of a local step, against what raafl predicts.

Each model is measured at several rates. The submodel of a rate keeps sqrt(rate) of every axis (heads, feed-forward
units, channels, units) and, of a model with a stack of blocks, sqrt(rate) of the blocks: the lowest ones, all trained
(window "bottom"), or all of them with the upper ones trained and those below frozen (window "top").

- `seconds` is the shortest local step of `LocalTrainer`, the first of a task left out. One process per model takes the
  whole model and its submodels in turn, several times, so that what else the machine does falls on all of them; the
  shortest is the one it has kept up least. With one thread the clock is the process's CPU time, with more the wall clock.
- `predicted_seconds` is the time of `flops` and of `moved_bytes` (what the cost model says that the operations of a step
  read and write, and do beside), added up, at two speeds that the same process finds with a matrix product and a layer of
  elementwise operations: no step of any model has a part in them. `flops_per_byte` is the ratio of the two.
- `peak_bytes` is the highest resident memory of a fresh process that trains one task, less what was resident before
  (everything imported, the data there, a tiny model of the kind trained), where the C library gives all larger blocks
  back at once: what the task needs. `resident_bytes` is the same with the C library's own settings: that and the holes
  that its heap gets from blocks of many sizes. `memory_ratio` and `resident_ratio` are over the whole model's.
- `flops` and `bytes` are of one step and of the submodel as sent, `predicted_bytes` is the cost model's peak.
- `load_seconds` is what comes before the first step of a task: values cut out of the whole model, the small module and
  its optimiser built, values loaded. `reload_seconds` is the same where the module of an earlier task is used again.
  Both are the shortest of the turns; `load_ratio` is over a step.

    python -m benchmarks.submodels [--json] [--out FILE] [--quick] [--models NAME ...] [--turns N] [--threads N]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Row, main

RATES = (1.0, 0.5625, 0.25, 0.0625, 0.015625)
TURNS = 3
TASK_S = 1.0
"""About how long the timed steps of one task take; there are at least `LEAST_STEPS`, and at most `MOST_STEPS`."""
LEAST_STEPS, MOST_STEPS = 2, 40
TIMEOUT_S = 3600.0
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Tells glibc to take larger blocks from the system one by one, and so to give them back when they are freed."""


@dataclass(frozen=True)
class Workload:
    """A model, a tiny one of the same kind, and a batch.

    Attributes:
        make: returns the model; with True the tiny one.
        batch: returns so many random samples.
        batch_size: samples per step.
        windows: of the submodels below rate 1.
    """

    make: Callable[[bool], Any]
    batch: Callable[[int], list[Any]]
    batch_size: int = 32
    windows: tuple[str, ...] = ("bottom",)


def _vit(tiny: bool) -> Any:
    from model_zoo import ViT

    return ViT("micro" if tiny else "tiny")


def _vit_mini(tiny: bool) -> Any:
    from model_zoo import ViT

    return ViT("micro" if tiny else "mini")


def _bert(tiny: bool) -> Any:
    from model_zoo import BERT

    return BERT("micro" if tiny else "small")


def _cnn(tiny: bool) -> Any:
    from model_zoo import CNN

    return CNN(3, 32, channels=(4, 4) if tiny else (32, 64))


def _mlp(tiny: bool) -> Any:
    from model_zoo import MLP

    return MLP(3072, (16, 16) if tiny else (2048, 2048), 10)


def _images(num: int) -> list[Any]:
    import torch

    return [torch.randn(num, 3, 32, 32), torch.randint(0, 10, (num,))]


def _vectors(num: int) -> list[Any]:
    images, labels = _images(num)
    return [images.flatten(1), labels]


def _texts(num: int) -> list[Any]:
    import torch

    tokens = torch.randint(1, 30522, (num, 64))
    return [tokens, torch.ones_like(tokens), torch.randint(0, 2, (num,))]


WORKLOADS = {
    "vit-tiny": Workload(_vit, _images, windows=("bottom", "top")),
    "bert-small": Workload(_bert, _texts),
    "cnn": Workload(_cnn, _images, batch_size=128),
    "mlp": Workload(_mlp, _vectors),
    "vit-mini": Workload(_vit_mini, _images, batch_size=8, windows=("bottom", "top")),
}
ALL, QUICK = ("vit-tiny", "bert-small", "cnn"), ("vit-mini", "mlp")


@dataclass(frozen=True)
class Case:
    """One submodel of one workload."""

    model: str
    rate: float
    window: str

    @property
    def work(self) -> Workload:
        """The workload."""
        return WORKLOADS[self.model]


def cases(model: str, rates: Sequence[float] = RATES) -> list[Case]:
    """Return the whole model and its submodels, in the order of the rows."""
    found = [Case(model, 1.0, "all")]
    for rate in sorted(set(rates) - {1.0}, reverse=True):
        found += [Case(model, rate, window) for window in WORKLOADS[model].windows]
    return found


def spec_of(submodels: Any, rate: float, window: str) -> Any:
    """Return the submodel that keeps sqrt(rate) of every axis and of the blocks, at least one of each."""
    from raafl.submodel import FULL, Spec, depth_window

    if rate == 1:
        return FULL
    share = math.sqrt(rate)
    kept = {name: range(max(1, round(share * axis.size))) for name, axis in submodels.axes.items()}
    if not submodels.stacks:
        return Spec.keep(kept)
    depth = len(next(iter(submodels.stacks.values())))
    trained = max(1, round(share * depth))
    start = 0 if window == "bottom" else depth - trained
    return depth_window(submodels, start, start + trained, kept=kept)


def rows(
    models: Sequence[str] = ALL,
    rates: Sequence[float] = RATES,
    turns: int = TURNS,
    threads: int = 1,
    resident: bool = True,
) -> list[Row]:
    """Measure every model and return a row for each submodel; without ``resident`` the memory it needs only."""
    found: list[Row] = []
    timed = {}
    for model in models:  # first all that wants a calm machine
        timed[model] = _in_process(["--time", model, "--rates", *map(str, rates), "--turns", str(turns)], threads)
        print("timed", model, file=sys.stderr, flush=True)
    for model in models:
        for case, row in zip(cases(model, rates), timed[model], strict=True):
            place = json.dumps([case.model, case.rate, case.window])
            row["peak_bytes"] = _in_process(["--memory", place], threads, AT_ONCE)
            if resident:
                row["resident_bytes"] = _in_process(["--memory", place], threads)
            found.append(row)
            print("measured", found[-1], file=sys.stderr, flush=True)
    return [_with_ratios(row, next(r for r in found if r["model"] == row["model"])) for row in found]


def _with_ratios(row: Row, full: Row) -> Row:
    more = {"resident_ratio": row["resident_bytes"] / full["resident_bytes"]} if "resident_bytes" in row else {}
    return {
        **row,
        **more,
        "memory_ratio": row["peak_bytes"] / full["peak_bytes"],
        "time_ratio": row["seconds"] / full["seconds"],
        "predicted_time_ratio": row["predicted_seconds"] / full["predicted_seconds"],
        "predicted_memory_ratio": row["predicted_bytes"] / full["predicted_bytes"],
        "load_ratio": row["load_seconds"] / row["seconds"],
    }


def _in_process(arguments: list[str], threads: int, more: Mapping[str, str] | None = None) -> Any:
    """Run a part of this benchmark in a process of its own and return what it printed last."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.submodels", *arguments, "--threads", str(threads)],
        env={**os.environ, "OMP_NUM_THREADS": str(threads), **(more or {})}, stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"benchmarks.submodels {' '.join(arguments)} failed with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


# ---- what runs in a process of its own ----


def _submodels(work: Workload, tiny: bool = False) -> Any:
    from raafl.submodel import Submodels, skeleton

    with skeleton():
        module = work.make(tiny)
    return Submodels(module, work.batch(2))


def _values(layout: Any) -> Any:
    """Return values with which a step is an ordinary one."""
    from raafl.submodel import FlatTensors

    flat = FlatTensors.zeros(layout)
    for buffer in flat.buffers.values():
        if buffer.dtype.is_floating_point:
            buffer.normal_(0.0, 0.02)
    return flat


class Client:
    """Trains tasks on one client's data as raafl does, and notes when each step begins."""

    def __init__(self, work: Workload, data: Any, clock: Callable[[], float]) -> None:
        """Take over the data; ``make`` returns a trainer of a model's submodels."""
        from raafl.core.algorithm import Local, Training
        from raafl.data.federated import ClientData
        from raafl.local.train import LocalTrainer

        marks: list[float] = []

        class Noted(ClientData):
            def batches(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
                for batch in super().batches(*args, **kwargs):
                    marks.append(clock())
                    yield batch
                marks.append(clock())

        import torch

        self.marks, self.clock, self.work = marks, clock, work
        self.data = Noted(data, torch.arange(len(data)), work.batch_size)
        self.make: Callable[[Any], Any] = lambda submodels: LocalTrainer(
            submodels, Local(), "delta", Training(num_steps=1, batch_size=work.batch_size)
        )

    def train(self, trainer: Any, spec: Any, received: Any, num_steps: int) -> tuple[float, list[float]]:
        """Run one task; return the seconds before its first step, and of each step."""
        from raafl.core.types import Assignment

        self.marks.clear()
        begin = self.clock()
        task = Assignment(
            id=1, client=1, incarnation=0, task=0, version=0, spec=spec, region=0, num_epochs=None,
            num_steps=num_steps, seed=1, assigned_s=0.0,
        )  # fmt: skip
        trainer.run(task, received, self.data)
        steps = [after - before for before, after in zip(self.marks, self.marks[1:], strict=False)]
        return self.marks[0] - begin, steps


def _client(work: Workload, clock: Callable[[], float]) -> Client:
    """Return a client with its data, in a process that has trained a tiny model."""
    import torch
    from torch.utils.data import TensorDataset

    torch.manual_seed(0)
    client = Client(work, TensorDataset(*work.batch(2 * work.batch_size)), clock)
    tiny = _submodels(work, tiny=True)
    spec = spec_of(tiny, 1.0, "all")
    client.train(client.make(tiny), spec, _values(tiny.layout(spec)), 2)
    return client


def time_steps(model: str, rates: Sequence[float], turns: int, clock: Callable[[], float]) -> list[Row]:
    """Return a row for each submodel of a model, all but the memory."""
    from benchmarks.probes import Probes

    work, found = WORKLOADS[model], cases(model, rates)
    client = _client(work, clock)
    submodels = _submodels(work)
    specs = [spec_of(submodels, case.rate, case.window) for case in found]
    state = _values(submodels.layout())
    num_steps = [LEAST_STEPS] * len(found)
    taken: list[dict[str, list[float]]] = [{"seconds": [], "load_seconds": [], "reload_seconds": []} for _ in found]
    probes = Probes(clock)

    def turn(place: int) -> None:
        spec, noted, trainer, values = specs[place], taken[place], client.make(submodels), None
        for name in ("load_seconds", "reload_seconds"):
            begin = clock()
            values = submodels.plan(spec, "present").gather(state, out=values)
            cut_s = clock() - begin
            before_s, steps = client.train(trainer, spec, values, num_steps[place])
            noted[name].append(cut_s + before_s)
            noted["seconds"] += steps[1:]
        num_steps[place] = min(MOST_STEPS, max(LEAST_STEPS, round(TASK_S / min(noted["seconds"]))))

    for _ in range(turns):
        for place in range(len(found)):
            probes.take()
            turn(place)
    speed = probes.speed()
    return [
        {**_predicted(submodels, spec, case, speed), **{name: min(seconds) for name, seconds in noted.items()}}
        for case, spec, noted in zip(found, specs, taken, strict=True)
    ]


def _predicted(submodels: Any, spec: Any, case: Case, speed: tuple[float, float]) -> Row:
    cost, samples = submodels.cost(spec, case.work.batch_size), case.work.batch_size
    flops, moved_bytes = cost.flops_per_sample * samples, cost.moved_bytes_per_sample * samples
    return {
        "model": case.model,
        "rate": case.rate,
        "window": case.window,
        "params": cost.params,
        "flops": flops,
        "moved_bytes": moved_bytes,
        "bytes": cost.down_bytes,
        "predicted_bytes": cost.peak_bytes,
        "predicted_seconds": flops / speed[0] + moved_bytes / speed[1],
        "flops_per_byte": speed[0] / speed[1],
    }


def peak_bytes(case: Case) -> int:
    """Return the memory that a task of this submodel takes, measured in this process, which does nothing else."""
    client = _client(case.work, time.perf_counter)
    submodels = _submodels(case.work)
    spec = spec_of(submodels, case.rate, case.window)
    trainer, layout = client.make(submodels), submodels.layout(spec)
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)  # or what the warm-up has freed would serve the task
    before_bytes = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    client.train(trainer, spec, _values(layout), 2)  # from the second step on everything is there
    return _status_bytes("VmHWM") - before_bytes


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def _run(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.submodels", add_help=False)
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS))
    parser.add_argument("--rates", nargs="+", type=float, default=RATES)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", "1")))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--time")
    parser.add_argument("--memory", type=json.loads)
    options, rest = parser.parse_known_args(argv)
    if options.time or options.memory:
        import torch

        torch.set_num_threads(options.threads)
        clock = time.process_time if options.threads == 1 else time.perf_counter
        if options.time:
            print(json.dumps(time_steps(options.time, options.rates, options.turns, clock)))
        else:
            print(json.dumps(peak_bytes(Case(*options.memory))))
        return
    models = options.models or (QUICK if options.quick else ALL)
    rates = (1.0, 0.25) if options.quick else options.rates
    main("submodels", lambda: rows(models, rates, options.turns, options.threads), rest)


if __name__ == "__main__":
    _run()
