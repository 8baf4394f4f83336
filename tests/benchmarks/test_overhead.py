from __future__ import annotations

import pytest
import torch

from benchmarks import overhead
from model_zoo import MLP

TINY = overhead.Workload("tiny", lambda: MLP(6, (5,), 10), (6,), 4, 2, 8, 4, 2, rounds=5)  # 10 trainings: one buffer


@pytest.mark.quick_cases("1")
@pytest.mark.parametrize("processes", [1, 2])
def test_rows_compare_each_algorithm_with_the_bare_loop(processes, monkeypatch):
    monkeypatch.setattr(overhead, "REPEATS", 1)
    monkeypatch.setattr(torch, "set_num_threads", lambda num: None)
    data = overhead.RandomData(TINY)
    rows = overhead.measure(TINY, data, overhead.Bare(TINY, data), processes)
    assert [row["algorithm"] for row in rows] == ["fed_avg", "fed_async", "fed_buff"]
    for row in rows:
        assert row["processes"] == processes and row["per_s"] > 0
        assert row["ratio"] == pytest.approx(row["per_s"] / row["bare_per_s"])


def test_the_bare_loop_trains():
    data = overhead.RandomData(TINY)
    bare = overhead.Bare(TINY, data)
    before = bare.theta.clone()
    assert bare.run() > 0
    assert not torch.equal(bare.theta, before) and torch.isfinite(bare.theta).all()
