"""`raafl serve` and `raafl join` over a slow link on which a client's next task travels beside its update."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

import pytest

from benchmarks.cut_link import Relay
from raafl.local.train import LocalTrainer
from raafl.runtime.replay import replay
from raafl.transport import frames
from raafl.transport.tcp import stream
from tests.distributed.test_come_and_go import settled, wait_for
from tests.distributed.test_cut_links import NUM_BYTES, RATE, begun, fleet_over, served_while

pytestmark = pytest.mark.timeout(120)
OVERLAP = ("--algorithm=fed_async", "--overlap=true")
STREAMING = (
    "--algorithm=streaming_diloco",
    "--algorithm.fragments=1",
    "--algorithm.sync_delay=2",
    "--train.num_epochs=null",
    "--train.num_steps=2",
    "--overlap=true",
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(frames, "PIECE_BYTES", 8192)
    monkeypatch.setattr(stream, "UNSENT_BYTES", 8192)


def in_flight(run, event):
    """Return the number of tasks without an answer at a journal row of this kind, by the rows before it."""
    out = set()
    for row in run.events():
        if row["event"] == event:
            return len(out)
        if row["event"] == "assigned":
            out.add(row["id"])
        if row["event"] == "arrived":
            out.discard(row["assignment"])
    raise AssertionError(event)


def cut_then_killed(fleet, relay, free_port):
    """The run of a client whose link is cut in its first update, and who is killed in its second, and of one who follows it."""
    first, second = fleet.joiners

    def harm():
        begun(relay)
        relay.cut()
        wait_for(lambda: relay.up_bytes > 1.3 * NUM_BYTES, 100.0)  # the second update is on its way
        first.send(signal.SIGKILL)
        second.begin()

    run = served_while(fleet, free_port, harm)
    assert [first.exit_code(), second.exit_code()] == [-signal.SIGKILL, 0], second.words()
    return run


def test_a_link_is_cut_and_a_client_killed_with_two_tasks_in_flight(tmp_path, free_port):
    """The cut loses nothing. The client's death loses both tasks, at once; the one that follows it ends the run."""
    relay = Relay(free_port, RATE, None)
    with fleet_over(relay, tmp_path, free_port, clients=2, options=[*OVERLAP, "--max_updates=3"]) as fleet, relay:
        run = cut_then_killed(fleet, relay, free_port)
    assert run.events("back") and in_flight(run, "away") == 2
    outcomes = [(row["assignment"], row["outcome"]) for row in run.rows()]
    assert outcomes[0] == ("1", "merged") and {number for number, _ in outcomes[1:3]} == {"2", "3"}
    assert {outcome.partition(":")[0] for _, outcome in outcomes[1:3]} == {"lost"}
    assert [outcome for _, outcome in outcomes[3:5]] == ["merged", "merged"]
    settled(run)
    assert replay(run.folder)["equal"] is True


@pytest.mark.long("test_a_link_is_cut_and_a_client_killed_with_two_tasks_in_flight")
def test_a_server_killed_with_two_tasks_in_flight_resumes_without_them(tmp_path, free_port):
    relay = Relay(free_port, RATE, None)
    servers = [lambda experiment: experiment, lambda experiment: replace(experiment, resume=str(tmp_path / "run"))]
    options = [*OVERLAP, "--max_updates=4"]
    with fleet_over(relay, tmp_path, free_port, servers=servers, options=options) as fleet, relay:
        first, second = fleet.servers
        first.begin()
        wait_for(lambda: (tmp_path / "run" / "checkpoints").exists() and relay.up_bytes > NUM_BYTES * 1.5, 100.0)
        first.send(signal.SIGKILL)
        assert first.exit_code() == -signal.SIGKILL
        second.begin()
        assert second.exit_code(100) == 0, second.words()
        assert fleet.joiners[0].exit_code() == 0, fleet.joiners[0].words()
    run = fleet.finished(tmp_path / "run")
    assert run.summary["finished"] == "max_updates" and run.summary["updates_lost_by_reason"] == {"restart": 2}
    settled(run)
    assert replay(run.folder)["equal"] is True


@pytest.mark.long(
    "tests/conformance/test_overlapped_two_clocks.py::"
    "test_real_clients_that_begin_tasks_before_they_arrive_leave_the_simulated_model"
)
def test_a_link_is_cut_and_a_client_killed_while_it_is_ahead_of_its_task(tmp_path, free_port):
    """The cut loses nothing. After its death the next client gets the whole model, and begins nothing before."""
    relay = Relay(free_port, RATE, None)
    with fleet_over(relay, tmp_path, free_port, clients=2, options=[*STREAMING, "--max_updates=3"]) as fleet, relay:
        run = cut_then_killed(fleet, relay, free_port)
    assert run.events("back") and in_flight(run, "away") == 1
    assert [(row["assignment"], row["outcome"].partition(":")[0]) for row in run.rows()] == [
        ("1", "merged"),
        ("2", "lost"),
        ("3", "merged"),
        ("4", "merged"),
    ]
    settled(run)
    assert replay(run.folder)["equal"] is True


def updates_per_s(tmp_path, port, overlap, method):
    """Let a client do six tasks whose training waits a second, and whose update takes a second to send."""
    tmp_path.mkdir()
    relay, options = Relay(port, RATE / 6, None), [*method, "--model.hidden=[3333]", "--max_updates=6"]
    with fleet_over(relay, tmp_path, port, options=[*options, f"--overlap={overlap}"]) as fleet, relay:
        run = fleet.serve(listener=f"127.0.0.1:{port}")
    at_s = [row["time_s"] for row in run.events("arrived")]
    return (len(at_s) - 1) / (at_s[-1] - at_s[0])


@pytest.mark.long(
    "tests/runtime/test_overlapped_simulation.py::test_a_device_that_is_slower_than_its_uplink_never_waits"
)
@pytest.mark.parametrize("method", [OVERLAP, STREAMING], ids=["fed_async", "streaming_diloco"])
def test_a_client_whose_uplink_is_as_slow_as_its_device_answers_more_often(tmp_path, free_port, monkeypatch, method):
    """Two seconds a task become one: here, with what both ways have in common, at least 1.3 times as many updates."""
    run = LocalTrainer.run

    def slow(*args, **more):
        time.sleep(1.0)
        return run(*args, **more)

    monkeypatch.setattr(LocalTrainer, "run", slow)
    off, on = (updates_per_s(tmp_path / overlap, free_port, overlap, method) for overlap in ("false", "true"))
    print(f"{off:.2f} updates/s one after the other, {on:.2f} overlapped: {on / off:.2f} times as many")
    assert on > 1.3 * off
