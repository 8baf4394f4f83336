"""Staging on an emulated GPU whose copies are made late, as those of a real one are: what waits for them, and how often."""

from __future__ import annotations

import socket
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from raafl.runtime.transport import Kind, Message, payload
from raafl.runtime.transport.payload import NUM_AHEAD, NUM_STAGED, Staging
from raafl.runtime.transport.tcp import TcpPair
from raafl.submodel.flat import FlatTensors, Layout

aten = torch.ops.aten
VIEWS = {aten.view, aten.split, aten.slice, aten.detach, aten.alias, aten.as_strided}
PIECE_BYTES = 1 << 12
HOST, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Late:
    """Makes a copy that does not block only when something that waits for it, or other work of the GPU, comes.

    Attributes:
        num_late: such copies.
        num_events: times that an event was waited for.
    """

    def __init__(self, emulated):
        self.emulated, self.inner = emulated, type(emulated).compute
        self.queue, self.num_late, self.num_events, self.lock = deque(), 0, 0, threading.RLock()

    def compute(self, func, args, kwargs):
        packet = func.overloadpacket
        with self.lock:
            if packet is aten.copy_ and args[2:] == (True,):
                self.num_late += 1
                self.queue.append((self.num_late, func, args[:2]))
                return args[0]
            tensors = [
                item for item in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)
            ]
            if packet not in VIEWS and any(tensor.device == GPU for tensor in tensors):
                self.run(self.num_late)
            return self.inner(self.emulated, func, args, kwargs)

    def run(self, number):
        waits = self.emulated.counts["waits"]
        while self.queue and self.queue[0][0] <= number:
            _, func, args = self.queue.popleft()
            self.inner(self.emulated, func, args, {})
        self.emulated.counts["waits"] = waits

    def event(self, blocking):
        event = SimpleNamespace(number=None)

        def synchronize():
            with self.lock:
                self.num_events += 1
                self.run(event.number)

        event.record = lambda stream: setattr(event, "number", self.num_late)
        event.synchronize = synchronize
        return event


@pytest.fixture
def late(emulated_cuda, monkeypatch):
    made = Late(emulated_cuda)
    monkeypatch.setattr(emulated_cuda, "compute", made.compute, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(payload, "CHUNK_BYTES", PIECE_BYTES)
    return made


def pieces(number):
    whole = torch.arange(number * PIECE_BYTES // 8 - 1, device="cuda:0")  # the last is shorter
    return whole, list(torch.split(whole, PIECE_BYTES // 8))


def test_the_emulated_copies_are_late(late):
    """Or else the tests below would show nothing."""
    source, slot = torch.ones(4, device="cuda:0"), torch.zeros(4)
    slot.copy_(source, non_blocking=True)
    assert slot.tolist() == [0.0] * 4
    event = torch.cuda.Event(blocking=True)
    event.record(None)
    event.synchronize()
    assert slot.tolist() == [1.0] * 4


def test_emulated_pieces_are_good_for_as_long_as_they_may_be_in_flight(late):
    whole, parts = pieces(20)
    expected, found, in_flight = whole.cpu(), [], deque()
    for host in Staging().outgoing(parts):
        in_flight.append(host)
        if len(in_flight) == NUM_STAGED - NUM_AHEAD:  # the wire has taken the oldest only now
            found.append(in_flight.popleft().clone())
    found += [host.clone() for host in in_flight]
    assert torch.equal(torch.cat(found), expected)


def test_emulated_pieces_land_whole_though_their_slots_are_used_again(late):
    whole, parts = pieces(20)
    expected, staging = whole.cpu(), Staging()
    whole.zero_()
    for part, values in zip(parts, torch.split(expected, PIECE_BYTES // 8), strict=True):
        slot = staging.take(part)
        slot.copy_(values)
        staging.land(slot, part)
    staging.landed()
    assert not late.queue and torch.equal(whole.cpu(), expected)


def test_the_emulated_gpu_is_waited_for_as_often_whatever_the_number_of_pieces(late, monkeypatch):
    from raafl.runtime.transport import frames

    monkeypatch.setattr(frames, "PIECE_BYTES", PIECE_BYTES)
    waits, num_late = [], []
    for number in (4, 40):
        layout = Layout.pack([("weight", (number * PIECE_BYTES // 4,), torch.float32)])
        sent, into = FlatTensors.zeros(layout, "cuda:0"), FlatTensors.zeros(layout, "cuda:0")
        sent.buffers[torch.float32].normal_()
        ours, theirs = socket.socketpair()
        before, copied = late.emulated.counts["waits"], late.num_late
        with TcpPair(ours, 20.0) as one, TcpPair(theirs, 20.0) as two, ThreadPoolExecutor(1) as pool:
            sending = pool.submit(one.send, Message(Kind.ASSIGN, 1, 0, {}, sent))
            two.recv(lambda *_, into=into: into, 20.0, finite=True)
            sending.result()
        waits.append(late.emulated.counts["waits"] - before)
        num_late.append(late.num_late - copied)
        assert sent.fingerprint() == into.fingerprint()
    assert num_late == [2 * 4, 2 * 40] and waits[0] == waits[1] == 0


def test_an_emulated_pieces_copy_is_begun_before_its_values_are_looked_at(late, monkeypatch):
    from raafl.runtime.transport import frames

    begun = []
    monkeypatch.setattr(frames, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(frames, "problem_of", lambda host, finite: begun.append(late.num_late))
    layout = Layout.pack([("weight", (5 * PIECE_BYTES // 4,), torch.float32)])
    sent, into = FlatTensors.zeros(layout), FlatTensors.zeros(layout, "cuda:0")  # the sender's are not staged
    ours, theirs = socket.socketpair()
    with TcpPair(ours, 20.0) as one, TcpPair(theirs, 20.0) as two, ThreadPoolExecutor(1) as pool:
        sending = pool.submit(one.send, Message(Kind.ASSIGN, 1, 0, {}, sent))
        two.recv(lambda *_: into, 20.0, finite=True)
        sending.result()
    assert begun == [1, 2, 3, 4, 5]
