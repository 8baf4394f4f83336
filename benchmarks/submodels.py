"""Measure seconds and memory of a local step of smaller submodels, and compare them with raafl's predictions.

Each model is measured at several rates. The submodel of a rate keeps sqrt(rate) of every axis (heads, feed-forward
units, channels, units) and, of a model with a stack of blocks, sqrt(rate) of the blocks: the lowest ones, all trained
(window "bottom"), or all of them with the upper ones trained and those below frozen (window "top").

- `seconds` is the shortest local step of `LocalTrainer`, the first of a task left out. One process per model takes the
  whole model and its submodels in turn, several times and for a minute, so that what else the machine does falls on all of
  them; the shortest is the one it has kept up least. With one thread the clock is the process's CPU time, with more the wall clock.
- `predicted_seconds` is the time of `flops` and `padding_flops` (those that convolutions do on channels that are padding), of
  `moved_bytes` (what the cost model says that the operations of a step read and write) and of `kernels`, added up, at speeds that
  the same process finds with a matrix product and layers of elementwise operations: no step of any model has a part in them.
  `flops_per_byte` is the ratio of the two.
- `peak_bytes` is the highest resident memory of a fresh process that trains one task, less what was resident before
  (everything imported, the data there, a tiny model of the kind trained), when the process gives memory back at once, as a
  client does that is short of it: what the task needs. `resident_bytes` is the same of a process that keeps what it
  frees, as other clients do and as the timed one does: that and the holes between blocks of many sizes. `memory_ratio` and
  `resident_ratio` are over the whole model's.
- `flops` and `bytes` are of one step and of the submodel as sent, `predicted_bytes` is the cost model's peak.
- `load_seconds` is what comes before the first step of a task: values cut out of the whole model, the small module and
  its optimiser built, values loaded. `reload_seconds` is the same where the module of an earlier task is used again.
  Both are the shortest of the turns; `load_ratio` is over a step.

    python -m benchmarks.submodels [--json] [--out FILE] [--quick] [--models NAME ...] [--rates RATE ...] [--turns N]
                                   [--threads N] [--heap kept|tight|usual]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import Row, forget_peak, in_process, main, status_bytes
from benchmarks.workloads import WORKLOADS, Workload, client_of, spec_of, submodels_of, values_of
from raafl.local import malloc

RATES = (1.0, 0.5625, 0.25, 0.0625, 0.015625)
TURNS, LEAST_S = 3, 60.0
"""How often each submodel of a model has its turn at least, and for how long all of them take turns, unless `--turns` says."""
TASK_S = 1.0
"""About how long the timed steps of one task take; there are at least `LEAST_STEPS`, and at most `MOST_STEPS`."""
LEAST_STEPS, MOST_STEPS = 2, 40
HEAPS: dict[str, Callable[[], object]] = {
    "kept": malloc.keep_freed,
    "tight": malloc.free_at_once,
    "usual": lambda: None,
}
"""What a process does with memory that it frees: as a client that has room, as one that has not, as the C library would."""
ALL, QUICK = ("vit-tiny", "bert-small", "cnn"), ("vit-mini", "mlp")


@dataclass(frozen=True)
class Case:
    """One submodel of a workload."""

    model: str
    rate: float
    window: str

    @property
    def work(self) -> Workload:
        """Workload of the case."""
        return WORKLOADS[self.model]


def cases(model: str, rates: Sequence[float] = RATES) -> list[Case]:
    """Return the whole model and its submodels, in the order of the rows."""
    found = [Case(model, 1.0, "all")]
    for rate in sorted(set(rates) - {1.0}, reverse=True):
        found += [Case(model, rate, window) for window in WORKLOADS[model].windows]
    return found


def rows(
    models: Sequence[str] = ALL,
    rates: Sequence[float] = RATES,
    turns: int | None = None,
    threads: int = 1,
    resident: bool = True,
    kept: str = "kept",
) -> list[Row]:
    """Measure every model and return a row for each submodel.

    `models`: names of workloads. `turns`: repeats of a measurement; None = as many as the clock needs. `threads`:
    threads of torch. `resident`: also measure resident memory, each in a process of its own. `kept`: a key of `HEAPS`.
    """
    found: list[Row] = []
    timed = {}
    for model in models:  # first everything that needs an idle machine
        given = [] if turns is None else ["--turns", str(turns)]
        timed[model] = in_process(
            "submodels", ["--time", model, "--rates", *map(str, rates), *given, "--heap", kept], threads
        )
        print("timed", model, file=sys.stderr, flush=True)
    for model in models:
        for case, row in zip(cases(model, rates), timed[model], strict=True):
            place = json.dumps([case.model, case.rate, case.window])
            row["peak_bytes"] = in_process("submodels", ["--memory", place, "--heap", "tight"], threads)
            if resident:
                row["resident_bytes"] = in_process("submodels", ["--memory", place, "--heap", kept], threads)
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


# ---- what runs in a process of its own ----


def time_steps(model: str, rates: Sequence[float], turns: int | None, clock: Callable[[], float]) -> list[Row]:
    """Time the steps of a model's submodels; return a row for each, without its memory.

    `turns`: repeats; None = as many as the clock needs. `clock`: returns seconds.
    """
    from raafl.devices.measure import Probes

    work, found = WORKLOADS[model], cases(model, rates)
    client = client_of(work, clock)
    submodels = submodels_of(work)
    specs = [spec_of(submodels, case.rate, case.window) for case in found]
    state = values_of(submodels.layout())
    num_steps = [LEAST_STEPS] * len(found)
    taken: list[dict[str, list[float]]] = [{"seconds": [], "load_seconds": [], "reload_seconds": []} for _ in found]
    probes = Probes(clock=clock, num_samples=8192, num_calls=20)

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

    stop_s, done = time.monotonic() + (LEAST_S if turns is None else 0.0), 0
    while done < (turns or TURNS) or time.monotonic() < stop_s:
        done += 1
        for place in range(len(found)):
            probes.take()
            turn(place)
    speed = probes.speeds()
    return [
        {**_predicted(submodels, spec, case, speed), **{name: min(seconds) for name, seconds in noted.items()}}
        for case, spec, noted in zip(found, specs, taken, strict=True)
    ]


def _predicted(submodels: Any, spec: Any, case: Case, speed: tuple[float, float, float]) -> Row:
    cost, samples = submodels.cost(spec, case.work.batch_size), case.work.batch_size
    flops, moved_bytes = cost.flops_per_sample * samples, cost.moved_bytes_per_sample * samples
    padding_flops, kernels = cost.padding_flops_per_sample * samples, cost.kernels_per_sample * samples
    return {
        "model": case.model,
        "rate": case.rate,
        "window": case.window,
        "params": cost.params,
        "flops": flops,
        "padding_flops": padding_flops,
        "moved_bytes": moved_bytes,
        "bytes": cost.down_bytes,
        "predicted_bytes": cost.peak_bytes,
        "kernels": kernels,
        "predicted_seconds": (flops + padding_flops) / speed[0] + moved_bytes / speed[1] + kernels * speed[2],
        "flops_per_byte": speed[0] / speed[1],
    }


def on_device(models: Sequence[str], rates: Sequence[float], device: str, num_steps: int) -> list[Row]:
    """Measure submodels in this process, relative to the whole model, beside predictions; on a GPU with its allocator's peak."""
    import torch

    from raafl.devices.measure import Probes
    from raafl.local.train import FabricOptions

    on_gpu = torch.device(device).type == "cuda"

    def clock() -> float:
        if on_gpu:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def measured(case: Case, client: Any, submodels: Any, speed: tuple[float, float, float]) -> Row:
        spec = spec_of(submodels, case.rate, case.window)
        values, trainer, before = values_of(submodels.layout(spec)), client.make(submodels), 0
        if on_gpu:
            gc.collect()  # otherwise garbage of the last task, freed during this one, would hide some of its memory
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        steps = client.train(trainer, spec, values, num_steps)[1]
        peak = torch.cuda.max_memory_allocated(device) - before if on_gpu else 0
        return {**_predicted(submodels, spec, case, speed), "seconds": min(steps[1:]), "peak_bytes": peak}

    rows = []
    for model in models:
        client = client_of(WORKLOADS[model], clock, FabricOptions(accelerator=torch.device(device).type))
        submodels, probes = submodels_of(WORKLOADS[model]), Probes(device, clock)
        for _ in range(10 * num_steps):
            probes.take()
        found = [measured(case, client, submodels, probes.speeds()) for case in cases(model, rates)]
        for row in found:
            whole = {name: row[name] / (found[0][name] or 1) for name in row if name.endswith(("seconds", "bytes"))}
            rows.append(
                {
                    "model": model,
                    "rate": row["rate"],
                    "window": row["window"],
                    "seconds": row["seconds"],
                    "time": whole["seconds"],
                    "predicted time": whole["predicted_seconds"],
                    "memory": whole["peak_bytes"],
                    "predicted memory": whole["predicted_bytes"],
                    "kernels": row["kernels"],
                    "predicted seconds": row["predicted_seconds"],
                }
            )
        flops_per_s, bytes_per_s, launch_s = probes.speeds()
        rows.append({"model": model, "flops_per_s": flops_per_s, "bytes_per_s": bytes_per_s, "launch_s": launch_s})
    return rows


