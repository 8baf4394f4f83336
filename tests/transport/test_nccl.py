"""Which ends NCCL joins, and the pair over a stand-in for NCCL on emulated GPUs; NCCL itself needs two real ones."""

from __future__ import annotations

import os
import queue
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from raafl.submodel.flat import FlatTensors, Layout
from raafl.transport import Kind, Message, PeerLost, PeerTimeout, Refused, nccl
from raafl.transport.gloo import GlooConnection
from tests.helpers.emulated_streams import Stream

WAIT_S = 10.0


class StandIn:
    """Two ends of a ProcessGroupNCCL in one process; an end may be set to fail, or to hang, when it is made or when it sends."""

    Options = SimpleNamespace
    fails: tuple[int, str] | None = None
    hangs: tuple[int, str] | None = None
    wakes: threading.Event
    watchdog: dict[str, str | None]
    ends: dict[int, StandIn]
    sent: tuple[queue.Queue, queue.Queue]
    streams: list[Stream]

    def __init__(self, store, rank, size, options):
        self.rank, self.aborted = rank, threading.Event()
        StandIn.watchdog = {name: os.environ.get(name) for name in nccl.WATCHDOG}
        self.fail("made", "unhandled system error\nmore")
        self.ends[rank] = self

    def fail(self, when, says):
        if self.hangs == (self.rank, when):
            assert self.wakes.wait(WAIT_S)
        if self.fails == (self.rank, when):
            self.sent[self.rank].put(None)
            raise RuntimeError(f"NCCL error: {says}")

    def send(self, tensors, peer, tag):
        self.streams.append(torch.cuda.current_stream(tensors[0].device))
        self.fail("sends", "Duplicate GPU detected")
        self.sent[self.rank].put(tensors[0].cpu())
        return SimpleNamespace(wait=lambda: True)

    def recv(self, tensors, peer, tag):
        def wait():
            self.streams.append(torch.cuda.current_stream(tensors[0].device))
            found = self.sent[peer].get(timeout=WAIT_S)
            if found is None:
                raise RuntimeError("NCCL error: remote process exited")
            tensors[0].copy_(found)

        return SimpleNamespace(wait=wait)

    def abort(self):
        self.sent[self.rank].put(None)  # who waits for this end hears of it
        self.aborted.set()


@pytest.fixture
def joined(monkeypatch, request):
    """Connects a server on GPU 0 and a client on another, with the stand-in."""
    request.getfixturevalue("emulated_cuda")

    def properties(device):
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B + torch.device(device).index, pci_device_id=0)

    for name in nccl.WATCHDOG:
        monkeypatch.setenv(name, "")  # so that it is as it was after the test
        monkeypatch.delenv(name)
    StandIn.fails, StandIn.hangs, StandIn.ends, StandIn.sent = None, None, {}, (queue.Queue(), queue.Queue())
    StandIn.wakes, StandIn.streams = threading.Event(), []
    monkeypatch.setattr(dist, "ProcessGroupNCCL", StandIn, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)

    @contextmanager
    def connect(*devices, wanted=True, timeout_s=WAIT_S):
        store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=WAIT_S), wait_for_workers=False)
        with ThreadPoolExecutor(2) as pool:
            ends = [
                pool.submit(nccl.connect, store, "pair/1", not n, timeout_s, "127.0.0.1", device=device, nccl=wanted)
                for n, device in enumerate(devices)
            ]
            server, client = (end.result() for end in ends)
        with server, client:
            yield server, client

    return connect


