from __future__ import annotations

import torch

from benchmarks import robustness
from tests.helpers.coordinators import filled, line_state


def test_attacks_by_hand():
    state = line_state()
    own, honest = filled(state, 2.0), [filled(state, 1.0), filled(state, 4.0)]
    robustness.opposite(own, honest)
    assert own.buffers[torch.float32].unique().tolist() == [-2.5]
    robustness.large(own, honest)
    assert own.buffers[torch.float32].unique().tolist() == [-250.0]


def test_a_round_of_which_three_of_eight_send_the_opposite():
    """Five honest updates d on average and three of -d: a quarter of the way, where shares are alike."""
    rows = [robustness.row("iid", attack, "none", seeds=1, rounds=2) for attack in ("honest", "opposite, 3 of 8")]
    assert [(row["guard"], row["seeds"]) for row in rows] == [("none", 1)] * 2
    assert all(0 <= row["least"] == row["accuracy"] == row["most"] <= 1 for row in rows)
    assert rows[0]["accuracy"] > rows[1]["accuracy"]
