from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import cohorts
from benchmarks.overhead import Bare, RandomData, Workload

TINY = Workload("tiny", cohorts.mlp(6, 5, 10), (6,), 4, 2, 8, 4, 2, rounds=4)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(cohorts, "REPEATS", 1)
    monkeypatch.setattr(cohorts, "RUN_REPEATS", 1)
    monkeypatch.setattr(cohorts, "SIZES", (2, 3))
    monkeypatch.setattr(torch, "set_num_threads", lambda num: None)


def test_cohorts_are_compared_with_the_loop():
    rows = cohorts.task_rows(TINY)
    assert [row["at_work"] for row in rows] == [2, 3] and all(row["equal"] for row in rows)
    assert all(row["ratio"] == pytest.approx(row["per_s"] / row["bare_per_s"]) for row in rows)


@pytest.mark.quick_cases(*(work.name for work in cohorts.TASKS if work.name != "cnn of LEAF's size"))
@pytest.mark.parametrize("work", cohorts.TASKS, ids=lambda work: work.name)
def test_every_workload_is_trained_as_a_cohort_and_by_the_bare_loop(work, monkeypatch):
    monkeypatch.setattr(cohorts, "SIZES", (2,))
    (row,) = cohorts.task_rows(replace(work, samples=4, batch_size=4, num_steps=1))
    assert row["equal"] and row["peak_bytes"] >= 0 and (row["device"], row["processes"]) == ("cpu", 1)
    work = replace(work, clients=2, cohort=2, samples=4, batch_size=2, num_steps=1, rounds=1)
    assert Bare(work, RandomData(work)).run() > 0


def test_whole_runs_are_compared_with_the_bare_loop_and_each_other():
    one, auto = cohorts.run_rows(TINY, {"fed_avg": cohorts.algorithms(2)["fed_avg"]})
    assert (one["batch_clients"], auto["batch_clients"]) == (1, "auto") and one["over_loop"] == 1.0
    assert auto["equal"] and auto["per_s"] > 0 and auto["in_vain"] == 0
