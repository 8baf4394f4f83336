"""Measure captured training steps: beside eager ones on a GPU, and how often a task waits for an emulated one, by method.

`on_device` is a step of `make gpu`. The table of waits needs no GPU: it counts what the emulation in `tests/helpers` counts.

    python -m benchmarks.captured [--json] [--out FILE]
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.common import Row, main
from benchmarks.workloads import WORKLOADS, client_of, spec_of, submodels_of, values_of

BARE = ("eager", "callables", "graph")
"""Kinds of bare loops."""
PROOFS = 5
"""Tasks until all graphs are made and compared."""


def on_device(
    models: Sequence[str],
    rates: Sequence[float],
    precisions: Sequence[str],
    device: str,
    num_steps: int,
    least_s: float,
) -> dict[str, Callable[[], Row]]:
    """Measure the seconds of a training step, eager and captured, for each model, precision and rate.

    Eager steps use the plain form of the optimizer (``fabric.capture off``), captured ones its fused form. Bare loops
    of PyTorch with the whole model come last: eager, with graphed passes (`make_graphed_callables`), and as one CUDA
    graph of the whole step.

    `models`: names of workloads. `rates`: rates of the submodels, the whole model's first. `precisions`: values of
    ``fabric.precision``. `num_steps`: steps of a measured task. `least_s`: least seconds of each measurement; 0 = one
    task.
    """
    whole: dict[tuple[str, str], Row] = {}

    @cache
    def submodels(model: str) -> Any:
        return submodels_of(WORKLOADS[model])

    def case(model: str, precision: str, rate: float) -> Row:
        row = _beside(WORKLOADS[model], submodels(model), rate, precision, device, num_steps, least_s)
        if rate == 1:
            whole[model, precision] = row
        beside = whole.get((model, precision), {})
        shares = {f"{name} over whole": row[name] / beside[name] for name in ("eager_s", "captured_s") if beside}
        return {"model": model, "rate": rate, "precision": precision, **row, **shares}

    both = list(itertools.product(models, precisions))
    cases: dict[str, Callable[[], Row]] = {
        f"{model}, {precision}, {rate:g}": partial(case, model, precision, rate)
        for model, precision in both
        for rate in rates
    }
    for kind in BARE:
        for model, precision in both:
            bare = partial(_bare, model, precision, device, num_steps, least_s, kind)
            cases[f"{model}, {precision}, bare {kind}"] = bare
    return cases


def _beside(work: Any, submodels: Any, rate: float, precision: str, device: str, num_steps: int, least_s: float) -> Row:
    """Measure the seconds of a step of one submodel, eager and captured."""
    import torch

    from raafl.core.options import FabricOptions
    from raafl.local.captured import Capture

    kind, spec, row = torch.device(device).type, spec_of(submodels, rate, "bottom"), Row()
    for capture, name in (("off", "eager_s"), ("auto", "captured_s")):
        client = client_of(work, time.perf_counter, FabricOptions(kind, precision=precision, capture=capture))
        trainer, values = client.make(submodels), values_of(submodels.layout(spec))
        if capture == "auto" and kind == "cuda":
            trainer.capture = Capture(trainer)
        row[name] = _seconds(partial(client.train, trainer, spec, values, num_steps), least_s) / num_steps
        if trainer.capture is not None:
            row["eager because"] = trainer.capture.counted()["eager"]
        trainer.release()
    return {**row, "speedup": row["eager_s"] / row["captured_s"]}


def _seconds(task: Any, least_s: float) -> float:
    """Return the seconds of a task, measured after the tasks that capture and compare."""
    for _ in range(PROOFS if least_s else 0):
        task()
    num, begun = 0, time.perf_counter()
    while not num or time.perf_counter() - begun < least_s:
        task()  # returns once the GPU is done, since the result is read from it
        num += 1
    return (time.perf_counter() - begun) / num


def _bare(model: str, precision: str, device: str, num_steps: int, least_s: float, kind: str) -> Row:
    """Measure the seconds of a step in a loop of PyTorch alone on one batch; without a GPU all kinds are eager."""
    import torch

    from benchmarks.gpu_rows import Loss

    work, on_gpu = WORKLOADS[model], torch.device(device).type == "cuda"
    loss_of: Any = Loss(work.make(False)).to(device)
    batch = [x.to(device) for x in work.batch(work.batch_size)]
    optimizer, mixed = torch.optim.SGD(loss_of.parameters(), lr=0.01), precision == "bf16-mixed"

    def autocast() -> Any:
        return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=mixed, cache_enabled=kind == "eager")

    if on_gpu and kind == "callables":
        with autocast():
            loss_of = torch.cuda.make_graphed_callables(loss_of, tuple(batch))

    def step() -> None:
        with autocast():
            loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    once = _whole_graph(step) if on_gpu and kind == "graph" else step

    def task() -> None:
        for _ in range(num_steps):
            once()
        if on_gpu:
            torch.cuda.synchronize(device)

    seconds = _seconds(task, least_s) / num_steps
    return {"model": model, "rate": 1.0, "precision": precision, f"bare_{kind}_s": seconds}


def _whole_graph(step: Callable[[], None]) -> Any:
    """Capture a whole step as one CUDA graph; return the function that replays it."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


