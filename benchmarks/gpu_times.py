"""Compare predicted seconds of steps on a GPU with those that `make gpu` has measured; needs no GPU.

The host's price of an operation (`host_op_s`) is fitted to the rows of all models but one, and predicts that one's rows, so that
no model's rows have a part in their own prediction. How many times that price a product, an operation of the optimizer and the
rest of a step cost (`raafl.devices.profiles`) was chosen once, by the rows of all models: of two models it cannot be left out.
`seconds` is measured, `predicted_s` is the longer of `host_s` and `device_s`, at the speeds of the bundled h200.
`before` is the error of the sum that was predicted when the row was measured: FLOPs, bytes and one price for all launches.

Rows of `kind` task are whole tasks, of which no time beside the steps was measured: `error` is then what the steps do not explain.

    python -m benchmarks.gpu_times [--json] [--out FILE]
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from benchmarks.common import ROOT, Row, main
from benchmarks.overhead import CNN_CIFAR, MLP_MNIST
from benchmarks.workloads import WORKLOADS, spec_of, submodels_of
from raafl.devices.profiles import Device, Profile
from raafl.submodel.cost.ledger import Launches

RESULT = ROOT / "benchmarks" / "results" / "gpu.json"
GPU = "h200"
LENGTH, BATCH_SIZE = 256, 16
"""Of the LLaMA in the step `language` of `make gpu`."""


def measured(result: dict[str, Any]) -> Iterator[Row]:
    """Yield the steps and tasks of a report of `make gpu` that have a prediction, each with its launches.

    Args:
        result: the report.
    """
    steps = {step["step"]: step["rows"] for step in result["rows"]}
    for row in steps.get("submodels", []):
        if "seconds" in row:
            what: Row = {"kind": "eager", "model": row["model"], "rate": row["rate"], "window": row["window"]}
            before = row["predicted seconds"] / row["seconds"] - 1
            yield {**what, "seconds": row["seconds"], "before": before, "launches": _launches(**what)}
    for row in steps.get("captured", []):
        what = {"model": row["model"], "rate": row["rate"], "window": "bottom" if row["rate"] < 1 else "all"}
        for kind in ("eager", "captured") if row["precision"] == "32-true" and "error" not in row else ():
            launches = _launches(kind, **what)
            yield {"kind": kind, **what, "seconds": row[f"{kind}_s"], "launches": launches}
    for row in steps.get("language", []):
        if row.get("precision") == "32-true" and "steps_per_s" in row:
            what = {"kind": "task", "model": "llama 10.7 M", "rate": 1.0, "window": "all"}
            yield {**what, "seconds": 1 / row["steps_per_s"], "launches": _llama()}
    works = {work.name: work for work in (MLP_MNIST, CNN_CIFAR)}
    for row in steps.get("throughput", []):
        if row.get("workload") in works and "clients" not in row:
            work = works[row["workload"]]
            cost = _submodels(work.name).cost(spec_of(_submodels(work.name), 1.0, "all"), work.batch_size)
            what = {"kind": "task", "model": f"{work.name} of {work.num_steps} steps", "rate": 1.0, "window": "all"}
            yield {
                **what,
                "seconds": 1 / row["value"],
                "launches": cost.launches.times(work.batch_size * work.num_steps),
            }


@cache
def _submodels(name: str) -> Any:
    if name in WORKLOADS:
        return submodels_of(WORKLOADS[name])
    import torch

    from raafl.submodel import Submodels, skeleton

    work = {work.name: work for work in (MLP_MNIST, CNN_CIFAR)}[name]
    with skeleton():
        module = work.model()
    return Submodels(module, [torch.randn(2, *work.shape), torch.zeros(2, dtype=torch.long)])


def _launches(kind: str, model: str, rate: float, window: str) -> Launches:
    submodels, batch_size = _submodels(model), WORKLOADS[model].batch_size
    launches = submodels.cost(spec_of(submodels, rate, window), batch_size).launches.times(batch_size)
    return launches.captured() if kind == "captured" else launches  # type: ignore[no-any-return]


def _llama() -> Launches:
    import torch

    from model_zoo import LLaMA
    from raafl.submodel import FULL, Submodels, skeleton

    with skeleton():
        module = LLaMA("char", vocab_size=261, max_length=LENGTH)
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    cost = Submodels(module, [tokens, tokens]).cost(FULL, BATCH_SIZE)
    return cost.launches.times(BATCH_SIZE)  # type: ignore[union-attr]


def fitted(rows: Sequence[Row], profile: Profile) -> float:
    """Return the host's seconds for an operation that give eager steps the least squares of relative errors.

    Args:
        rows: rows with ``seconds`` and ``launches``.
        profile: speeds of the device; steps that it bounds tell nothing of the host.
    """
    unit = replace(profile, host_op_s=1.0, host_product_s=0.0)
    eager = [
        (row["seconds"], unit.host_s(*row["launches"][:-1]), profile.device_s(row["launches"].kernels)) for row in rows
    ]
    shares = [units / seconds for seconds, units, device_s in eager if device_s < 0.9 * seconds]
    return float(sum(shares) / sum(share * share for share in shares))


def rows(result: dict[str, Any] | None = None) -> list[Row]:
    """Predict each row of a report of `make gpu`; None = the committed one."""
    result = json.loads(RESULT.read_text(encoding="utf-8")) if result is None else result
    given = Device(GPU).profile
    seen = list(measured(result))
    steps = [row for row in seen if row["kind"] == "eager"]
    found = []
    for row in seen:
        others = [one for one in steps if one["model"] != row["model"]]
        price_s = fitted(others or steps, given)
        profile, launches = replace(given, host_op_s=price_s, host_product_s=0.0), row["launches"]
        predicted_s = profile.gpu_s(*launches)
        bundled_s = given.gpu_s(*launches)
        found.append(
            {
                **{name: row[name] for name in ("kind", "model", "rate", "window", "seconds")},
                "operations": launches.operations,
                "products": launches.products,
                "plain": launches.plain,
                "host_op_s": price_s,
                "host_s": profile.host_s(*launches[:-1]),
                "device_s": profile.device_s(launches.kernels),
                "predicted_s": predicted_s,
                "error": predicted_s / row["seconds"] - 1,
                "bundled_error": bundled_s / row["seconds"] - 1,
                "before": row.get("before"),
            }
        )
    return found


if __name__ == "__main__":
    main("gpu_times", rows, of=RESULT)
