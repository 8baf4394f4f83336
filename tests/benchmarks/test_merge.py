from __future__ import annotations

import pytest
import torch

from benchmarks import merge
from raafl.submodel import FULL

TINY = merge.Shape(depth=2, width=8, hidden=20, tokens=5, patch=2, classes=3)
# embed 3*2*2*8+8, cls 8, positions 40, norm 16, head 8*3+3; a block: norms 32, qkv 24*9, out 8*9, fc1 20*9, fc2 8*21
BLOCK = 32 + 216 + 72 + 180 + 168
PARAMETERS = 104 + 8 + 40 + 16 + 27 + 2 * BLOCK


@pytest.fixture(autouse=True)
def same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_vit_base_has_its_86_6_million_parameters():
    with merge.skeleton():
        submodels = merge.Submodels(merge.Shapes(merge.Shape()))
    assert submodels.layout(FULL).num_bytes == 4 * 86_567_656


def test_rows_say_what_was_folded_in_and_how_fast():
    rows = merge.rows(TINY, repeats=1)
    assert [row["merge"] for row in rows] == [case.name for case in merge.cases()]
    whole = {row["merge"]: row["bytes"] for row in rows if "fragment" not in row["merge"]}
    assert set(whole.values()) == {10 * 4 * PARAMETERS}
    # fragments of 4, 6 and 10 of 20 hidden units, in turn 4, 3 and 3 times; a unit has 8 + 1 + 8 numbers in each block
    units = 4 * 4 + 3 * 6 + 3 * 10
    fragments = {row["bytes"] for row in rows if "fragment" in row["merge"]}
    assert fragments == {4 * (10 * (PARAMETERS - 2 * 20 * 17) + 2 * units * 17)}
    for row in rows:
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
        assert row["ratio"] == pytest.approx(row["gb_per_s"] / row["copy_gb_per_s"])


def test_every_case_changes_the_model_and_keeps_it_finite():
    for case in merge.cases():
        state = merge.make_state(TINY)
        before = state.values.clone()
        merge.fold(case, state, merge.prepare(case, state, merge.Updates(state)))
        assert state.values.is_finite() and state.values.fingerprint() != before.fingerprint(), case.name
