"""`raafl serve` and `raafl join` over a slow link that is cut: updates get over, tasks are settled once, runs replay."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace

import pytest

from benchmarks.cut_link import Relay
from raafl.runtime.replay import replay
from raafl.transport import frames
from raafl.transport.tcp import stream
from tests.distributed.test_come_and_go import WAITS, parsed, settled, wait_for
from tests.distributed.test_secure_sites import OPTIONS, at
from tests.helpers.joining_clients import remote
from tests.helpers.small_runs import finish

pytestmark = pytest.mark.timeout(120)
NUM_BYTES = 300 * 20_000 + 40  # of the model below: 75 float32 to a hidden unit, and 10 biases
MODEL = (
    "--model.hidden=[20000]",
    "--clients=1",
    "--devices=null",
    "--algorithm=fed_avg",
    "--eval_every=100",
    "--checkpoint_every=1",
    "--payload_memory_bytes=1000000",  # so that the update lies in a file
)
PATIENT = replace(WAITS, resume_s=20.0)
RATE = 6_000_000.0  # an update takes a second


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Scale what is under way at a cut like the update: 6 MB here for 758 MB."""
    monkeypatch.setattr(frames, "PIECE_BYTES", 8192)
    monkeypatch.setattr(stream, "UNSENT_BYTES", 8192)


def fleet_over(relay, tmp_path, port, clients=1, servers=(), options=()):
    experiment, config = parsed(tmp_path, *MODEL, *options, waits=PATIENT)
    joiners = [(1, {"address": f"127.0.0.1:{relay.port}"}) for _ in range(clients)]
    servers = [change(experiment) for change in servers]
    return remote(experiment, config, tmp_path, joiners, held_back=range(1, clients), servers=servers, port=port)


def cuts(relay, *reached):
    """Return a function that cuts the link as soon as each of these is true, in turn."""

    def cut():
        for is_reached in reached:
            wait_for(is_reached, 100.0)
            relay.cut()

    return cut


def served_while(fleet, port, action):
    """Serve to the run's end while ``action`` goes on in a thread; return the run."""
    thread = threading.Thread(target=action)
    thread.start()
    run = fleet.serve(listener=f"127.0.0.1:{port}")
    thread.join()
    return run


def test_an_update_gets_over_a_link_that_is_cut_while_it_is_sent(tmp_path, free_port):
    """Cut at a third and at two; at most 5 % crosses the link twice. The run replays: its journal's events have no cut."""
    relay = Relay(free_port, RATE, None)
    parts = [lambda part=part: relay.up_bytes > part * NUM_BYTES for part in (1 / 3, 2 / 3)]
    with fleet_over(relay, tmp_path, free_port, options=["--max_updates=1"]) as fleet, relay:
        run = served_while(fleet, free_port, cuts(relay, *parts))
        assert fleet.joiners[0].exit_code() == 0, fleet.joiners[0].words()
    chunks = [row["chunks"] for row in run.events("back")]
    assert len(run.events("away")) == len(chunks) == 2 and 0 < chunks[0] < chunks[1] and not run.events("lost")
    (row,) = run.rows()
    assert (row["outcome"], row["incarnation"], run.summary["connections_refused"]) == ("merged", "0", {})
    assert NUM_BYTES < int(row["bytes_up"]) < NUM_BYTES * 1.05
    assert relay.up_bytes < NUM_BYTES * 1.05
    assert replay(run.folder)["equal"] is True


def test_a_question_and_its_reply_go_on_where_they_were_cut(tmp_path, free_port):
    """SplitFed: the activations of a batch go up, their gradient comes down; both are 256 kB, the client's half is 520 kB."""
    batch, half = 32 * 2000 * 4, 65 * 2000 * 4
    relay = Relay(free_port, 5e5, None, down_bytes_per_s=5e5)  # half a second each
    options = ["--model.hidden=[2000]", "--algorithm=split_fed", "--algorithm.client_layers=1", "--train.num_steps=3"]
    with fleet_over(relay, tmp_path, free_port, options=[*options, "--max_updates=1"]) as fleet, relay:
        in_question = lambda: relay.up_bytes > batch // 2  # noqa: E731
        in_reply = lambda: relay.down_bytes > half + batch + batch // 2  # noqa: E731
        run = served_while(fleet, free_port, cuts(relay, in_question, in_reply))
        assert fleet.joiners[0].exit_code() == 0, fleet.joiners[0].words()
    chunks = [row["chunks"] for row in run.events("back")]
    assert len(chunks) == 2 and 0 < chunks[0] < batch // 8192 and not run.events("lost")
    assert [row["outcome"] for row in run.rows()] == ["merged"]
    assert relay.up_bytes < (3 * batch + half) * 1.2 and relay.down_bytes < (3 * batch + half) * 1.2
    assert replay(run.folder)["equal"] is True


