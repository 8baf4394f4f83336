"""Simulated clients that make the first steps of a task before it arrives: Streaming DiLoCo with `overlap`."""

from __future__ import annotations

import pytest

from raafl.algorithms import diloco, streaming_diloco
from raafl.core.algorithm import Training
from raafl.devices.profiles import Device
from raafl.errors import BadInput
from tests.helpers.crash import crash
from tests.helpers.small_runs import COMING_AND_GOING, SPEEDS, equal_replay, experiment, finish, unequal

pytestmark = pytest.mark.timeout(120)

NUM_BYTES = 4 * (64 * 24 + 24 + 24 * 10 + 10)
FLOPS = 10 * 64 * (4 * 64 * 24 + 6 * 24 * 10)  # of ten steps on batches of 64, see tests/runtime/test_simulation.py


def one_client(output, sync_delay, transfer_s=0.2, **fields):
    """A client that trains ten steps in 1 s; the whole model takes ``transfer_s`` up, and as long down."""
    rate = NUM_BYTES / transfer_s
    device = Device(name="d", flops_per_s=FLOPS, down_bytes_per_s=rate, up_bytes_per_s=rate)
    settings = {"clients": 1, "devices": [device], "train": Training(None, 10, 64), "max_updates": 4}
    settings["overlap"] = sync_delay > 0
    return experiment(output, streaming_diloco(1, sync_delay=sync_delay), **settings | fields)


def column(run, name):
    return [float(row[name]) for row in run.rows() if row["outcome"] == "merged"]


@pytest.mark.parametrize(
    ("sync_delay", "transfer_s", "period_s"),
    [
        (0, 0.2, 0.2 + 1.0 + 0.2),  # without overlap
        (2, 0.2, 0.4 + 0.8),  # the 0.4 s of both transfers take longer than two steps; eight more follow
        (4, 0.2, 1.0),  # as long as four steps
        (10, 0.2, 1.0),
        (10, 0.7, 1.4),  # longer than a whole task
    ],
)
def test_a_period_is_the_longer_of_tau_steps_and_both_transfers_and_then_the_other_steps(
    tmp_path, sync_delay, transfer_s, period_s
):
    made = one_client(tmp_path / "r", sync_delay, transfer_s)
    run = finish(made)
    first = transfer_s + 1.0 + transfer_s
    assert column(run, "arrived_s") == pytest.approx([first + i * period_s for i in range(4)])
    assert equal_replay(made, run) and run.events("sending") == []


def test_in_rounds_a_fast_client_trains_on_until_the_slow_one_has_reported(tmp_path):
    """Tasks of 1 and 2 s, transfers of 0.2 s: the slow client steps without a pause, the fast one waits for its fragment."""
    rate = NUM_BYTES / 0.2
    devices = [Device(name=f"d{i}", flops_per_s=FLOPS / i, down_bytes_per_s=rate, up_bytes_per_s=rate) for i in (1, 2)]
    run = finish(one_client(tmp_path / "r", 10, clients=2, devices=devices, max_updates=6))
    rows = sorted(run.rows(), key=lambda row: int(row["assignment"]))
    arrived = [[float(row["arrived_s"]) for row in rows if row["client"] == client] for client in ("1", "2")]
    # its fragment comes 0.2 s after the slow client's update has arrived; its own is trained by then, and sent at once
    assert arrived[0] == pytest.approx([1.4, 2.4 + 0.2 + 0.2, 4.4 + 0.2 + 0.2])
    assert arrived[1] == pytest.approx([2.4, 4.4, 6.4])


@pytest.mark.parametrize("trigger", ["all", "each"])
def test_on_a_link_without_delay_nothing_changes_but_the_setting(tmp_path, trigger):
    def made(overlap):
        algorithm = streaming_diloco(2, sync_delay=2, trigger=trigger)
        devices = [Device(name=f"d{i}", flops_per_s=speed) for i, speed in enumerate(SPEEDS)]
        return finish(experiment(tmp_path / str(overlap), algorithm, overlap=overlap, devices=devices))

    on, off = made(True), made(False)
    assert on.digest == off.digest
    if trigger == "each":  # in rounds a client steps on while it waits for the others
        assert column(on, "arrived_s") == pytest.approx(column(off, "arrived_s"))


def test_in_rounds_the_model_is_the_same_at_any_speed_of_the_links(tmp_path):
    def made(overlap):
        settings = {"overlap": overlap, "devices": unequal(up_bytes_per_s=2e4)}
        return finish(experiment(tmp_path / str(overlap), streaming_diloco(2, sync_delay=3), **settings))

    on, off = made(True), made(False)
    assert on.digest == off.digest and on.summary["time_s"] < off.summary["time_s"]


def test_clients_that_come_and_go_begin_anew_and_the_run_replays(tmp_path):
    algorithm = streaming_diloco(2, sync_delay=2, trigger="each")
    made = experiment(tmp_path / "r", algorithm, devices=COMING_AND_GOING, max_updates=30, overlap=True)
    run = finish(made)
    assert run.summary["updates_lost"] > 0
    assert equal_replay(made, run)


def test_a_run_that_crashes_while_clients_are_ahead_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    def made(name, **fields):
        settings = {"devices": unequal(up_bytes_per_s=1e5), "overlap": True, "checkpoint_every": 1}
        return experiment(tmp_path / name, streaming_diloco(2, sync_delay=2, trigger="each"), **settings | fields)

    whole = finish(made("whole"))
    with crash(monkeypatch, 6):
        finish(made("cut"))
    resumed = finish(made("cut", resume=str(tmp_path / "cut")))
    assert resumed.digest == whole.digest and resumed.rows() == whole.rows()


def test_a_schedule_by_versions_is_foreseen_in_rounds(tmp_path):
    """Each task's rate is that of the next version, which the client has been told before."""
    train = Training(None, 10, 64, lr_schedule="linear", lr_versions=10)
    run = finish(one_client(tmp_path / "r", 10, train=train))
    assert column(run, "arrived_s") == pytest.approx([1.4, 2.4, 3.4, 4.4])


def test_a_method_whose_steps_need_what_they_receive_is_named_before_the_run(tmp_path):
    with pytest.raises(BadInput, match="a client of streaming_diloco makes no step before it has what it receives"):
        experiment(tmp_path / "r", streaming_diloco(sync_delay=0), overlap=True).check()
    with pytest.raises(BadInput, match="a client of diloco waits for the merge"):
        experiment(tmp_path / "r", diloco(), overlap=True).check()
