"""Strangers and slow callers: each is turned away by name, and none keeps a client out."""

from __future__ import annotations

import ctypes
import gc
import http.client
import os
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import replace

import psutil
import pytest

from raafl.errors import parse_address
from raafl.transport import PeerLost, PeerTimeout, Refused
from raafl.transport.tcp.listener import connect
from tests.helpers.certificates import federation
from tests.transport.hostile import (
    FRAMES,
    GOOD,
    HEAD,
    WAIT_S,
    Server,
    answered,
)

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("tls", [False, True], ids=["token", "tls"])
@pytest.mark.parametrize("fast", [10, HEAD + 10])
def test_a_client_that_drips_is_slow_and_the_others_are_served(fast, tls):
    reasons, pace = [], threading.Event()
    while "slow" not in reasons:  # where the processor is away for as long as PIECE_S, the peer is silent, not slow
        with Server(tls) as server, server.call(1) as other, server.call(2) as pair:
            pair._stream.write([GOOD[:fast]])
            count = 0
            while server.refused.empty() and server.lost.empty():
                pace.wait(0.05)
                with suppress(PeerLost):
                    pair._stream.write([GOOD[fast + count : fast + count + 1]])
                count += 1
                assert answered(other, count)
            where = server.lost if server.refused.empty() else server.refused
            client, reason = where.get(timeout=WAIT_S)
            reasons.append(reason)
        assert client == 2 and count > 2 and reason in ("slow", "timeout") and len(reasons) < 10


def silent(server, count=200):
    """Connections that say nothing, held open."""
    return [server.raw() for _ in range(count)]


def test_200_silent_connections_do_not_keep_a_client_out():
    before = threading.active_count()
    with Server(max_callers=32) as server, server.call(1) as other:
        crowd = silent(server)
        assert answered(other, 1)
        with server.call(2) as late:
            assert answered(late, 1)
        assert threading.active_count() <= before + 3  # the sockets' thread, and two of this server's own sessions
        for sock in crowd:
            sock.close()
        reasons = [server.turned_away.get(timeout=WAIT_S) for _ in crowd]
        assert set(reasons) <= {"busy", "closed", "timeout"} and reasons.count("busy") >= 200 - 32


def test_a_client_gets_in_while_others_keep_coming():
    """An attacker that reconnects as fast as it can; a client that tries again, as `raafl join` does, is let in."""
    with Server(max_callers=8) as server:
        stop = threading.Event()

        def flood():
            held = []
            while not stop.is_set():
                with suppress(OSError):
                    held.append(server.raw())
                if len(held) > 20:
                    held.pop(0).close()
            for sock in held:
                sock.close()

        flooder = threading.Thread(target=flood)
        flooder.start()
        try:
            deadline = time.monotonic() + WAIT_S
            while True:
                try:
                    with server.call(1) as pair:
                        assert answered(pair, 1)
                    break
                except (PeerLost, PeerTimeout, Refused):
                    assert time.monotonic() < deadline
        finally:
            stop.set()
            flooder.join()


def browser(server):
    """TLS by somebody who has no certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        server.raw() as sock,
        context.wrap_socket(sock) as session,
        pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"),
    ):
        session.recv(1)
    return "no-certificate"


def old_tls(server):
    context = federation().site().context(server=False)
    context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    with server.raw() as sock, pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
        context.wrap_socket(sock, server_hostname="localhost")
    return "bad-version"


def web(server):
    connection = http.client.HTTPConnection(*parse_address(server.listener.address), timeout=WAIT_S)
    with suppress(OSError, http.client.HTTPException):
        connection.request("POST", "/", body=b"x" * 10_000)
        raise AssertionError(f"an answer: {connection.getresponse().status}")
    connection.close()
    return "bad-magic"


def is_of_another_authority(server):
    other, mine = federation("strangers").site(), federation().site()
    with pytest.raises(Refused, match=r"bad-certificate.*its authority is not known there"):
        connect(server.listener.address, 1, replace(other, ca=mine.ca).client_login(), timeout_s=WAIT_S)
    return "bad-certificate"


def has_the_servers_certificate(server):
    """Somebody who stole it cannot be a site: it was issued for another purpose."""
    with pytest.raises(Refused, match="bad-certificate"):
        connect(server.listener.address, 1, federation().server.client_login(), timeout_s=WAIT_S)
    return "bad-certificate"


def noise(server):
    with server.raw() as sock:
        sock.sendall(b"\x80" + os.urandom(1000))
        with suppress(ConnectionResetError):
            assert len(sock.recv(100)) in (0, 7)
    return "bad-magic"


def frames_without_a_handshake(server):
    with server.raw() as sock, suppress(ConnectionResetError):
        sock.sendall(GOOD)
        assert len(sock.recv(100)) in (0, 7)
    return "bad-magic"


def goes_in_mid_handshake(server):
    with server.raw() as sock:
        sock.sendall(b"\x16\x03\x01\x01")
    return "closed"


STRANGERS = [
    browser,
    old_tls,
    web,
    is_of_another_authority,
    has_the_servers_certificate,
    noise,
    frames_without_a_handshake,
    goes_in_mid_handshake,
]


@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda f: f.__name__)
def test_a_stranger_is_turned_away_by_name(stranger):
    with Server() as server, server.call(1) as other:
        reason = stranger(server)
        assert server.turned_away.get(timeout=WAIT_S) == reason
        assert answered(other, 1)
        assert server.turned_away.empty() and server.refused.empty()


def level(server):
    """Resident bytes, threads and descriptors once they have settled."""
    server.sessions[:] = [(s, p) for s, p in server.sessions if s.is_alive()]
    gc.collect()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss, threading.active_count(), len(os.listdir("/proc/self/fd"))


@pytest.mark.quick_cases("tls")
@pytest.mark.parametrize("tls", [False, True], ids=["token", "tls"])
def test_a_siege_leaves_no_trace(tls):
    """Every attack above, again and again, while a client is served; memory, threads and descriptors come back."""
    with Server(tls) as server, server.call(1) as good:
        served = 0

        def once():
            nonlocal served
            crowd = silent(server, 60)
            for stranger in STRANGERS if tls else [noise]:
                with suppress(PeerLost, PeerTimeout):
                    stranger(server)
            for data, _, _ in FRAMES.values():
                with server.call(2) as pair, suppress(PeerLost):
                    pair._stream.write([data])
                served += 1
                assert answered(good, served)
            for sock in crowd:
                sock.close()

        def settled(expected):
            deadline = time.monotonic() + WAIT_S
            while (now := level(server))[1:] != expected[1:] and time.monotonic() < deadline:
                time.sleep(0.05)
            return now

        while any(thread.name == "caller" for thread in threading.enumerate()):
            time.sleep(0.01)  # the one that let the client in
        before = level(server)
        for _ in range(2):  # after which buffers of all sizes have been used once
            once()
        first = settled(before)
        for _ in range(3):
            once()
        after = settled(before)
        assert first[1:] == after[1:] == before[1:], "threads and descriptors"
        assert after[0] - first[0] < 8 << 20, "resident bytes, after some 300 connections"
        assert served == 5 * len(FRAMES)