def peak_bytes(case: Case) -> int:
    """Measure the memory that a task of this submodel takes in this process, which does nothing else."""
    client = client_of(case.work, time.perf_counter)
    submodels = submodels_of(case.work)
    spec = spec_of(submodels, case.rate, case.window)
    trainer, layout = client.make(submodels), submodels.layout(spec)
    gc.collect()
    malloc.give_back(0)  # otherwise the task could use memory that the warm-up has freed
    before_bytes = forget_peak()
    # two steps: from the second on, all of a step's memory is allocated
    client.train(trainer, spec, values_of(layout), 2)
    return status_bytes("VmHWM") - before_bytes


def _run(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.submodels", add_help=False)
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS))
    parser.add_argument("--rates", nargs="+", type=float, default=RATES)
    parser.add_argument("--turns", type=int)
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", "1")))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--time")
    parser.add_argument("--memory", type=json.loads)
    parser.add_argument("--heap", choices=HEAPS, default="kept")
    options, rest = parser.parse_known_args(argv)
    if options.time or options.memory:
        HEAPS[options.heap]()
        import torch

        torch.set_num_threads(options.threads)
        clock = time.process_time if options.threads == 1 else time.perf_counter
        if options.time:
            print(json.dumps(time_steps(options.time, options.rates, options.turns, clock)))
        else:
            print(json.dumps(peak_bytes(Case(*options.memory))))
        return
    models = options.models or (QUICK if options.quick else ALL)
    rates, turns = ((1.0, 0.25), TURNS) if options.quick else (options.rates, options.turns)
    main("submodels", lambda: rows(models, rates, turns, options.threads, kept=options.heap), rest)


if __name__ == "__main__":
    _run()
