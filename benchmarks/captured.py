"""Measure captured training steps: beside eager ones on a GPU, and how often a task waits for an emulated one, by method.

`on_device` is a step of `make gpu`. The table of waits needs no GPU: it counts what the emulation in `tests/helpers` counts.

    python -m benchmarks.captured [--json] [--out FILE]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import Row, main
from benchmarks.workloads import WORKLOADS, client_of, spec_of, submodels_of, values_of

PROOFS = 5
"""Tasks until all graphs are made and compared."""


def on_device(
    models: Sequence[str],
    rates: Sequence[float],
    precisions: Sequence[str],
    device: str,
    num_steps: int,
    least_s: float,
) -> list[Row]:
    """Measure seconds of a step, eager and captured, for each model, rate and precision.

    Eager steps have the plain form of the optimizer (``fabric.capture off``); captured ones its fused form. Of the whole model
    in float32 there is also a bare loop of PyTorch, eager and as one CUDA graph of its own.

    Args:
        models: names of workloads.
        rates: rates of the submodels.
        precisions: values of ``fabric.precision``.
        device: that computes; without a GPU nothing is captured.
        num_steps: steps of a measured task.
        least_s: seconds of each measurement at least; 0 = one task, without those that capture and compare.
    """
    rows: list[Row] = []
    for model in models:
        work, submodels = WORKLOADS[model], submodels_of(WORKLOADS[model])
        for precision in precisions:
            whole: Row = {}
            for rate in rates:
                row = _beside(work, submodels, rate, precision, device, num_steps, least_s)
                whole = whole or row
                row |= {f"{name} over whole": row[name] / whole[name] for name in ("eager_s", "captured_s")}
                bare = _bare(work, device, num_steps, least_s) if rate == 1 and precision == "32-true" else {}
                rows.append({"model": model, "rate": rate, "precision": precision, **row, **bare})
    return rows


def _beside(work: Any, submodels: Any, rate: float, precision: str, device: str, num_steps: int, least_s: float) -> Row:
    """Measure seconds of a step of one submodel, eager and captured."""
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
    """Return the seconds of a task, after those that capture and compare."""
    for _ in range(PROOFS if least_s else 0):
        task()
    num, begun = 0, time.perf_counter()
    while not num or time.perf_counter() - begun < least_s:
        task()  # its end waits for the GPU, which its result is read from
        num += 1
    return (time.perf_counter() - begun) / num


def _bare(work: Any, device: str, num_steps: int, least_s: float) -> Row:
    """Measure a loop of PyTorch alone on one batch: eager, and as a CUDA graph."""
    import torch

    module = work.make(False).to(device)
    batch = [x.to(device) for x in work.batch(work.batch_size)]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def step() -> None:
        loss = module.training_step(batch, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def timed(function: Any) -> float:
        def task() -> None:
            for _ in range(num_steps):
                function()
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize(device)

        return _seconds(task, least_s) / num_steps

    module.log = module.log_dict = lambda *args, **kwargs: None
    row: Row = {"bare_eager_s": timed(step)}
    if torch.device(device).type != "cuda":
        return row
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        return {**row, "bare_graph": str(error).splitlines()[0]}
    return {**row, "bare_graph_s": timed(graph.replay)}


# ---- waits, on an emulated GPU ----


def waits(names: Sequence[str]) -> list[Row]:
    """Count how often a task waits for its GPU, within its steps and beside them, with eager and with captured steps.

    Server and client share the GPU, and a task has four steps; the task with the fewest counts, after the comparisons.

    Args:
        names: names of methods.
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
