"""What a TCP pair promises beyond the conformance suite: slow peers, dead peers, sockets. See test_pair.py for the rest."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from raafl.runtime.transport import Kind, Message, PeerLost, PeerTimeout, Refused, codec
from raafl.runtime.transport.cipher import RecordCipher
from raafl.runtime.transport.stream import TimeBudget, hang_up
from raafl.runtime.transport.tcp import TcpPair
from raafl.submodel.flat import FlatTensors

KEYS = {"plain": (None, None), "sealed": (RecordCipher(b"s" * 32, b"c" * 32), RecordCipher(b"c" * 32, b"s" * 32))}
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
    frame, target = codec.encode(message), FlatTensors.empty(message.tensors.layout)
    for _ in range(10):  # where the dripping thread gets no processor for half a second, the peer is silent, not slow
        server, client = socket.socketpair()
        stop = threading.Event()
        dripper = threading.Thread(target=drip, args=(client, frame, fast, stop))
        dripper.start()
        try:
            with TcpPair(server, 0.5, min_bytes_per_s=1000) as pair, pytest.raises((Refused, PeerTimeout)) as caught:
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
    client.sendall(codec.encode(Message(Kind.UPDATE, 1, 0, {"a": 1}))[:70])
    with TcpPair(server, 0.3) as pair, pytest.raises(PeerTimeout, match=r"within 0\.3 s"):
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
        with TcpPair(server, 0.5, min_bytes_per_s=1e6) as pair, pytest.raises(PeerTimeout):
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


@pytest.mark.parametrize("keys", KEYS)
def test_messages_that_come_together_are_received_one_by_one(sockets, keys):
    ours, theirs = KEYS[keys]
    server, client = TcpPair(sockets[0], 10, seal=ours), TcpPair(sockets[1], 10, seal=theirs)
    with server, client:
        for number in range(50):
            client.send(Message(Kind.UPDATE, number, 0, {}, random_flat(number)))
        for number in range(50):
            tensors = random_flat(number)
            target = FlatTensors.empty(tensors.layout)
            got = server.recv(lambda *args, target=target: target, 10)
            assert got.assignment == number and target.fingerprint() == tensors.fingerprint()


def test_both_directions_at_once(sockets, pool):
    with TcpPair(sockets[0], 10) as server, TcpPair(sockets[1], 10) as client:
        tensors = random_flat(3_000_000)
        work = []
        for here in (server, client):
            target = FlatTensors.empty(tensors.layout)
            work.append(pool.submit(here.send, Message(Kind.UPDATE, 1, 0, {}, tensors)))
            work.append(pool.submit(here.recv, lambda *args, target=target: target, 20))
        for item in work:
            item.result(30)
        assert work[1].result().tensors.fingerprint() == work[3].result().tensors.fingerprint() == tensors.fingerprint()


def test_check_finds_a_peer_that_has_gone_and_disturbs_nothing(sockets):
    with TcpPair(sockets[0], 10) as server, TcpPair(sockets[1], 10) as client:
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


def test_an_unencodable_message_sends_nothing(sockets):
    with TcpPair(sockets[0], 10) as server, TcpPair(sockets[1], 10) as client:
        with pytest.raises(ValueError, match="not JSON"):
            server.send(Message(Kind.ASSIGN, 1, 0, {"a": {1}}))
        server.send(Message(Kind.STOP))
        assert client.recv(nothing, 10).kind is Kind.STOP


def test_a_value_error_in_expect_closes_the_pair(sockets):
    with TcpPair(sockets[0], 10) as server, TcpPair(sockets[1], 10) as client:
        client.send(Message(Kind.UPDATE))
        with pytest.raises(ValueError, match="by the test"):
            server.recv(lambda *args: (_ for _ in ()).throw(ValueError("by the test")), 10)
        assert server.closed


def test_a_sound_header_with_bad_json_is_read_to_its_end(sockets):
    server, client = sockets
    frame = bytearray(codec.encode(Message(Kind.UPDATE, 7, 0, {"a": 1}, random_flat(100_000))))
    frame[60] ^= 1
    with TcpPair(server, 10) as pair:
        sender = threading.Thread(target=client.sendall, args=(bytes(frame) + codec.encode(Message(Kind.STOP)),))
        sender.start()
        with pytest.raises(Refused, match="bad-checksum"):
            pair.recv(nothing, 10)
        assert not pair.closed and pair.received_bytes == len(frame)
        assert pair.recv(nothing, 10).kind is Kind.STOP
        sender.join()


def test_socket_options(sockets):
    with TcpPair(sockets[0], 10):
        assert sockets[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sockets[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_socket_that_is_not_connected_any_more_can_be_closed():
    one, other = socket.socketpair()
    other.close()
    hang_up(one)
    hang_up(one)
    assert one.fileno() == -1


DYING_CLIENT = """
import pathlib, socket, sys, time
sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
sock.sendall(pathlib.Path(sys.argv[2]).read_bytes())
time.sleep(60)
"""


@pytest.mark.parametrize("doing", ["idle", "sending", "receiving"])
def test_a_killed_process_is_noticed_at_once(doing, tmp_path):
    tensors = random_flat(1 << 20)
    said = codec.encode(Message(Kind.HELLO))
    if doing == "sending":
        said += codec.encode(Message(Kind.UPDATE, 1, 0, {}, tensors))[:-1000]
    (tmp_path / "said").write_bytes(said)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-c", DYING_CLIENT, str(listener.getsockname()[1]), str(tmp_path / "said")]
        client = subprocess.Popen(command)
        killed_s = []

        def kill(*args):
            killed_s.append(time.monotonic())
            client.send_signal(signal.SIGKILL)
            client.wait(20)

        def kill_and_expect(*args):
            kill()
            return FlatTensors.empty(tensors.layout)

        try:
            listener.settimeout(60)
            sock, _ = listener.accept()
            with TcpPair(sock, 60) as server:
                assert server.recv(nothing, 60).kind is Kind.HELLO
                killer = threading.Timer(0.3, kill)
                if doing != "sending":
                    killer.start()
                with pytest.raises(PeerLost):
                    if doing == "receiving":
                        server.send(Message(Kind.ASSIGN, 1, 0, {}, random_flat(8 << 20)), 60)
                    else:
                        server.recv(kill_and_expect if doing == "sending" else nothing, 60)
                assert time.monotonic() - killed_s[0] < 10 and server.closed
                if doing != "sending":
                    killer.join()
        finally:
            client.kill()
            client.wait()