def test_a_masked_update_goes_on_where_it_was_cut(tmp_path, free_port):
    """The sum of three sites, one behind the link, is that of a simulation."""
    relay = Relay(free_port, 1e6, None)
    options = (*OPTIONS, "--model.hidden=[4000]", "--max_updates=3", "--payload_memory_bytes=100000")
    experiment, config = parsed(tmp_path, *options, second_s=0.02, waits=PATIENT)
    clients = [(1, at("north", address=f"127.0.0.1:{relay.port}")), (2, at("south")), (3, at("east"))]
    with remote(experiment, config, tmp_path, clients, port=free_port) as fleet, relay:
        parts = [lambda part=part: relay.up_bytes > part for part in (400_000, 800_000)]
        run = served_while(fleet, free_port, cuts(relay, *parts))
        assert [joiner.exit_code() for joiner in fleet.joiners] == [0, 0, 0], fleet.joiners[0].words()
    chunks = [row["chunks"] for row in run.events("back")]
    assert len(chunks) == 2 and 0 < chunks[0] < chunks[1] and not run.events("lost")
    assert {len(row["group"]) for row in run.events("arrived")} == {3}
    assert run.digest == finish(replace(experiment, output=str(tmp_path / "simulated"))).digest
    assert replay(run.folder)["equal"] is True


def begun(relay):
    """Wait until half of an update is on its way, after whatever went before."""
    before = relay.up_bytes
    wait_for(lambda: relay.up_bytes > before + NUM_BYTES // 4, 100.0)


@pytest.mark.long(
    "tests/runtime/server/test_wall_clock.py::test_a_client_that_is_away_at_the_end_may_come_back_and_hear_of_it"
)
def test_a_client_whose_link_is_down_at_the_end_hears_of_it_when_it_comes_back(tmp_path, free_port):
    """It would look for the server for waits.alone_s, a minute here."""
    relay = Relay(free_port, RATE, None)

    def go_down():
        begun(relay)
        relay.target = relay.port + 1 if relay.port + 1 != free_port else relay.port + 2  # where nobody listens
        relay.cut()
        time.sleep(2.5)  # until the run's time is up
        relay.target = free_port

    with fleet_over(relay, tmp_path, free_port, options=["--max_updates=null", "--max_time=2s"]) as fleet, relay:
        run = served_while(fleet, free_port, go_down)
        assert fleet.joiners[0].exit_code(10.0) == 0, fleet.joiners[0].words()
    assert run.summary["finished"] == "max_time" and [row["outcome"] for row in run.rows()][-1] == "unused"


@pytest.mark.long(
    "tests/distributed/test_come_and_go.py::test_a_client_killed_in_a_task_is_back_under_a_new_incarnation"
)
def test_a_client_killed_while_it_sends_comes_back_without_its_update(tmp_path, free_port):
    """Its update was in its memory alone: the new process joins anew, at which the old task is lost, and gets another."""
    relay = Relay(free_port, RATE, None)
    with fleet_over(relay, tmp_path, free_port, clients=2, options=["--max_updates=1"]) as fleet, relay:
        first, second = fleet.joiners

        def kill():
            begun(relay)
            first.send(signal.SIGKILL)
            second.begin()

        run = served_while(fleet, free_port, kill)
        assert [first.exit_code(), second.exit_code()] == [-signal.SIGKILL, 0], second.words()
    assert [(row["incarnation"], row["outcome"]) for row in run.rows()] == [("0", "lost:replaced"), ("1", "merged")]
    assert len(run.events("away")) == 1 and not run.events("back")
    settled(run)
    assert replay(run.folder)["equal"] is True


@pytest.mark.long(
    "tests/distributed/test_fit_local.py::test_a_run_lives_through_the_death_of_its_server_and_of_a_client"
)
def test_a_server_killed_with_half_an_update_resumes_without_it(tmp_path, free_port):
    """The half is gone with the server's memory: the session is not known to the next one, where the client joins anew."""
    relay = Relay(free_port, RATE, None)
    servers = [lambda experiment: experiment, lambda experiment: replace(experiment, resume=str(tmp_path / "run"))]
    with fleet_over(relay, tmp_path, free_port, servers=servers, options=["--max_updates=3"]) as fleet, relay:
        first, second = fleet.servers
        first.begin()
        wait_for(lambda: (tmp_path / "run" / "checkpoints").exists() and relay.up_bytes > NUM_BYTES * 1.2, 100.0)
        begun(relay)
        first.send(signal.SIGKILL)
        assert first.exit_code() == -signal.SIGKILL
        second.begin()
        assert second.exit_code(100) == 0, second.words()
        assert fleet.joiners[0].exit_code() == 0, fleet.joiners[0].words()
    run = fleet.finished(tmp_path / "run")
    assert run.summary["finished"] == "max_updates" and run.summary["updates_lost_by_reason"] == {"restart": 1}
    assert len(run.events("resumed")) == 1
    settled(run)
    assert replay(run.folder)["equal"] is True
