"""Simulated runs in which a client's downlink, device and uplink work side by side."""

from __future__ import annotations

import pytest

from raafl.algorithms import fed_async, fed_avg, fed_buff
from raafl.core.algorithm import Training
from raafl.core.options import Compress
from raafl.devices.profiles import Device
from raafl.errors import BadInput
from raafl.runtime.setup import build
from tests.helpers.crash import crash
from tests.helpers.small_runs import COMING_AND_GOING, equal_replay, experiment, finish, unequal

pytestmark = pytest.mark.timeout(120)

NUM_BYTES = 4 * (64 * 24 + 24 + 24 * 10 + 10)
FLOPS = 10 * 64 * (4 * 64 * 24 + 6 * 24 * 10)  # of ten steps on batches of 64, see tests/runtime/test_simulation.py
DOWN_S, COMPUTE_S = 0.1, 0.4


def one_client(output, up_s, **fields):
    """One client that receives in 0.1 s, trains for 0.4 s and sends in ``up_s``."""
    device = Device(
        name="d", flops_per_s=FLOPS / COMPUTE_S, down_bytes_per_s=NUM_BYTES / DOWN_S, up_bytes_per_s=NUM_BYTES / up_s
    )
    settings = {"clients": 1, "devices": [device], "train": Training(None, 10, 64), "max_updates": 4, "overlap": True}
    return experiment(output, fed_async(), **settings | fields)


def column(run, name):
    return [float(row[name]) for row in run.rows() if row["outcome"] == "merged"]


def test_a_device_that_is_slower_than_its_uplink_never_waits(tmp_path):
    """Down 0.1, train 0.4, up 0.3: a task begins each 0.5 s, and its update travels while the next is trained."""
    made = one_client(tmp_path / "r", 0.3)
    run = finish(made)
    assert column(run, "assigned_s") == pytest.approx([0.0, 0.5, 1.0, 1.5])
    assert column(run, "arrived_s") == pytest.approx([0.8, 1.3, 1.8, 2.3])
    # each is assigned 0.3 s before its predecessor is merged, and so one merge late
    assert column(run, "staleness") == [0, 1, 1, 1]
    assert [row["time_s"] for row in run.events("sending")] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    # until 2.3 s the client receives and trains all but the last 0.3 s: the fifth task began at 2.0 s
    assert run.summary["utilisation"] == pytest.approx(1.0)
    assert equal_replay(made, run)


def test_an_uplink_that_is_slower_than_its_device_never_waits(tmp_path):
    """Down 0.1, train 0.4, up 0.8: the uplink is free at 1.3, 2.1, ...; a trained update waits for it, and so does its client."""
    run = finish(one_client(tmp_path / "r", 0.8))
    assert column(run, "arrived_s") == pytest.approx([1.3, 2.1, 2.9, 3.7])
    # the second is trained at 1.0 and waits until 1.3; only then is the third asked for
    assert column(run, "assigned_s") == pytest.approx([0.0, 0.5, 1.3, 2.1])
    assert column(run, "train_s") == pytest.approx([1.3, 1.6, 1.6, 1.6])


def test_without_overlap_the_three_follow_each_other(tmp_path):
    run = finish(one_client(tmp_path / "r", 0.3, overlap=False))
    assert column(run, "arrived_s") == pytest.approx([0.8, 1.6, 2.4, 3.2])
    assert run.events("sending") == []


def test_a_link_that_changes_is_that_of_the_upload_and_not_of_the_wait(tmp_path):
    """Up 0.8 s at full rate; from 1.3 s on the link has half its rate, when the second upload begins (and the third download)."""
    made = one_client(tmp_path / "r", 0.8, max_updates=2)
    made.devices[0] = Device(
        name="d",
        flops_per_s=FLOPS / COMPUTE_S,
        down_bytes_per_s=NUM_BYTES / DOWN_S,
        up_bytes_per_s=NUM_BYTES / 0.8,
        link_changes=((1.3, 0.5),),
    )
    assert column(finish(made), "arrived_s") == pytest.approx([1.3, 1.3 + 1.6])


def test_a_client_that_leaves_loses_both_tasks_and_the_run_replays(tmp_path):
    made = experiment(tmp_path / "r", fed_buff(buffer_size=2), devices=COMING_AND_GOING, max_updates=30, overlap=True)
    run = finish(made)
    outcomes = {}
    for row in run.rows():
        outcomes.setdefault(row["assignment"], []).append(row["outcome"])
    assert all(len(settled) == 1 for settled in outcomes.values())
    assert outcomes.keys() == {str(row["id"]) for row in run.events("assigned")}
    lost = [row for row in run.rows() if row["outcome"] == "lost:unavailable"]
    instants = [(row["client"], row["arrived_s"] or row["merged_version"]) for row in lost]
    assert len(set(instants)) < len(instants)  # two at once
    assert equal_replay(made, run)


@pytest.mark.parametrize("compress", [Compress(), Compress(down="top_k", up="top_k")], ids=["plain", "top_k"])
def test_a_run_that_crashes_with_two_tasks_in_flight_goes_on_to_the_same_bits(tmp_path, monkeypatch, compress):
    def made(name, **fields):
        devices = unequal(up_bytes_per_s=1e5)
        settings = {"devices": devices, "overlap": True, "compress": compress, "checkpoint_every": 1}
        return experiment(tmp_path / name, fed_async(), **settings | fields)

    whole = finish(made("whole"))
    assert max(column(whole, "staleness")) > 3  # more than one task for each of four clients
    with crash(monkeypatch, 6):
        finish(made("cut"))
    resumed = finish(made("cut", resume=str(tmp_path / "cut")))
    assert resumed.digest == whole.digest
    assert resumed.rows() == whole.rows()
    assert equal_replay(made("whole"), whole)


def test_what_does_not_go_together_is_named_before_the_run(tmp_path):
    with pytest.raises(BadInput, match="overlap is true, but a client of fed_avg waits for the merge"):
        experiment(tmp_path / "r", fed_avg(), overlap=True).check()
    with pytest.raises(BadInput, match="set emulate to false"):
        build(experiment(tmp_path / "r", fed_async(), overlap=True), pace=True)
