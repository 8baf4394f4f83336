from __future__ import annotations

import torch

from benchmarks import robustness
from raafl.local.train import LocalTrainer
from tests.tools import filled, line_state


def test_attacks_by_hand():
    state = line_state()
    own, honest = filled(state, 2.0), [filled(state, 1.0), filled(state, 4.0)]
    robustness.opposite(own, honest)
    assert own.buffers[torch.float32].unique().tolist() == [-2.5]
    robustness.large(own, honest)
    assert own.buffers[torch.float32].unique().tolist() == [-250.0]


def test_a_row_for_each_partition_attack_and_guard(monkeypatch):
    monkeypatch.setattr(robustness, "PARTITIONS", {"iid": robustness.Iid()})
    train = LocalTrainer.run
    rows = robustness.rows(seeds=1, rounds=1, guards=("none", "centred_clip"))
    assert LocalTrainer.run is train
    assert [(row["attack"], row["guard"]) for row in rows] == [
        (attack, guard) for attack in robustness.ATTACKS for guard in ("none", "centred_clip")
    ]
    assert all(0 <= row["least"] <= row["accuracy"] <= row["most"] <= 1 for row in rows)
    honest, opposite = (row["accuracy"] for row in rows if row["guard"] == "none" and "large" not in row["attack"])
    assert honest > opposite
