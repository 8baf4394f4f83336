"""`raafl serve` and `raafl join` over a slow link that is cut: updates get over, tasks are settled once, runs replay."""

from __future__ import annotations

import signal
import threading

import pytest

from benchmarks.cut_link import Relay
from raafl.commands.replay import replay
from raafl.transport import frames
from raafl.transport.tcp import stream
from tests.distributed.test_come_and_go import On, arrived, parsed, settled, wait_for
from tests.helpers.joining_clients import remote

pytestmark = pytest.mark.timeout(25)
NUM_BYTES = 300 * 20_000 + 40  # of the model below: 75 float32 to a hidden unit, and 10 biases
MODEL = (
    "--model.hidden=[20000]", "--clients=1", "--devices=null", "--algorithm=fed_avg", "--eval_every=100",
    "--checkpoint_every=1",
)  # fmt: skip
RATE = 6_000_000.0  # an update takes a second


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Scale what is under way at a cut like the update: 6 MB here for 758 MB."""
    monkeypatch.setattr(frames, "PIECE_BYTES", 8192)
    monkeypatch.setattr(stream, "UNSENT_BYTES", 8192)


def fleet_over(relay, tmp_path, port, clients=1, servers=(), options=()):
    experiment, config = parsed(tmp_path, *MODEL, *options)
    joiners = [(1, {"address": f"127.0.0.1:{relay.port}"}) for _ in range(clients)]
    servers = [change(experiment) for change in servers]
    return remote(experiment, config, tmp_path, joiners, held_back=range(1, clients), servers=servers, port=port)


def test_an_update_gets_over_a_link_that_is_cut_while_it_is_sent(tmp_path, free_port):
    """Four cuts in a second; of what crosses the link at most 5 % crosses it twice. The run replays: its journal has no cut."""
    relay = Relay(free_port, RATE, 0.25)
    with fleet_over(relay, tmp_path, free_port, options=["--max_updates=1"]) as fleet, relay:
        run = fleet.serve(listener=f"127.0.0.1:{free_port}")
        assert fleet.joiners[0].exit_code() == 0, fleet.joiners[0].words()
    assert relay.num_cuts >= 2 and len(run.events("back")) >= 2
    assert run.events("back")[-1]["chunks"] > 0 and not run.events("lost")
    (row,) = run.rows()
    assert (row["outcome"], row["incarnation"], run.summary["connections_refused"]) == ("merged", "0", {})
    assert NUM_BYTES < int(row["bytes_up"]) < NUM_BYTES * 1.05
    assert relay.up_bytes < NUM_BYTES * 1.05
    assert replay(run.folder)["equal"] is True
