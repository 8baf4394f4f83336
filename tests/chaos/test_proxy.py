"""The fault proxy does what it is told to the connection it is told, and nothing to others."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from tests.chaos.proxy import FaultProxy

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def echo():
    """The port of a server that sends back whatever it is sent."""
    listener = socket.create_server(("127.0.0.1", 0))

    def talk(connection):
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    def serve():
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)


@pytest.fixture
def proxy(echo):
    with FaultProxy(echo, seed=1) as started:
        yield started


def call(proxy):
    connection = socket.create_connection(("127.0.0.1", proxy.port), timeout=30)
    connection.settimeout(30)
    assert exchange(connection, b"hello") == b"hello"
    return connection


def exchange(connection, data):
    connection.sendall(data)
    return receive(connection, len(data))


def receive(connection, length):
    got = b""
    while len(got) < length and (piece := connection.recv(length - len(got))):
        got += piece
    return got


def test_without_faults_everything_passes_unchanged(proxy):
    data = bytes(range(256)) * 4096
    with call(proxy) as connection:
        sender = threading.Thread(target=connection.sendall, args=(data,))
        sender.start()
        assert receive(connection, len(data)) == data
        sender.join()
        (link,) = proxy.links()
        assert link.up.num_bytes == link.down.num_bytes == len(data) + 5


def test_an_end_of_one_direction_is_passed_on(proxy):
    with call(proxy) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""


def test_one_bit_is_flipped_and_only_of_the_chosen_connection(proxy):
    with call(proxy) as first, call(proxy) as second:
        one, other = proxy.links()
        one.up.flip = 1
        data = bytes(1000)
        changed = exchange(first, data)
        assert sum(byte.bit_count() for byte in changed) == 1
        assert exchange(first, data) == exchange(second, data) == data
        assert (one.up.num_flipped, one.down.num_flipped, other.up.num_flipped) == (1, 0, 0)


def test_what_is_held_comes_later_and_whole(proxy):
    with call(proxy) as connection:
        (link,) = proxy.links()
        link.down.held = True
        connection.sendall(b"later")
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        link.down.held = False
        connection.settimeout(30)
        assert receive(connection, 5) == b"later"


def test_delay_and_throttle_take_their_time(proxy):
    with call(proxy) as connection:
        (link,) = proxy.links()
        link.up.delay_s = 0.2
        began = time.monotonic()
        exchange(connection, b"x")
        assert time.monotonic() - began >= 0.2
        link.up.clear()
        link.down.bytes_per_s = 10_000
        began = time.monotonic()
        exchange(connection, bytes(4000))
        assert time.monotonic() - began >= 0.3


@pytest.mark.parametrize("reset", [True, False])
def test_a_cut_ends_both_sides(reset, proxy):
    with call(proxy) as first, call(proxy) as second:
        proxy.links()[0].cut(reset=reset)
        if reset:
            with pytest.raises(ConnectionResetError):
                first.recv(1)
        else:
            assert first.recv(1) == b""
        assert exchange(second, b"still there") == b"still there"
        deadline = time.monotonic() + 30
        while len(proxy.links()) != 1:
            assert time.monotonic() < deadline


def test_where_nobody_listens_the_caller_is_hung_up(free_port):
    with FaultProxy(free_port) as proxy, socket.create_connection(("127.0.0.1", proxy.port), timeout=30) as connection:
        assert connection.recv(1) == b""
