"""What a TCP pair promises beyond the conformance suite: slow peers, dead peers, sockets. tests/conformance has the rest."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from raafl.submodel.flat import FlatTensors
from raafl.transport import Kind, Message, PeerLost, PeerTimeout, Refused
from raafl.transport.tcp.connection import TcpConnection
from raafl.transport.tcp.stream import PAUSE, TimeBudget, hang_up
from tests.helpers.raw_frames import encode

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def sockets():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), 10)
        server, _ = listener.accept()
    with server, client:
        yield server, client


def nothing(kind, assignment, meta):
    return None


def random_flat(numel):
    return FlatTensors.from_named({"w": torch.randn(numel, generator=torch.Generator().manual_seed(numel))})


def test_a_budget_by_hand():
    budget = TimeBudget(10.0, 100.0)
    budget.waited(6.0)
    assert budget.left_s == 4.0
    budget.moved(200)  # worth 2 s
    assert budget.left_s == 6.0
    budget.moved(10**9)
    assert budget.left_s == 10.0, "what came fast does not buy a long silence"
    budget.waited(10.0)
    assert isinstance(budget.spent(), PeerTimeout)  # silent for all of it
    budget = TimeBudget(10.0, 100.0)
    for _ in range(11):  # a byte each second earns 10 ms
        budget.moved(1)
        budget.waited(1.0)
    assert budget.left_s == pytest.approx(-1.0 + 0.1) and budget.spent().reason == "slow"


def test_a_budget_without_a_rate_bounds_the_sum_of_waits():
    budget = TimeBudget(5.0)
    budget.waited(3.0)
    budget.moved(1000)
    assert budget.left_s == 2.0 and isinstance(budget.spent(), PeerTimeout)


def drip(client, frame, fast, stop):
    """Send ``fast`` bytes of a frame at once, and one every 50 ms from then on."""
    try:
        client.sendall(frame[:fast])
        for byte in frame[fast:]:
            if stop.wait(0.05):
                return
            client.send(bytes([byte]))
    except OSError:
        pass


@pytest.mark.parametrize("fast", [1, 70, 50_000], ids=lambda n: f"after {n} bytes")
def test_a_slow_drip_is_refused_as_slow(fast):
    message = Message(Kind.UPDATE, 1, 0, {"a": 1}, random_flat(100_000))
    frame, target = encode(message), FlatTensors.empty(message.tensors.layout)
    for _ in range(10):  # where the dripping thread gets no processor for half a second, the peer is silent, not slow
        server, client = socket.socketpair()
        stop = threading.Event()
        dripper = threading.Thread(target=drip, args=(client, frame, fast, stop))
        dripper.start()
        try:
            with (
                TcpConnection(server, 0.5, min_bytes_per_s=1000) as pair,
                pytest.raises((Refused, PeerTimeout)) as caught,
            ):
                pair.recv(lambda *args: target, 30)
            assert pair.closed and 0 < pair.received_bytes < len(frame)
        finally:
            stop.set()
            dripper.join()
            client.close()
        if isinstance(caught.value, Refused):
            break
    assert caught.value.reason == "slow"


def test_a_peer_that_stops_in_mid_message_is_a_timeout(sockets):
    server, client = sockets
    client.sendall(encode(Message(Kind.UPDATE, 1, 0, {"a": 1}))[:70])
    with TcpConnection(server, 0.3) as pair, pytest.raises(PeerTimeout, match=r"within 0\.3 s"):
        pair.recv(nothing, 10)
    assert pair.closed


def test_a_reader_that_drips_is_a_timeout_of_the_sender(sockets, pool):
    server, client = sockets
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stop = threading.Event()

    def sip():
        while not stop.wait(0.02):
            client.recv(1)

    sipping = pool.submit(sip)
    try:
        with TcpConnection(server, 0.5, min_bytes_per_s=1e6) as pair, pytest.raises(PeerTimeout):
            pair.send(Message(Kind.ASSIGN, 1, 0, {}, random_flat(4_000_000)))
        assert pair.closed
    finally:
        stop.set()
        sipping.result(10)


def test_an_honest_slow_link_is_waited_for():
    """2 kB/s for an hour, with pauses of half the timeout, where 1 kB/s is asked for."""
    budget = TimeBudget(10.0, 1000.0)
    for _ in range(720):
        budget.waited(5.0)
        assert budget.left_s > 0
        budget.moved(10_000)
    assert budget.left_s == 10.0


def test_check_finds_a_peer_that_has_gone_and_disturbs_nothing(sockets):
    with TcpConnection(sockets[0], 10) as server, TcpConnection(sockets[1], 10) as client:
        server.check()
        client.send(Message(Kind.KEEPALIVE))
        server.check()
        assert server.recv(nothing, 10).kind is Kind.KEEPALIVE
        client.close()
        deadline = time.monotonic() + 30
        with pytest.raises(PeerLost):
            while time.monotonic() < deadline:
                server.check()
        assert server.closed
        with pytest.raises(PeerLost, match="closed-here"):
            server.check()


def test_a_sound_header_with_bad_json_is_read_to_its_end(sockets):
    server, client = sockets
    frame = bytearray(encode(Message(Kind.UPDATE, 7, 0, {"a": 1}, random_flat(100_000))))
    frame[60] ^= 1
    with TcpConnection(server, 10) as pair:
        sender = threading.Thread(target=client.sendall, args=(bytes(frame) + encode(Message(Kind.STOP)),))
        sender.start()
        with pytest.raises(Refused, match="bad-checksum"):
            pair.recv(nothing, 10)
        assert not pair.closed and pair.received_bytes == len(frame)
        assert pair.recv(nothing, 10).kind is Kind.STOP
        sender.join()


def test_socket_options(sockets):
    with TcpConnection(sockets[0], 10):
        assert sockets[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sockets[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_socket_that_is_not_connected_any_more_can_be_closed():
    one, other = socket.socketpair()
    other.close()
    hang_up(one)
    hang_up(one)
    assert one.fileno() == -1


def test_a_connection_that_another_thread_has_closed_holds_nothing_back(sockets):
    pair = TcpConnection(sockets[0], 10.0)
    pair.close()
    assert not pair.has_unsent


def test_a_refused_message_that_comes_without_a_gap_lets_others_have_their_turn(sockets, pool):
    """Its payload is discarded in pieces of 64 KiB, of which the next is mostly there already."""
    server, client = sockets
    sender, pair = TcpConnection(client, 20.0), TcpConnection(server, 20.0)
    sending = pool.submit(sender.send, Message(Kind.UPDATE, 1, 0, {"a": 1}, random_flat(1 << 20)))
    steps, num_pauses, is_ready = pair.receiving(nothing, 20.0), 0, None
    with pytest.raises(Refused, match="wrong-layout"):
        while True:
            wait = steps.send(is_ready)
            num_pauses += wait is PAUSE
            is_ready = wait.stream is not None and wait.stream.poll(wait.writes, wait.timeout_s)
    assert num_pauses == 4  # 4 MiB, a pause after each
    sending.result(20.0)
    sender.close()
    pair.close()
