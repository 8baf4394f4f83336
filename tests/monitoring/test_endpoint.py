"""The port answers whoever asks properly, soon, whatever other callers do; nothing of it is left when it is closed."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from contextlib import contextmanager, suppress
from http import HTTPStatus

import pytest

from raafl.errors import BadInput
from raafl.monitoring import monitor as endpoints
from raafl.monitoring.monitor import MAX_CALLERS, MAX_REQUEST_BYTES, Endpoint, Reply, listening_socket


def broken():
    raise RuntimeError("a fault of ours")


LARGE = b"x" * (32 << 20)
ROUTES = {
    "/": lambda: Reply(HTTPStatus.OK, b"hello\n"),
    "/broken": broken,
    "/large": lambda: Reply(HTTPStatus.OK, LARGE),
}


@contextmanager
def opened():
    made = Endpoint(listening_socket("monitor", "127.0.0.1:0"), ROUTES)
    try:
        yield made
    finally:
        made.close()


def where(endpoint):
    host, _, port = endpoint.address.rpartition(":")
    return host, int(port)


def ask(endpoint, path="/", method="GET"):
    connection = http.client.HTTPConnection(*where(endpoint), timeout=20)
    connection.request(method, path)
    with connection.getresponse() as answer:
        return answer.status, answer.read()


def call(endpoint, data=b""):
    caller = socket.create_connection(where(endpoint), timeout=20)
    with suppress(OSError):  # it may be hung up on while it sends
        caller.sendall(data)
    return caller


def is_hung_up_on(caller):
    try:
        return caller.recv(1) == b""
    except ConnectionError:
        return True


def test_it_answers_get_and_head_and_nothing_else():
    with opened() as endpoint:
        assert ask(endpoint) == ask(endpoint, "/?a=1") == (200, b"hello\n")
        assert ask(endpoint, method="HEAD") == (200, b"")
        assert ask(endpoint, "/etc/passwd")[0] == ask(endpoint, "/../")[0] == 404
        assert ask(endpoint, method="POST")[0] == 405
        assert ask(endpoint, "/broken") == (500, b"Internal Server Error\n")
        assert ask(endpoint)[0] == 200
        with call(endpoint, b"\x16\x03\x01\r\n\r\n") as caller:
            assert caller.recv(100).startswith(b"HTTP/1.1 405")


def test_callers_that_never_finish_their_request_keep_nobody_out(monkeypatch):
    """Their time does not run out here: the oldest of too many goes."""
    monkeypatch.setattr(endpoints, "CALLER_S", 60.0)
    with opened() as endpoint:
        callers = [call(endpoint, b"GET / HTTP/1.1\r\nA: ") for _ in range(2 * MAX_CALLERS)]
        assert ask(endpoint) == (200, b"hello\n")
        assert all(map(is_hung_up_on, callers[:MAX_CALLERS]))
        callers[-1].sendall(b"b\r\n\r\n")
        assert callers[-1].recv(100).startswith(b"HTTP/1.1 200")
        for caller in callers:
            caller.close()


def test_a_caller_has_its_time_and_a_request_its_size(monkeypatch):
    monkeypatch.setattr(endpoints, "CALLER_S", 0.2)
    with opened() as endpoint:
        slow, long = call(endpoint, b"GET"), call(endpoint, b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * MAX_REQUEST_BYTES)
        takes_nothing = call(endpoint, b"GET /large HTTP/1.1\r\n\r\n")
        assert is_hung_up_on(slow) and is_hung_up_on(long)
        deadline = time.monotonic() + 20
        while endpoint._callers and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not endpoint._callers  # nor does a reply wait that nobody takes
        assert ask(endpoint)[0] == 200
        for caller in (slow, long, takes_nothing):
            caller.close()


def test_it_closes_while_callers_wait_and_leaves_no_thread():
    before = threading.active_count()
    with opened() as endpoint:
        waiting = call(endpoint, b"GET")
        assert ask(endpoint)[0] == 200
    endpoint.close()
    assert is_hung_up_on(waiting) and threading.active_count() == before
    with pytest.raises(ConnectionRefusedError):
        ask(endpoint)
    waiting.close()


def test_an_address_that_cannot_be_had_is_bad_input():
    with (
        opened() as endpoint,
        pytest.raises(BadInput, match=r"monitor is '127.0.0.1:\d+', on which this machine cannot listen"),
    ):
        listening_socket("monitor", endpoint.address)
    with pytest.raises(BadInput, match=r"monitor is 'no.such.host.invalid:80', on which this machine cannot listen"):
        listening_socket("monitor", "no.such.host.invalid:80")
