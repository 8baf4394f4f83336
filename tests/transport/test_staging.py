"""Staging on an emulated GPU whose copies are made late, and on streams whose order is checked; and on a real one."""

from __future__ import annotations

import socket
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from raafl.submodel.flat import FlatTensors, Layout
from raafl.transport import Kind, Message, PeerLost, frames
from raafl.transport.frames import NUM_AHEAD, NUM_STAGED, Staging
from raafl.transport.tcp.connection import TcpConnection

PIECE_BYTES = 1 << 12
GPU = torch.device("cuda", 0)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(frames, "CHUNK_BYTES", PIECE_BYTES)
    monkeypatch.setattr(frames, "PIECE_BYTES", PIECE_BYTES)


@pytest.fixture
def late(emulated_cuda, small):
    return emulated_cuda


@pytest.fixture(params=["emulated", pytest.param("real", marks=pytest.mark.gpu)])
def gpu(request, small):
    if request.param == "emulated":
        request.getfixturevalue("emulated_cuda")
    return GPU


def pieces(number):
    whole = torch.arange(number * PIECE_BYTES // 8 - 1, device="cuda:0")  # the last is shorter
    return whole, list(torch.split(whole, PIECE_BYTES // 8))


def flat(number, device, fill=None):
    made = FlatTensors.zeros(Layout.pack([("weight", (number * PIECE_BYTES // 4,), torch.float32)]), device)
    if fill is not None:
        made.buffers[torch.float32].fill_(fill)
    return made


def passed(sent, into):
    """Send tensors over a pair; return what came."""
    ours, theirs = socket.socketpair()
    with TcpConnection(ours, 20.0) as one, TcpConnection(theirs, 20.0) as two, ThreadPoolExecutor(1) as pool:
        sending = pool.submit(one.send, Message(Kind.ASSIGN, 1, 0, {}, sent))
        found = two.recv(lambda *_: into, 20.0, finite=True)
        sending.result()
    return found.tensors


def test_pieces_are_good_for_as_long_as_they_may_be_in_flight(gpu):
    whole, parts = pieces(20)
    expected, found, in_flight = whole.cpu(), [], deque()
    with Staging(gpu).in_use() as frames:
        for host in frames.outgoing(parts):
            in_flight.append(host)
            if len(in_flight) == NUM_STAGED - NUM_AHEAD:  # the wire has taken the oldest only now
                found.append(in_flight.popleft().clone())
    found += [host.clone() for host in in_flight]
    assert torch.equal(torch.cat(found), expected)


def test_pieces_land_whole_though_their_slots_are_used_again(gpu):
    whole, parts = pieces(20)
    expected = whole.cpu()
    whole.zero_()
    with Staging(gpu).in_use() as frames:
        for part, values in zip(parts, torch.split(expected, PIECE_BYTES // 8), strict=True):
            slot = frames.take(part)
            slot.copy_(values)
            frames.land(slot, part)
    assert torch.equal(whole.cpu(), expected)


def test_a_payload_that_is_still_computed_is_sent_as_it_becomes_and_lands_where_it_may(gpu):
    """The stream of the copies waits for what the GPU was given before: here a product that takes a while on a real one."""
    factors = torch.eye(2048 if torch.cuda.get_device_name(0) != "Emulated GPU" else 4, device=gpu)
    for _ in range(3):
        sent, into = flat(30, gpu), flat(30, gpu)
        for _ in range(20):
            factors = factors @ factors
        sent.buffers[torch.float32].add_(factors[0, 0])
        into.buffers[torch.float32].mul_(factors[0, 0])
        assert passed(sent, into).buffers[torch.float32].sum().item() == 30 * PIECE_BYTES / 4


def test_emulated_copies_have_a_stream_for_each_session_and_way(late):
    ours, theirs = socket.socketpair()
    before = len(late.streams.all)
    with TcpConnection(ours, 20.0) as one, TcpConnection(theirs, 20.0) as two, ThreadPoolExecutor(1) as pool:
        for sender, receiver in ((one, two), (two, one), (one, two)):
            sending = pool.submit(sender.send, Message(Kind.ASSIGN, 1, 0, {}, flat(5, "cuda:0")))
            receiver.recv(lambda *_: flat(5, "cuda:1"), 20.0)
            sending.result()
    made = late.streams.all[before:]
    assert sorted(str(stream.device) for stream in made) == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    assert all(stream.number > 0 for stream in made)


def test_the_emulated_gpu_is_waited_for_as_often_whatever_the_number_of_pieces(late):
    for number in (4, 40):
        sent, into = flat(number, "cuda:0", 3.0), flat(number, "cuda:0")
        late.counts.clear()
        passed(sent, into)
        assert late.counts == {"to host": number, "to device": number, "late": 2 * number, "events": 2 * number}
        assert sent.fingerprint() == into.fingerprint()


def test_an_emulated_pieces_copy_is_begun_before_its_values_are_looked_at(late, monkeypatch):
    begun = []
    monkeypatch.setattr(frames, "problem_of", lambda host, finite: begun.append(late.counts["late"]))
    passed(flat(5, "cpu"), flat(5, "cuda:0"))  # the sender's are not staged
    assert begun == [1, 2, 3, 4, 5]


def test_emulated_pieces_are_copied_to_the_host_while_earlier_ones_are_on_the_wire(late):
    _, parts = pieces(5)
    with Staging(GPU).in_use() as frames:
        begun = [late.counts["late"] for _ in frames.outgoing(parts)]
    assert begun == [NUM_AHEAD + 1, NUM_AHEAD + 2, 5, 5, 5]


def test_no_emulated_copy_goes_on_after_a_message_that_fails(late):
    """Its memory may be anybody's by then."""
    into = flat(40, "cuda:0")
    ours, theirs = socket.socketpair()
    with TcpConnection(ours, 20.0) as one, TcpConnection(theirs, 20.0) as two, ThreadPoolExecutor(1) as pool:

        def cut():
            head = frames.codec.encode_head(Message(Kind.ASSIGN, 1, 0, {}, flat(40, "cpu")))
            ours.sendall(head + bytes(5 * PIECE_BYTES))
            one.close()

        cutting = pool.submit(cut)
        with pytest.raises(PeerLost):
            two.recv(lambda *_: into, 20.0)
        cutting.result()
    assert late.counts["late"] > 0 and not late.streams.pending
