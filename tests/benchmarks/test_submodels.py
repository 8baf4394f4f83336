from __future__ import annotations

import itertools

import pytest

from benchmarks import submodels

FULL_PARAMS = 3073 * 2048 + 2049 * 2048 + 2049 * 10
QUARTER_PARAMS = 3073 * 1024 + 1025 * 1024 + 1025 * 10  # rate 0.25: half of the units of both layers


@pytest.fixture(scope="module")
def vit_mini():
    return submodels._submodels(submodels.WORKLOADS["vit-mini"])


@pytest.mark.parametrize(("window", "present", "trained"), [("bottom", {0, 1}, {0, 1}), ("top", {0, 1, 2, 3}, {2, 3})])
def test_a_quarter_keeps_half_of_the_width_and_trains_half_of_the_blocks(vit_mini, window, present, trained):
    shrunk = vit_mini.shrink(submodels.spec_of(vit_mini, 0.25, window), device="meta")
    shapes = {name: tuple(p.shape) for name, p in shrunk.module.named_parameters()}
    trains = {name for name, p in shrunk.module.named_parameters() if p.requires_grad}
    block = "model.vit.layers.{}.mlp.fc1.weight".format
    assert {i for i in range(4) if block(i) in shapes} == present
    assert {i for i in range(4) if block(i) in trains} == trained
    assert all(shapes[block(i)] == (128, 128) for i in present)  # 128 of 256 units; the residual width stays 128
    assert all(
        shapes[f"model.vit.layers.{i}.attention.q_proj.weight"] == (2 * 32, 128) for i in present
    )  # 2 of 4 heads


def test_the_smallest_rate_keeps_at_least_one_of_everything(vit_mini):
    spec = submodels.spec_of(vit_mini, 0.015625, "bottom")  # an eighth of 4 heads and of 4 blocks, and of 256 units
    assert spec.blocks == (("model.vit.layers", range(1)),)
    assert spec.indices("model.vit.layers.0.heads") == range(1)
    assert spec.indices("model.vit.layers.0.ffn") == range(32)
    assert submodels.spec_of(vit_mini, 1.0, "all").is_full


def test_rows_are_the_whole_model_and_every_rate_and_window():
    assert [(case.rate, case.window) for case in submodels.cases("vit-tiny", (1.0, 0.0625, 0.25))] == [
        (1.0, "all"), (0.25, "bottom"), (0.25, "top"), (0.0625, "bottom"), (0.0625, "top"),
    ]  # fmt: skip


def test_seconds_are_those_of_steps_and_of_what_comes_before_them():
    ticks = itertools.count()  # each look at the clock is a second later than the last
    full, quarter = submodels.time_steps("mlp", (1.0, 0.25), turns=1, clock=lambda: float(next(ticks)))
    for row in (full, quarter):
        # one second to cut the values out, and one until the first batch is asked for
        assert (row["seconds"], row["time_ratio"], row["load_seconds"], row["reload_seconds"]) == (1.0, 1.0, 2.0, 2.0)
    assert (full["params"], quarter["params"]) == (FULL_PARAMS, QUARTER_PARAMS)
    assert (full["bytes"], quarter["bytes"]) == (4 * FULL_PARAMS, 4 * QUARTER_PARAMS)


@pytest.mark.timeout(300)
def test_a_smaller_submodel_costs_less_time_and_memory():
    full, quarter = submodels.rows(["mlp"], (1.0, 0.25), turns=1)
    assert (full["model"], full["rate"], full["window"], full["memory_ratio"]) == ("mlp", 1.0, "all", 1.0)
    assert (quarter["rate"], quarter["window"]) == (0.25, "bottom")
    for row in (full, quarter):
        # weights twice (as received, and in the module), gradients and momentum
        assert row["predicted_bytes"] > 16 * row["params"]
        assert 16 * row["params"] < row["peak_bytes"] < 1.4 * row["predicted_bytes"]
        assert row["load_ratio"] == row["load_seconds"] / row["seconds"]
    assert quarter["memory_ratio"] == quarter["peak_bytes"] / full["peak_bytes"]
    assert quarter["predicted_time_ratio"] == quarter["flops"] / full["flops"]
    assert 0 < quarter["time_ratio"] < 1
