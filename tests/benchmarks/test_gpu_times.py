"""Predicted times of steps on a GPU, against those that `make gpu` has measured."""

from __future__ import annotations

import json

import pytest

from benchmarks import gpu_aims, gpu_times
from raafl.devices.profiles import Device

RESULT = gpu_times.ROOT / "benchmarks" / "results" / "gpu-times.json"


def test_the_committed_predictions_of_models_left_out_are_within_a_tenth():
    rows = json.loads(RESULT.read_text())["rows"]
    steps = [row for row in rows if row["kind"] == "eager"]
    assert {row["model"] for row in steps} == {"vit-tiny", "bert-small"} and len(steps) == 8
    assert max(abs(row["error"]) for row in steps) < 0.1 < max(abs(row["before"]) for row in steps)


def test_a_price_is_fitted_to_other_models_than_the_one_that_it_predicts(monkeypatch):
    profile = Device("h200").profile
    launches = {"one": gpu_times.Launches(1, 100), "two": gpu_times.Launches(1, 200)}
    seconds = {"one": 140e-5, "two": 2 * 240e-5}  # the second has a host of half the speed
    told = {"rows": [{"step": "captured", "rows": []}]}
    rows = [
        {"kind": "eager", "model": m, "rate": 1.0, "window": "all", "seconds": seconds[m], "launches": launches[m]}
        for m in launches
    ]
    monkeypatch.setattr(gpu_times, "measured", lambda result: iter(rows))
    one, two = gpu_times.rows(told)
    assert (one["host_op_s"], two["host_op_s"]) == pytest.approx((2e-5, 1e-5))
    assert (one["error"], two["error"]) == pytest.approx((1.0, -0.5))
    assert gpu_times.fitted(rows[:1], profile) == pytest.approx(1e-5)


def test_rows_of_a_report_are_found_with_what_they_launch():
    captured = {"model": "cnn", "rate": 0.25, "precision": "32-true", "eager_s": 2e-3, "captured_s": 1e-4}
    told = {
        "rows": [
            {
                "step": "captured",
                "rows": [captured, {**captured, "precision": "bf16-mixed"}, {**captured, "error": "x"}],
            }
        ]
    }
    eager, graph = gpu_times.measured(told)
    assert (eager["kind"], eager["seconds"], graph["kind"], graph["seconds"]) == ("eager", 2e-3, "captured", 1e-4)
    assert graph["launches"] == eager["launches"].captured() and eager["launches"].operations > 10


def test_an_aim_is_shown_missed_or_not_shown_by_the_row_of_a_report():
    small = [
        {"row": "mlp, 1000 clients, captured", "tasks_per_s": 1200.0, "kernels %": 41.0},
        {"row": "mlp, bare eager, 32-true", "tasks_per_s": 400.0},
        {"row": "mlp, 1000 clients, fast", "error": "out of memory"},
    ]
    whole = [{"row": "vit-tiny, 32-true, 0.25", "captured_s over whole": 0.29}]
    first = [{"workload": "mlp", "value": 100.0, "cpu": 90.0, "busy %": 7.0}]
    steps = {"small_clients": small, "captured": whole, "throughput": first}
    told = gpu_aims.rows({"rows": [{"step": name, "rows": rows} for name, rows in steps.items()]})
    captured, fast, *_ = told
    shown = {name: captured[name] for name in ("before", "cpu", "aim", "found", "over_bare", "verdict")}
    assert shown == {"before": 100.0, "cpu": 90.0, "aim": 1000, "found": 1200.0, "over_bare": 3.0, "verdict": "shown"}
    assert (fast["found"], fast["verdict"], fast["figure"]) == (None, "not shown", "")
    verdicts = {row["what"]: row["verdict"] for row in told}
    assert verdicts["step of vit-tiny at 1/4 over the whole model's, captured"] == "shown"
    assert verdicts["GPU busy with 1,000 small clients, %"] == "missed"
    assert told[-1]["verdict"] == "shown, emulated"
    committed = json.loads((gpu_times.ROOT / "benchmarks" / "results" / "gpu-aims.json").read_text())["rows"]
    assert committed == gpu_aims.rows()