def test_a_gpu_is_known_by_its_machine_and_bus_whatever_its_parts_are_called(monkeypatch):
    gpu = SimpleNamespace(uuid="MIG-1", pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    whole = nccl.identity(torch.device("cuda", 0))
    assert whole.startswith("cuda:") and whole.endswith("/0001:3b:00")
    gpu.uuid = "MIG-2"
    assert nccl.identity(torch.device("cuda", 1)) == whole
    gpu.pci_bus_id = 0x86
    assert nccl.identity(torch.device("cuda", 1)) != whole
    assert nccl.identity(torch.device("cpu")) == "cpu"


def test_the_name_of_a_device_decides():
    one, two = "cuda:a/0000:3b:00", "cuda:a/0000:86:00"
    assert nccl.nccl_problem("cpu", two) == "the server's tensors are on cpu"
    assert nccl.nccl_problem(one, "cpu") == "the client's tensors are on cpu"
    assert nccl.nccl_problem(one, one) == "both ends share one GPU"
    expected = None if dist.is_nccl_available() else "this torch is built without NCCL"
    assert nccl.nccl_problem(one, two) == expected


def payload(value, device):
    layout = Layout.pack([("weight", (1_500_000,), torch.float32), ("count", (3,), torch.int64)])
    flat = FlatTensors.zeros(layout, device)
    flat.buffers[torch.float32].fill_(value)
    return flat


def test_emulated_payloads_go_over_nccl_from_gpu_to_gpu_and_are_checked(joined):
    with joined("cuda:0", "cuda:1") as (server, client), ThreadPoolExecutor(1) as pool:
        assert type(server) is type(client) is nccl.NcclConnection
        sent, into = payload(2.0, "cuda:0"), payload(0.0, "cuda:1")
        sending = pool.submit(server.send, Message(Kind.ASSIGN, 7, 0, {}, sent))
        message = client.recv(lambda kind, number, meta: into, WAIT_S, finite=True)
        assert sending.result() > 6_000_000 and message.assignment == 7
        assert message.tensors.fingerprint() == sent.fingerprint()
        sending = pool.submit(client.send, Message(Kind.UPDATE, 7, 0, {}, payload(float("nan"), "cuda:1")))
        with pytest.raises(Refused, match="non-finite"):
            server.recv(lambda kind, number, meta: sent, WAIT_S, finite=True)
        sending.result()
        sending = pool.submit(client.send, Message(Kind.UPDATE, 8, 0, {}, into))
        with pytest.raises(Refused, match="not-wanted"):  # and is read to its end
            server.recv(refuse, WAIT_S)
        sending.result()
        pool.submit(client.send, Message(Kind.HELLO, 9))
        assert server.recv(lambda *_: None, WAIT_S).assignment == 9
    assert all(end.aborted.is_set() for end in StandIn.ends.values())


def refuse(kind, number, meta):
    raise Refused("not-wanted")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("when", "says"), [("made", "unhandled system error"), ("sends", "Duplicate GPU detected")])
def test_emulated_nccl_that_fails_before_the_first_payload_leaves_both_ends_to_gloo(joined, caplog, rank, when, says):
    StandIn.fails = (rank, when)
    with joined("cuda:0", "cuda:1") as (server, client), ThreadPoolExecutor(1) as pool:
        assert type(server) is type(client) is GlooConnection
        sent, into = payload(2.0, "cuda:0"), payload(0.0, "cuda:1")
        sending = pool.submit(server.send, Message(Kind.ASSIGN, 7, 0, {}, sent))
        assert client.recv(lambda *_: into, WAIT_S).tensors.fingerprint() == sent.fingerprint()
        sending.result()
    assert re.search(f"NCCL is not used, tensors are staged: .*{says}", caplog.text)
    assert all(end.aborted.is_set() for end in StandIn.ends.values())


@pytest.mark.parametrize(("rank", "when"), [(0, "made"), (1, "sends")])
def test_emulated_nccl_that_hangs_at_the_start_is_given_up_at_the_deadline(joined, caplog, rank, when):
    StandIn.hangs = (rank, when)
    with joined("cuda:0", "cuda:1", timeout_s=4.0) as (server, client), ThreadPoolExecutor(1) as pool:
        assert type(server) is type(client) is GlooConnection
        sent, into = payload(2.0, "cuda:0"), payload(0.0, "cuda:1")
        sending = pool.submit(server.send, Message(Kind.ASSIGN, 7, 0, {}, sent), WAIT_S)
        assert client.recv(lambda *_: into, WAIT_S).tensors.fingerprint() == sent.fingerprint()
        sending.result()
    assert "nothing came of it within 2 s" in caplog.text
    StandIn.wakes.set()  # what was left behind throws away what it comes to
    for thread in threading.enumerate():
        if thread.name == "nccl":
            thread.join(WAIT_S)
    assert StandIn.ends and all(end.aborted.is_set() for end in StandIn.ends.values())


