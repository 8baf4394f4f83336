"""The combinations of shipped configs that no paper has, on both clocks: each part does its work, and the models are equal."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from raafl.algorithms import fed_buff, fed_raa, timely_fl
from raafl.core.algorithm import Training
from raafl.parts import RateSelect, WindowPieces
from raafl.submodel import FULL, Spec
from tests.conformance.clocks import on_both_clocks
from tests.helpers.small_runs import SPEEDS, Finished, experiment, unequal

pytestmark = pytest.mark.timeout(120)


def merged(run: Finished) -> list[dict[str, Any]]:
    """The assignments that were merged, each with its spec and its row of the table."""
    asked = {row["id"]: {**row, "spec": Spec.from_json(row["spec"])} for row in run.events("assigned")}
    return [{**asked[int(row["assignment"])], "row": row} for row in run.rows() if row["outcome"] == "merged"]


def test_rolling_windows_in_a_buffer(tmp_path):
    """configs/fed-buff-rolling.yaml: deltas of windows of four widths, three in each merge."""
    rates = [1.0, 0.5, 0.25, 0.125]
    algorithm = fed_buff(buffer_size=3, submodel=RateSelect("rolling", rates, "width"))
    base = experiment(tmp_path / "simulated", algorithm, max_updates=15, emulate=False)
    simulated, real = on_both_clocks(base, tmp_path / "real")
    assert real.summary["final"] == simulated.summary["final"]
    assert real.summary["versions"] == 15 / 3 and real.summary["staleness"]["max"] > 0
    done = merged(real)
    assert set(Counter(int(one["row"]["merged_version"]) for one in done).values()) == {3}
    starts = set()
    for one in done:
        if one["client"] == 1:
            assert one["spec"] == FULL
            continue
        # of 24 units so many, from as far on as the client's updates had been merged when it was asked
        mine = [int(other["row"]["merged_version"]) for other in done if other["client"] == one["client"]]
        start = sum(version <= one["version"] for version in mine)
        width = int(24 * rates[one["client"] - 1])
        assert list(one["spec"].indices("layers.1")) == list(range(start, start + width))
        starts.add(start)
    assert len(starts) > 1


@pytest.mark.long("test_rolling_windows_in_a_buffer")
def test_a_deadline_of_narrower_models(tmp_path):
    """configs/timely-fl-width.yaml: who is slower than the third of four trains as wide a model as is done by then."""
    algorithm = timely_fl(participation=0.75, adaptive=False, cut="width")
    # measured in seconds: too many for real ranks to come late
    devices = unequal([speed / 1e4 for speed in SPEEDS])
    base = experiment(tmp_path / "simulated", algorithm, devices=devices, max_updates=12, emulate=False)
    simulated, real = on_both_clocks(base, tmp_path / "real")
    assert real.summary["final"] == simulated.summary["final"]
    assert (real.summary["versions"], real.summary["staleness"]["max"]) == (3, 0)
    done = merged(real)
    assert all(one["spec"] == FULL for one in done if one["client"] < 4)
    # compute is as the number of units, but for a few FLOPs: 2 / 3 of the third client's speed are 2 / 3 of 24 units
    assert {tuple(one["spec"].indices("layers.1")) for one in done if one["client"] == 4} == {tuple(range(16))}
    # and the first, at 8 / 3 of its speed, has the time of two units of work
    assert {int(one["row"]["num_steps"]) for one in done if one["client"] == 1} == {2 * 3}


@pytest.mark.long(
    "tests/parts/select/test_window_pieces.py::test_gre_raa_spreads_merges_over_the_pieces_that_clients_manage"
)
def test_windows_of_blocks_by_gre_raa(tmp_path):
    """configs/gre-raa-windows.yaml: each client trains within its time what has been trained least, in width and depth."""
    pytest.importorskip("transformers")
    from tests.conformance.test_transformers_two_clocks import MODELS

    model, data = MODELS["ViT"]
    pieces = WindowPieces(rates=[1.0, 0.5625, 0.25], distils=False)
    algorithm = fed_raa(alpha=0.3, staleness="polynomial", rescale=False, submodel=pieces)
    base = experiment(
        tmp_path / "simulated",
        algorithm,
        model=model,
        data=data,
        max_updates=10,
        emulate=False,
        train=Training(num_epochs=None, num_steps=2),
    )
    simulated, real = on_both_clocks(base, tmp_path / "real")
    assert real.summary["final"] == simulated.summary["final"]
    assert real.summary["versions"] == 10 and real.summary["staleness"]["max"] > 0
    # of two blocks: 1 whole; of 3/4 of the width, 2 slices (which overlap); of 1/2, 2 for each block
    done = merged(real)
    regions = {one["region"] for one in done}
    assert len(regions) > 4 and regions <= set(range(1, 1 + 1 + 2 + 2 * 2))
    stack = "model.vit.layers"
    depths = {len(dict(one["spec"].blocks).get(stack, range(2))) for one in done}
    widths = {len(one["spec"].indices(f"{stack}.0.ffn") or range(64)) for one in done}
    assert depths == {1, 2} and {48, 32} <= widths <= {64, 48, 32}
    trained = {name for one in done for name in one["spec"].trained or () if name.startswith(stack)}
    assert trained == {f"{stack}.0", f"{stack}.1"}
