"""`raafl serve` and `raafl join` over a slow link on which a client's next task travels beside its update."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace

import pytest

from benchmarks.cut_link import Relay
from raafl.commands.replay import replay
from raafl.transport import frames
from raafl.transport.tcp import stream
from tests.distributed.test_come_and_go import settled, wait_for
from tests.distributed.test_cut_links import NUM_BYTES, RATE, begun, fleet_over

pytestmark = pytest.mark.timeout(120)
OVERLAP = ("--algorithm=fed_async", "--overlap=true")


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


def test_a_link_is_cut_and_a_client_killed_with_two_tasks_in_flight(tmp_path, free_port):
    """The cut loses nothing. The client's death loses both tasks, at once; the one that follows it ends the run."""
    relay = Relay(free_port, RATE, None)
    with fleet_over(relay, tmp_path, free_port, clients=2, options=[*OVERLAP, "--max_updates=3"]) as fleet, relay:
        first, second = fleet.joiners

        def harm():
            begun(relay)
            relay.cut()
            wait_for(lambda: relay.up_bytes > 1.3 * NUM_BYTES, 100.0)  # the second update is on its way
            first.send(signal.SIGKILL)
            second.begin()

        harming = threading.Thread(target=harm)
        harming.start()
        run = fleet.serve(listener=f"127.0.0.1:{free_port}")
        harming.join()
        assert [first.exit_code(), second.exit_code()] == [-signal.SIGKILL, 0], second.words()
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
