from __future__ import annotations

import json

import pytest

from benchmarks import scale
from tests.helpers.forked_command import in_fork


def test_rows_of_small_runs(tmp_path):
    """Each in a process of its own, as the command has them: `make bench` runs that."""
    cases = [
        scale.Case("fed_buff", None, clients=20, updates=60),
        scale.Case("fed_raa", 5, clients=30, updates=90, come_and_go=True),
    ]
    buff, raa = (in_fork(scale.measure, case, tmp_path / case.algorithm) for case in cases)
    assert (buff["updates"], buff["events"], raa["updates"]) == (60, 60, 90)
    assert raa["events"] > 90  # clients came and went
    for row in (buff, raa):
        assert row["us_per_event_first"] > 0 and row["training_us"] > 0
        assert row["ratio"] == pytest.approx(row["us_per_event_last"] / row["us_per_event_first"])
        assert 0 <= row["beside_data_bytes"] < row["peak_bytes"]
        assert row["joined_s"] < row["run_s"] and row["build_s"] > 0 and row["bytes_per_client"] >= 0


def test_each_client_is_there_for_three_quarters_of_its_time():
    case = scale.Case("fed_raa", 5, come_and_go=True)
    for device in scale.make_devices(case):
        there = [device.profile.available(second + 0.5) for second in range(40)]
        assert there.count(True) == 30


def test_events_are_counted_from_one_arrival_to_the_next(tmp_path):
    kinds = ["joined", "joined", "assigned", "arrived", "lost", "assigned", "joined", "arrived", "timer", "arrived"]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps({"event": kind}) + "\n" for kind in kinds))
    assert scale.events_between(tmp_path) == [3, 2, 1]


def test_the_cost_of_an_event_by_hand():
    watch = scale.Stopwatch(None)
    # trainings end at 1, 3, 6, 10 and 15 s, the next begins 1, 2, 3 and 4 s later
    watch.began = [(0.0, 0.0), (2.0, 0.0), (5.0, 0.0), (9.0, 0.0), (14.0, 0.0)]
    watch.ended = [(1.0, 0.0), (3.0, 0.0), (6.0, 0.0), (10.0, 0.0), (15.0, 0.0)]
    first, last = scale.edges_us(watch, 0, [1, 2, 1, 1, 1], edge=2, window=2)
    assert (first, last) == (1e6 * 3 / 3, 1e6 * 7 / 2)
