"""Callers that a listener has not admitted: what they cost, and how many there may be."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import time

import pytest

from raafl.errors import parse_address
from raafl.transport import Kind, Message, PeerLost, Refused
from raafl.transport.tcp import listener as module
from raafl.transport.tcp.listener import VERSION, client_opening, opening_stream
from tests.helpers.certificates import TOKEN, federation
from tests.transport.house import WAIT_S, House, all_bytes, nothing, raw

ALERT = (0, 7)  # bytes of no answer, or of one alert
pytestmark = pytest.mark.timeout(90)


def client_hello():
    """What OpenSSL says first, to a server called localhost."""
    bio_in, bio_out = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = federation().site().context(server=False).wrap_bio(bio_in, bio_out, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return bio_out.read()


def test_what_an_unauthenticated_peer_gets():
    """Over TLS: an alert of seven bytes, or TLS's own answer to a sound greeting. With a token: words that tell of nothing."""
    opening = b"RAJN" + struct.pack("<HHI", VERSION, 0, 3)
    tries = {
        "nothing": b"",
        "http": b"GET /model HTTP/1.1\r\nHost: x\r\n\r\n",
        "an opening in the clear": opening + TOKEN.token,
        "frames": b"RAFL" * 1000,
        "noise": os.urandom(500),
        "half a greeting": client_hello()[:100],
    }
    with House() as house:
        for name, said in tries.items():
            assert len(answer(house, said)) in ALERT, name
        data = answer(house, client_hello())
        assert data[:3] == b"\x16\x03\x03" and b"tests" not in data and b"BEGIN" not in data, (
            "TLS encrypts its certificate"
        )
        assert house.admitted.empty() and house.refused.empty()
    del tries["an opening in the clear"]  # it lets in whoever knows the token
    with House(credentials=TOKEN) as house:
        for name, said in (
            tries | {"a guess": opening + os.urandom(32), "a guess and frames": opening + bytes(5000)}
        ).items():
            data = answer(house, said)
            guessed = name.startswith("a guess")
            assert data[8:] == (
                b"wrong-token: the server was started by another command" if guessed else b""
            ) or name == ("an opening in the clear"), name
        assert house.refused.empty()


def answer(house, said):
    """All bytes that a server answers to what somebody says."""
    with raw(house.listener.address) as sock:
        with contextlib.suppress(OSError):  # it may have hung up before all was said
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
        data, _ = all_bytes(sock)
    house.reason()
    return data


def test_a_silent_caller_is_a_timeout(monkeypatch):
    monkeypatch.setattr(module, "HANDSHAKE_S", 0.3)
    with House() as house, raw(house.listener.address) as sock:
        assert house.reason() == "timeout"
        assert all_bytes(sock) == (b"", False)


def test_a_caller_that_drips_is_a_timeout(monkeypatch):
    monkeypatch.setattr(module, "HANDSHAKE_S", 0.5)
    with House() as house, raw(house.listener.address) as sock:
        with pytest.raises(OSError):
            for byte in client_hello():
                sock.send(bytes([byte]))
                time.sleep(0.05)
        assert house.reason() == "timeout"


def test_a_caller_that_goes_is_closed():
    with House() as house:
        raw(house.listener.address).close()
        assert house.reason() == "closed"


def test_the_longest_waiting_gives_up_its_place():
    with House(max_callers=3) as house:
        silent = [raw(house.listener.address) for _ in range(3)]
        with house.call(1):
            assert house.admitted.get(timeout=WAIT_S)[1] == 1
        assert house.reason() == "busy" and house.refused.empty()
        data, orderly = all_bytes(silent[0])
        assert len(data) in ALERT and not orderly, "the first to come went first"
        for sock in silent:
            sock.close()
        assert sorted(house.reason() for _ in silent[1:]) == ["closed", "closed"]


def test_a_place_is_taken_from_the_host_that_holds_most():
    with House(max_callers=4) as house:
        address = parse_address(house.listener.address)
        lonely = socket.create_connection(address, WAIT_S, source_address=("127.0.0.2", 0))
        crowd = [raw(house.listener.address) for _ in range(20)]
        for _ in range(17):
            assert house.reason() == "busy"
        site = federation().site()
        port = lonely.getsockname()[1]
        login = site.client_login()
        lonely = login.context().wrap_socket(lonely, server_hostname="127.0.0.1", do_handshake_on_connect=False)
        client_opening(opening_stream(lonely, WAIT_S), 2, login)
        assert house.admitted.get(timeout=WAIT_S)[1:] == (2, f"127.0.0.2:{port}")
        for sock in (lonely, *crowd):
            sock.close()


def test_a_host_may_hold_only_so_many_places():
    with House(max_callers=10, max_per_host=2) as house:
        crowd = [raw(house.listener.address) for _ in range(5)]
        assert [house.reason() for _ in range(3)] == ["busy"] * 3
        assert len(all_bytes(crowd[0])[0]) in ALERT
        for sock in crowd:
            sock.close()


def test_admit_may_refuse():
    def admit(pair, peer):
        pair.send(Message(Kind.STOP, meta={"reason": "no such client"}))
        raise Refused("unknown-client", str(peer.client))

    with House(admit=admit) as house, house.call(99) as pair:
        pair.send(Message(Kind.HELLO))  # which nobody reads
        assert pair.recv(nothing, WAIT_S).meta == {"reason": "no such client"}
        assert house.reason() == "unknown-client"
        with pytest.raises(PeerLost):
            pair.recv(nothing, WAIT_S)


def test_an_admit_that_fails_is_counted_and_the_listener_goes_on(caplog):
    with House(admit=lambda *args: 1 // 0) as house:
        for client in (1, 2):
            with house.call(client):
                assert house.reason() == "failed"
    assert "ZeroDivisionError" in caplog.text


def test_a_report_that_fails_does_not_end_the_listener(caplog):
    house = House()

    def report(reason):
        house.refused.put(reason)
        raise OSError("the disk is full")

    house.listener._refused = report
    with house:
        raw(house.listener.address).close()
        assert house.reason() == "closed"
        with house.call(1):
            house.admitted.get(timeout=WAIT_S)
