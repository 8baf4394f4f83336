"""Compare what `make gpu` has measured with the aims on one H100 or H200; needs no GPU.

`before` is what the first run measured, whose steps were all eager, and `cpu` the same with one CPU thread. `found` is the figure
of the row that the aim is about, in the committed report; empty where no run has had that row yet. `over_bare` is the same over
the bare eager loop of PyTorch beside it.

    python -m benchmarks.gpu_aims [--json] [--out FILE]
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from benchmarks.common import ROOT, Row, main

RESULT = ROOT / "benchmarks" / "results" / "gpu.json"
WAITS = ROOT / "benchmarks" / "results" / "captured.json"


@dataclass(frozen=True)
class Aim:
    """An aim, and the row of `make gpu` that shows whether it is met.

    `what`: the figure in words. `figure`: what the first run measured. `aim`: value to reach. `step`, `row`, `field`:
    where the figure is in the report. `before`: step, fields with their values, and field of the first run's figure.
    `bare`: row of the bare loop to compare with, "" = none. `is_most`: whether the figure must be at most the aim.
    """

    what: str
    figure: str
    aim: float
    step: str
    row: str
    field: str
    before: tuple[str, dict[str, Any], str]
    bare: str = ""
    is_most: bool = False


def _tasks(model: str, way: str, aim: float) -> Aim:
    return Aim(
        f"1,000 {model.upper()} clients, tasks a second, {way}",
        f"tasks of the {model.upper()} a second",
        aim,
        "small_clients",
        f"{model}, 1000 clients, {way}",
        "tasks_per_s",
        ("throughput", {"workload": model}, "value"),
        f"{model}, bare eager, 32-true",
    )


def _share(model: str, rate: float, aim: float) -> Aim:
    before = {"model": model, "rate": rate, "window": "bottom"}
    row = f"{model}, 32-true, {rate:g}"
    what = f"step of {model} at 1/{round(1 / rate)} over the whole model's"
    return Aim(
        f"{what}, captured",
        what,
        aim,
        "captured",
        row,
        "captured_s over whole",
        ("submodels", before, "time"),
        is_most=True,
    )


def _tokens(precision: str, aim: float) -> Aim:
    return Aim(
        f"LLaMA of 10.7 million, tokens a second, {precision}, captured",
        f"LLaMA of 10.7 million, tokens a second, {precision}",
        aim,
        "language",
        f"llama, captured, {precision}",
        "tokens_per_s",
        ("language", {"precision": precision}, "value"),
        f"llama, bare eager, {precision}",
    )


AIMS = (
    _tasks("mlp", "captured", 1000),
    _tasks("mlp", "fast", 2500),
    _tasks("cnn", "captured", 900),
    _tasks("cnn", "fast", 2300),
    _share("vit-tiny", 0.25, 0.30),
    _share("vit-tiny", 0.0625, 0.12),
    _share("bert-small", 0.25, 0.38),
    _share("bert-small", 0.0625, 0.20),
    _tokens("32-true", 400_000),
    _tokens("bf16-mixed", 700_000),
    Aim(
        "GPU busy with 1,000 small clients, %",
        "GPU busy with MLPs, %",
        60,
        "small_clients",
        "mlp, 1000 clients, captured",
        "kernels %",
        ("throughput", {"workload": "mlp"}, "busy %"),
    ),
)


def rows(result: dict[str, Any] | None = None) -> list[Row]:
    """Return a row for each aim, from a report of `make gpu`; None = the committed one."""
    result = json.loads(RESULT.read_text(encoding="utf-8")) if result is None else result
    steps = {step["step"]: step["rows"] for step in result["rows"]}

    def figure(step: str, row: str, field: str) -> float | None:
        return next((one[field] for one in steps.get(step, []) if one.get("row") == row and one.get(field)), None)

    found: list[Row] = []
    for aim in AIMS:
        step, which, field = aim.before
        first = [one for one in steps.get(step, []) if field in one and which.items() <= one.items()]
        value = figure(aim.step, aim.row, aim.field)
        bare = figure(aim.step, aim.bare, aim.field)
        met = value is not None and (value <= aim.aim if aim.is_most else value >= aim.aim)
        found.append(
            {
                "what": aim.what,
                "before": first[0][field] if first else None,
                "cpu": first[0].get("cpu") if first and field == "value" else None,
                "figure": "" if aim.figure in (row["figure"] for row in found) else aim.figure,
                "is_new": str(aim.figure not in (row["figure"] for row in found)),
                "aim": aim.aim,
                "found": value,
                "over_bare": None if value is None or bare is None else value / bare,
                "verdict": "not shown" if value is None else "shown" if met else "missed",
            }
        )
    waits = [row["captured_step"] for row in json.loads(WAITS.read_text(encoding="utf-8"))["rows"] if not row["why"]]
    verdict = "shown, emulated" if max(waits) == 0 else "missed, emulated"
    what = f"most waits for the GPU in a captured step, of {len(waits)} methods"
    return [*found, {"what": what, "before": 4, "aim": 0, "found": max(waits), "over_bare": None, "verdict": verdict}]


if __name__ == "__main__":
    main("gpu_aims", rows, of=RESULT)
