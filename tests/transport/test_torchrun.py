"""How a rank finds the others: from the environment torchrun gives, or with one line on what is wrong with it."""

from __future__ import annotations

import gc
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from raafl.errors import BadInput
from raafl.transport import ConnectOptions, PeerLost
from raafl.transport.torchrun import TorchrunTransport

pytestmark = pytest.mark.timeout(120)
HOST = "127.0.0.1"


def torchrun(monkeypatch, rank, port, world_size=5, **more):
    """The environment that torchrun gives a rank."""
    given = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": HOST, "MASTER_PORT": port, **more}
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))


RUN = ConnectOptions(4, 20.0, 20.0)


@pytest.fixture
def agent():
    """A store as torchrun's agent holds one."""
    return dist.TCPStore(HOST, 0, None, True, timeout=timedelta(seconds=20), wait_for_workers=False)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_without_torchrun_the_command_to_give_is_named(monkeypatch, name):
    torchrun(monkeypatch, 0, 1)
    monkeypatch.delenv(name)
    with pytest.raises(
        BadInput, match=rf"{name} is not set: start the command with `torchrun --nproc-per-node 5 -m raafl fit"
    ):
        TorchrunTransport.from_environment(RUN)


@pytest.mark.parametrize("world_size", [1, 4, 9])
def test_a_number_of_ranks_that_does_not_fit_names_both_remedies(monkeypatch, world_size):
    torchrun(monkeypatch, 0, 1, world_size)
    with pytest.raises(BadInput, match=rf"clients is 4.*{world_size} ranks.*start 5 ranks, or use --clients"):
        TorchrunTransport.from_environment(RUN)


def test_ranks_meet_at_the_agents_store(monkeypatch, agent):
    found = []
    for rank in (0, 3):
        torchrun(monkeypatch, rank, agent.port, TORCHELASTIC_USE_AGENT_STORE="True", LOCAL_WORLD_SIZE=5)
        found.append(TorchrunTransport.from_environment(RUN))
    server, client = found
    assert (server.client, client.client, server.local, client.local) == (0, 3, True, True)
    server.store.set("word", "passed")
    assert client.store.get("word") == b"passed"


def test_ranks_of_several_machines_are_not_taken_for_local(monkeypatch, agent):
    torchrun(monkeypatch, 3, agent.port, TORCHELASTIC_USE_AGENT_STORE="True", LOCAL_WORLD_SIZE=2)
    assert not TorchrunTransport.from_environment(RUN).local


def test_a_restarted_job_does_not_read_what_the_last_attempt_wrote(monkeypatch, agent):
    stores = []
    for attempt in (0, 1):
        more = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": attempt}
        torchrun(monkeypatch, 0, agent.port, **more)
        stores.append(TorchrunTransport.from_environment(RUN))
    stores[0].announce(None, "failed: for once")
    assert stores[0].let_go() == "failed: for once"
    assert stores[1].let_go() is None


def test_rank_0_holds_the_store_when_there_is_no_agent(monkeypatch, free_port):
    torchrun(monkeypatch, 0, free_port)
    server = TorchrunTransport.from_environment(RUN)
    torchrun(monkeypatch, 1, free_port)
    client = TorchrunTransport.from_environment(RUN)
    server.store.set("a", "b")
    assert client.store.get("a") == b"b"


def test_a_port_in_use_is_named(monkeypatch):
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        torchrun(monkeypatch, 0, port)
        with pytest.raises(BadInput, match=rf"MASTER_PORT is {port}, which is in use.*choose a free port"):
            TorchrunTransport.from_environment(RUN)


def test_a_server_that_is_not_there_is_named_at_the_deadline(monkeypatch, free_port):
    torchrun(monkeypatch, 2, free_port)
    began = time.monotonic()
    with pytest.raises(
        BadInput, match=rf"torchrun's store does not answer at {HOST}:{free_port} \(MASTER_ADDR, MASTER_PORT\)"
    ):
        TorchrunTransport.from_environment(ConnectOptions(4, 1.0))
    assert time.monotonic() - began < 10


def test_clients_find_out_why_they_were_let_go_and_a_store_that_is_gone_says_nothing(agent):
    def client(rank):
        return TorchrunTransport(
            rank, 4, dist.TCPStore(HOST, agent.port, None, False, timeout=timedelta(seconds=2)), 20.0, local=True
        )

    server, one, two = TorchrunTransport(0, 4, agent, 20.0, local=True), client(1), client(2)
    assert one.let_go() is None
    server.announce(1, "lost: timeout")
    assert (one.let_go(), two.let_go()) == ("lost: timeout", None)
    server.announce(None, "max_updates")
    assert (one.let_go(), two.let_go(), client(3).let_go()) == ("max_updates",) * 3


def test_a_store_that_has_gone_says_nothing():
    store = dist.TCPStore(HOST, 0, None, True, timeout=timedelta(seconds=5), wait_for_workers=False)
    client = TorchrunTransport(
        1, 4, dist.TCPStore(HOST, store.port, None, False, timeout=timedelta(seconds=2)), 20.0, local=True
    )
    assert client.let_go() is None
    del store
    gc.collect()
    assert client.let_go() is None


def test_a_server_stops_waiting_for_a_client_that_was_let_go(agent):
    """A rank that never comes keeps no thread until waits.join_s is over."""
    server = TorchrunTransport(0, 1, agent, 60.0, local=True)
    found = []

    def meet():
        try:
            server._meet(1, "cpu")
        except PeerLost as error:
            found.append(str(error))

    thread = threading.Thread(target=meet)
    thread.start()
    server.announce(None, "failed: client 1 ended")
    thread.join(10)
    assert not thread.is_alive() and "let go before it connected" in found[0]


def test_a_client_that_comes_after_it_was_let_go_is_not_left_waiting(agent):
    """As that of a run that lacks only its end: rank 0 is done before the others have built their models."""
    server = TorchrunTransport(0, 1, agent, 60.0, local=True)
    server.listen(lambda client, peer, connect: None, print)
    server.announce(None, "max_updates")
    with pytest.raises(PeerLost, match="let go before it connected"):
        server._meet(1, "cpu")
    store = dist.TCPStore(HOST, agent.port, None, False, timeout=timedelta(seconds=2))
    client = TorchrunTransport(1, 1, store, 60.0, local=True)
    began = time.monotonic()
    with pytest.raises(PeerLost, match="let go before it connected"):
        client.connect()
    assert client.let_go() == "max_updates" and time.monotonic() - began < 10
