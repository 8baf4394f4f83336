from __future__ import annotations

import itertools

import pytest
from torch import nn

from benchmarks import submodels
from benchmarks.workloads import spec_of
from raafl.devices.measure import Probes
from raafl.submodel import Submodels

FULL_PARAMS = 3073 * 2048 + 2049 * 2048 + 2049 * 10
QUARTER_PARAMS = 3073 * 1024 + 1025 * 1024 + 1025 * 10  # rate 0.25: half of the units of both layers


class Stacked(nn.Module):
    """Four blocks with four heads and sixteen units each, between a layer that makes what they read and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.blocks = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 4, 16, batch_first=True), 4)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)))


def block(name, index):
    return f"blocks.layers.{index}.{name}"


@pytest.mark.parametrize(("window", "present", "trained"), [("bottom", {0, 1}, {0, 1}), ("top", {0, 1, 2, 3}, {2, 3})])
def test_a_quarter_keeps_half_of_the_width_and_trains_half_of_the_blocks(window, present, trained):
    found = Submodels(Stacked())
    parameters = dict(found.shrink(spec_of(found, 0.25, window), device="meta").module.named_parameters())
    assert {i for i in range(4) if block("linear1.weight", i) in parameters} == present
    assert {i for i in present if parameters[block("linear1.weight", i)].requires_grad} == trained
    assert parameters["head.weight"].requires_grad
    assert parameters["embed.weight"].requires_grad == (window == "bottom")
    for i in present:  # 8 of 16 units, q, k and v of 2 of 4 heads of 2 features; the residual width stays 8
        assert parameters[block("linear1.weight", i)].shape == (8, 8)
        assert parameters[block("self_attn.in_proj_weight", i)].shape == (3 * 2 * 2, 8)


def test_the_smallest_rate_keeps_at_least_one_of_everything():
    found = Submodels(Stacked())
    spec = spec_of(found, 0.015625, "bottom")  # an eighth of 4 heads, 4 blocks and 16 units
    assert [kept for _, kept in spec.blocks] == [range(1)]
    assert {len(kept) for name, kept in spec.kept if name.endswith("heads")} == {1}
    assert {len(kept) for name, kept in spec.kept if name.endswith("ffn")} == {2}
    assert spec_of(found, 1.0, "all").is_full


def test_rows_are_the_whole_model_and_every_rate_and_window():
    assert [(case.rate, case.window) for case in submodels.cases("vit-tiny", (1.0, 0.0625, 0.25))] == [
        (1.0, "all"),
        (0.25, "bottom"),
        (0.25, "top"),
        (0.0625, "bottom"),
        (0.0625, "top"),
    ]


@pytest.mark.long("test_a_quarter_keeps_half_of_the_width_and_trains_half_of_the_blocks")
def test_seconds_are_those_of_steps_and_of_what_comes_before_them():
    ticks = itertools.count()  # each look at the clock is a second later than the last
    full, quarter = submodels.time_steps("mlp", (1.0, 0.25), turns=1, clock=lambda: float(next(ticks)))
    for row in (full, quarter):
        # one second to cut the values out, and one until the first batch is asked for
        assert (row["seconds"], row["load_seconds"], row["reload_seconds"]) == (1.0, 2.0, 2.0)
    assert (full["params"], quarter["params"]) == (FULL_PARAMS, QUARTER_PARAMS)
    assert (full["bytes"], quarter["bytes"]) == (4 * FULL_PARAMS, 4 * QUARTER_PARAMS)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_smaller_submodel_costs_less_time_and_memory():
    full, quarter = submodels.rows(["mlp"], (1.0, 0.25), turns=1, resident=False)
    assert (full["model"], full["rate"], full["window"], full["memory_ratio"]) == ("mlp", 1.0, "all", 1.0)
    assert (quarter["rate"], quarter["window"]) == (0.25, "bottom")
    for row in (full, quarter):
        # weights twice (as received, and in the module), gradients and momentum
        assert row["predicted_bytes"] > 16 * row["params"]
        assert 16 * row["params"] < row["peak_bytes"] < 1.2 * row["predicted_bytes"]
        assert row["load_ratio"] == row["load_seconds"] / row["seconds"]
    assert quarter["memory_ratio"] == quarter["peak_bytes"] / full["peak_bytes"]
    assert quarter["time_ratio"] == quarter["seconds"] / full["seconds"] < 1
    assert quarter["predicted_time_ratio"] == quarter["predicted_seconds"] / full["predicted_seconds"]


def test_speeds_and_launches_are_those_that_explain_the_probes():
    probes = Probes(clock=lambda: 0.0, num_samples=8192)
    # an activation, a norm and an addition, forward, backward, and the sum of both gradients: one launch each; and five
    # blocks of a linear layer, a norm and a GELU
    assert [one.kernels.total() for one in (probes.product, probes.layer, probes.tiny)] == [1, 6, 46]
    # Forward: gelu 2, norm 2 and addition 3 tensors of 8192 x 512. Backward: norm 3, gelu 3, and 3 to add both gradients.
    # The norm writes two numbers for each row and reads them again. GELU counts 0.8 times, the norm 0.7, addition 0.45.
    tensor, rows = 4 * 8192 * 512, 2 * 4 * 8192
    by_hand = 0.8 * 5 * tensor + 0.7 * (5 * tensor + 2 * rows) + 0.45 * 6 * tensor
    assert probes.layer.moved_bytes == pytest.approx(by_hand, abs=8)  # whole bytes of each
    assert probes.product.flops == 2 * 2048 * 512 * 512
    assert probes.product.moved_bytes == pytest.approx(0.7 * 4 * (2 * 2048 * 512 + 512 * 512), abs=1)
    # one second for the product's FLOPs beside that for its bytes, at 100 MB/s; the layers have bytes, and launches of 2 ms
    probes.best_s = [
        1.0 + probes.product.moved_bytes / 1e8 + 0.002,
        probes.layer.moved_bytes / 1e8 + 6 * 0.002,
        probes.tiny.moved_bytes / 1e8 + 46 * 0.002,
    ]
    assert probes.speeds() == pytest.approx((probes.product.flops, 1e8, 0.002))