# ---- waits, on an emulated GPU ----


def waits(names: Sequence[str]) -> list[Row]:
    """Count how often a task waits for its GPU, within and beside its steps, with eager and with captured steps.

    Server and client share the GPU, and a task has four steps; the row has the task with the fewest waits after the
    comparisons. `names`: names of methods.
    """
    import pytest

    from tests.helpers.emulated_cuda import emulation

    rows = []
    for name in names:
        row: Row = {"method": name}
        for capture in ("off", "auto"):
            with (
                pytest.MonkeyPatch.context() as patch,
                emulation(patch) as emulated,
                tempfile.TemporaryDirectory() as at,
            ):
                row |= _counted(name, capture, emulated.counts, patch, Path(at))
        rows.append(row)
    return rows


def _counted(name: str, capture: str, counts: Any, patch: Any, folder: Path) -> Row:
    from raafl.core.algorithm import Training
    from raafl.core.options import FabricOptions
    from raafl.local.train import LocalTrainer, TaskSteps
    from tests.helpers.small_runs import experiment, finish

    tasks: list[tuple[int, int]] = []
    in_steps, run, run_batch = [0], LocalTrainer.run, TaskSteps._run_batch

    def counted_run(*args: Any, **kwargs: Any) -> Any:
        before, in_steps[0] = counts["waits"], 0
        try:
            return run(*args, **kwargs)
        finally:
            tasks.append((in_steps[0], counts["waits"] - before - in_steps[0]))

    def counted_batch(*args: Any) -> None:
        before = counts["waits"]
        run_batch(*args)
        in_steps[0] += counts["waits"] - before

    patch.setattr(LocalTrainer, "run", counted_run)
    patch.setattr(TaskSteps, "_run_batch", counted_batch)
    fabric = FabricOptions(accelerator="cuda", capture=capture)
    made = experiment(
        folder / capture,
        name,
        clients=2,
        max_updates=40,
        eval_every=100,
        train=Training(num_epochs=None, num_steps=4),
        fabric=fabric,
        server_device="cuda:0",
    )
    told = finish(made).summary.get("captured", {})
    step, task = min(reversed(tasks), key=sum)
    what = "eager" if capture == "off" else "captured"
    row: Row = {f"{what}_step": step / 4, f"{what}_task": task}
    return row if capture == "off" else {**row, "why": "; ".join(told.get("eager", []))}


if __name__ == "__main__":
    from raafl.algorithms import ALGORITHMS

    main("captured", lambda: waits(list(ALGORITHMS)))