def test_emulated_nccl_is_made_with_a_watchdog_that_cannot_end_the_process(joined, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")  # the user's own
    with joined("cuda:0", "cuda:1") as (server, _):
        assert type(server) is nccl.NcclConnection
    assert StandIn.watchdog == {**nccl.WATCHDOG, "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


@pytest.mark.skipif(
    torch.cuda.is_available() or not dist.is_nccl_available(), reason="shows NCCL's own refusal without a GPU"
)
def test_nccl_itself_where_there_is_no_gpu_leaves_both_ends_to_gloo(monkeypatch):
    """No stand-in here: the constructor of torch's own group raises."""
    for name in nccl.WATCHDOG:
        monkeypatch.setenv(name, nccl.WATCHDOG[name])
    store = dist.HashStore()
    group, problem = nccl.opened(lambda: nccl.new_group(store, 0, 2, 1.0), WAIT_S)
    assert group is None and "no GPUs found" in problem


def test_emulated_nccl_that_fails_later_ends_the_session(joined):
    with joined("cuda:0", "cuda:1") as (server, _):
        StandIn.fails = (0, "sends")
        with pytest.raises(PeerLost, match="connection-broken: NCCL error: Duplicate GPU detected"):
            server.send(Message(Kind.ASSIGN, 7, 0, {}, payload(2.0, "cuda:0")))
        assert server.closed and StandIn.ends[0].aborted.is_set()


def test_emulated_ends_that_do_not_ask_for_nccl_or_share_a_gpu_have_gloo(joined, caplog):
    with joined("cuda:0", "cuda:1", wanted=False) as ends:
        assert [type(end) for end in ends] == [GlooConnection, GlooConnection]
    with joined("cuda:1", "cuda:1") as ends:
        assert [type(end) for end in ends] == [GlooConnection, GlooConnection]
    assert "both ends share one GPU" in caplog.text
    assert not StandIn.ends


def test_the_sum_of_words_finds_lost_and_altered_ones():
    one, two = torch.arange(1, 12, dtype=torch.int32), torch.tensor([-1.0, 0.0])
    bits = 0xBF800000 - 2**32  # of -1.0, as an int32
    assert nccl._sum([one, two]) == (sum(range(1, 12)) + 2 * bits) % 2**64
    assert nccl._sum([torch.tensor([-3], dtype=torch.int16)]) == 2**64 - 3


@pytest.mark.parametrize("number", [1_000, 3_000_000])
def test_emulated_nccl_is_waited_for_alone_and_as_often_whatever_the_payload(joined, emulated_cuda, number):
    with joined("cuda:0", "cuda:1") as (server, client), ThreadPoolExecutor(1) as pool:
        waited = StandIn.streams.copy()
        layout = Layout.pack([("weight", (number + 20_000,), torch.float32), ("count", (3,), torch.int64)])
        sent, into = FlatTensors.zeros(layout, "cuda:0"), FlatTensors.zeros(layout, "cuda:1")
        emulated_cuda.counts.clear()
        sending = pool.submit(server.send, Message(Kind.ASSIGN, 7, 0, {}, sent))
        client.recv(lambda *_: into, WAIT_S, finite=True)
        sending.result()
        # each end the sum, the receiver a sum of what is to be finite; the other four are the stand-in's copies
        assert emulated_cuda.counts["waits"] == 3 + 4
        own = StandIn.streams[len(waited) :]
    first = emulated_cuda.streams.defaults
    assert len(own) == 2 * 2 and len(set(own)) == 2  # a message for each dtype, on one stream at each end
    assert not set(StandIn.streams) & set(first)
    assert not any(set(stream.after) & set(StandIn.streams) for stream in first)  # where merges are


def test_emulated_nccl_that_moves_nothing_more_is_given_up_at_the_deadline(joined, monkeypatch):
    stuck = SimpleNamespace(record=lambda stream: None, query=lambda: False)
    with joined("cuda:0", "cuda:1") as (server, client), ThreadPoolExecutor(1) as pool:
        client.timeout_s = 1.0
        receiving = pool.submit(client.recv, lambda *_: payload(0.0, "cuda:1"), WAIT_S)
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: stuck)
        with pytest.raises(PeerTimeout, match="NCCL transferred nothing for "):
            server.send(Message(Kind.ASSIGN, 7, 0, {}, payload(2.0, "cuda:0")), 1.0)
        client.close()
        with pytest.raises((PeerLost, PeerTimeout)):
            receiving.result()
        assert server.closed and StandIn.ends[0].aborted.is_set()
