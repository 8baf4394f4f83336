"""Callers that a listener has not admitted: what they cost, and how many there may be."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time

import pytest

from raafl.errors import parse_address
from raafl.transport import Kind, Message, PeerLost, PeerTimeout, Refused
from raafl.transport.tcp import handshake
from raafl.transport.tcp import listener as module
from raafl.transport.tcp.stream import SocketStream, TimeBudget
from tests.transport.house import SECRET, WAIT_S, House, all_bytes, nothing, raw

pytestmark = pytest.mark.timeout(90)


def test_an_unauthenticated_peer_gets_a_challenge_and_not_a_byte_more():
    """Everything that a peer without the secret can get out of a server, whatever it serves."""
    hello = b"RAHS" + struct.pack("<HHI", 1, 0, 3) + os.urandom(32)
    tries = {
        "nothing": b"",
        "a tls client": bytes.fromhex("16030100") + os.urandom(300),
        "http": b"GET /model HTTP/1.1\r\nHost: x\r\n\r\n",
        "half a hello": hello[:20],
        "a hello": hello,
        "a hello that demands encryption": hello[:6] + b"\x01\x00" + hello[8:],
        "unknown flags": hello[:6] + b"\xfe\xff" + hello[8:],
        "client 0": hello[:8] + bytes(4) + hello[12:],
        "the last client": hello[:8] + b"\xff" * 4 + hello[12:],
        "a guessed proof": hello + os.urandom(64),
        "an all-zero proof": hello + bytes(64),
        "a guess and frames": hello + os.urandom(64) + b"RAFL" * 1000,
        "another version": b"RAHS" + struct.pack("<HH", 2, 0) + os.urandom(500),
    }
    silent = ("nothing", "a tls client", "http", "half a hello")
    nonces = set()
    for house in (House(), House(encrypt=True, timeout_s=1.0)):
        with house:
            for name, said in tries.items():
                with raw(house.listener.address) as sock:
                    with contextlib.suppress(OSError):  # it may have hung up before all was said
                        sock.sendall(said)
                        sock.shutdown(socket.SHUT_WR)
                    data, _ = all_bytes(sock)
                if name in silent:
                    assert data == b"", name
                else:
                    assert data[:8] == b"RAHS\x01\x00\x00\x00" and len(data) == 40, name
                    nonces.add(data[8:])
                house.reason()
            assert house.admitted.empty() and house.refused.empty()
    assert len(nonces) == 2 * (len(tries) - len(silent)), "a nonce came twice"


def test_a_silent_caller_is_a_timeout(monkeypatch):
    monkeypatch.setattr(module, "HANDSHAKE_S", 0.3)
    with House() as house, raw(house.listener.address) as sock:
        assert house.reason() == "timeout"
        assert all_bytes(sock) == (b"", False)


def test_a_caller_that_drips_is_a_timeout(monkeypatch):
    monkeypatch.setattr(module, "HANDSHAKE_S", 0.5)
    with House() as house, raw(house.listener.address) as sock:
        with pytest.raises(OSError):
            for byte in b"RAHS" + struct.pack("<HHI", 1, 0, 3) + bytes(500):
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
        assert all_bytes(silent[0]) == (b"", False), "the first to come went first"
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
        handshake.client_handshake(SocketStream(lonely, TimeBudget(WAIT_S), 0), SECRET.for_client(2), False)
        assert house.admitted.get(timeout=WAIT_S)[1:] == (2, f"127.0.0.2:{lonely.getsockname()[1]}")
        for sock in (lonely, *crowd):
            sock.close()


def test_a_host_may_hold_only_so_many_places():
    with House(max_callers=10, max_per_host=2) as house:
        crowd = [raw(house.listener.address) for _ in range(5)]
        assert [house.reason() for _ in range(3)] == ["busy"] * 3
        assert all_bytes(crowd[0])[0] == b""
        for sock in crowd:
            sock.close()


def test_those_who_are_being_admitted_keep_their_places():
    inside, leave = threading.Event(), threading.Event()

    def admit(pair, client, address):
        inside.set()
        assert leave.wait(WAIT_S)
        pair.close()

    with House(admit=admit, max_callers=1) as house:
        first = house.call(1)
        assert inside.wait(WAIT_S)
        with pytest.raises((PeerLost, PeerTimeout)):
            house.call(2)
        assert house.reason() == "busy"
        leave.set()
        first.close()


def test_admit_may_refuse():
    def admit(pair, client, address):
        pair.send(Message(Kind.STOP, meta={"reason": "no such client"}))
        raise Refused("unknown-client", str(client))

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
