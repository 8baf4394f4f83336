from __future__ import annotations

import time
from dataclasses import replace

import torch

from benchmarks import stages


def test_a_stage_is_charged_without_those_that_it_calls(monkeypatch):
    class Outer:
        def call(self, inner):
            busy(0.02)
            inner.call()

    class Inner:
        def call(self):
            busy(0.04)

    monkeypatch.setattr(stages, "STAGES", {"outer": [(Outer, "call")], "inner": [(Inner, "call")]})
    plain = Outer.call
    with stages.clocks() as spent:
        Outer().call(Inner())
    assert Outer.call is plain
    assert 0.02 <= spent["outer"] < 0.04 <= spent["inner"] < 0.06


def busy(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_stages_add_up_to_the_run(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda num: None)
    monkeypatch.setattr(stages, "SMALL", replace(stages.SMALL, clients=8, cohort=4))
    rows = stages.rows(rounds=2, repeats=1)
    runs = {row["run"] for row in rows}
    assert len(runs) == 4
    for run in runs:
        us = {row["stage"]: row["us"] for row in rows if row["run"] == run}
        assert set(us) == {*stages.STAGES, "whole", "bare"}
        assert us["training steps"] > 0 and us["journal"] > 0 and us["coordinator"] > 0
        # clocks cost, too, and a busy machine makes one of the two runs slower
        assert sum(us[stage] for stage in stages.STAGES) < 4 * us["whole"]
