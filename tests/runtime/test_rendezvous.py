"""How a rank finds the others: from the environment torchrun gives, or with one line on what is wrong with it."""

from __future__ import annotations

import gc
import socket
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from raafl.config.options import Waits
from raafl.errors import BadInput
from raafl.local.train import FabricOptions
from raafl.runtime.rendezvous import Rendezvous
from tests.federation import experiment

pytestmark = pytest.mark.timeout(120)
HOST = "127.0.0.1"


def torchrun(monkeypatch, rank, port, world_size=5, **more):
    """The environment that torchrun gives a rank."""
    given = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": HOST, "MASTER_PORT": port, **more}
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))


@pytest.fixture
def run(tmp_path):
    return experiment(tmp_path / "run", waits=Waits(join_s=20.0))


@pytest.fixture
def agent():
    """A store as torchrun's agent holds one."""
    return dist.TCPStore(HOST, 0, None, True, timeout=timedelta(seconds=20), wait_for_workers=False)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_without_torchrun_the_command_to_give_is_named(monkeypatch, run, name):
    torchrun(monkeypatch, 0, 1)
    monkeypatch.delenv(name)
    with pytest.raises(BadInput, match=rf"{name} is not set: start it with `torchrun --nproc-per-node 5 -m raafl fit"):
        Rendezvous.from_environment(run)


@pytest.mark.parametrize("world_size", [1, 4, 9])
def test_a_number_of_ranks_that_does_not_fit_names_both_remedies(monkeypatch, run, world_size):
    torchrun(monkeypatch, 0, 1, world_size)
    with pytest.raises(BadInput, match=rf"clients is 4.*{world_size} ranks.*start 5 ranks, or use --clients"):
        Rendezvous.from_environment(run)


def test_ranks_meet_at_the_agents_store(monkeypatch, run, agent):
    found = []
    for rank in (0, 3):
        torchrun(monkeypatch, rank, agent.port, TORCHELASTIC_USE_AGENT_STORE="True", LOCAL_WORLD_SIZE=5)
        found.append(Rendezvous.from_environment(run))
    server, client = found
    assert (server.rank, client.rank, client.world_size, client.local) == (0, 3, 5, True)
    server.store.set("word", "passed")
    assert client.store.get("word") == b"passed"


def test_ranks_of_several_machines_are_not_taken_for_local(monkeypatch, run, agent):
    torchrun(monkeypatch, 3, agent.port, TORCHELASTIC_USE_AGENT_STORE="True", LOCAL_WORLD_SIZE=2)
    assert not Rendezvous.from_environment(run).local


def test_a_restarted_job_does_not_read_what_the_last_attempt_wrote(monkeypatch, run, agent):
    stores = []
    for attempt in (0, 1):
        more = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": attempt}
        torchrun(monkeypatch, 0, agent.port, **more)
        stores.append(Rendezvous.from_environment(run))
    stores[0].announce(None, "failed: for once")
    assert stores[0].let_go() == "failed: for once"
    assert stores[1].let_go() is None


def test_rank_0_holds_the_store_when_there_is_no_agent(monkeypatch, run, free_port):
    torchrun(monkeypatch, 0, free_port)
    server = Rendezvous.from_environment(run)
    torchrun(monkeypatch, 1, free_port)
    client = Rendezvous.from_environment(run)
    server.store.set("a", "b")
    assert client.store.get("a") == b"b"


def test_a_port_in_use_is_named(monkeypatch, run):
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        torchrun(monkeypatch, 0, port)
        with pytest.raises(BadInput, match=rf"MASTER_PORT is {port}, which is in use.*choose a free port"):
            Rendezvous.from_environment(run)


def test_a_server_that_is_not_there_is_named_at_the_deadline(monkeypatch, run, free_port):
    torchrun(monkeypatch, 2, free_port)
    began = time.monotonic()
    with pytest.raises(BadInput, match=rf"no store at {HOST}:{free_port} \(MASTER_ADDR, MASTER_PORT\)"):
        Rendezvous.from_environment(replace(run, waits=Waits(join_s=1.0)))
    assert time.monotonic() - began < 10


def test_clients_find_out_why_they_were_let_go_and_a_store_that_is_gone_says_nothing(run, agent):
    def client(rank):
        return Rendezvous(
            rank, 5, dist.TCPStore(HOST, agent.port, None, False, timeout=timedelta(seconds=2)), True, run
        )

    server, one, two = Rendezvous(0, 5, agent, True, run), client(1), client(2)
    assert one.let_go() is None
    server.announce(1, "lost: timeout")
    assert (one.let_go(), two.let_go()) == ("lost: timeout", None)
    server.announce(None, "max_updates")
    assert (one.let_go(), two.let_go(), client(3).let_go()) == ("max_updates",) * 3


def test_a_store_that_has_gone_says_nothing(run):
    store = dist.TCPStore(HOST, 0, None, True, timeout=timedelta(seconds=5), wait_for_workers=False)
    client = Rendezvous(1, 5, dist.TCPStore(HOST, store.port, None, False, timeout=timedelta(seconds=2)), True, run)
    assert client.let_go() is None
    del store
    gc.collect()
    assert client.let_go() is None


def test_both_ends_of_a_pair_meet(run, agent):
    from concurrent.futures import ThreadPoolExecutor

    from raafl.runtime.transport import Kind, Message

    ends = [Rendezvous(rank, 5, agent, True, run).connector(2, "cpu") for rank in (0, 2)]
    with ThreadPoolExecutor(2) as pool:
        server, client = (future.result() for future in [pool.submit(end) for end in ends])
    with server, client:
        client.send(Message(Kind.KEEPALIVE, 0, 0, {"n": 1}, None))
        assert server.recv(lambda *_: None, 5.0).meta == {"n": 1}


@pytest.mark.parametrize(
    ("num_gpus", "local_rank", "accelerator", "device"),
    [(0, "3", "auto", None), (2, "3", "auto", 1), (8, "3", "cuda", 3), (1, "3", "cuda", 0), (4, "3", "cpu", None)],
)
def test_each_rank_takes_the_gpu_of_its_local_rank(monkeypatch, run, agent, num_gpus, local_rank, accelerator, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    chosen = replace(run, fabric=FabricOptions(accelerator=accelerator))
    assert Rendezvous(4, 5, agent, True, chosen).fabric_options().device == device
    named = replace(run, fabric=FabricOptions(accelerator=accelerator, device=0))
    assert Rendezvous(4, 5, agent, True, named).fabric_options().device == 0
