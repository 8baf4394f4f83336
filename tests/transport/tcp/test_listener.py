"""The way in: addresses, who is admitted, who is turned away and why, and that nothing is left when it closes."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading

import pytest
import torch

from raafl.errors import BadInput, parse_address
from raafl.submodel.flat import FlatTensors
from raafl.transport import Kind, Message, PeerLost, PeerTimeout, Refused
from raafl.transport.tcp import handshake
from raafl.transport.tcp import listener as module
from raafl.transport.tcp.handshake import ClientKey, Secret
from raafl.transport.tcp.listener import Listener, connect
from raafl.transport.tcp.rate_limit import TokenBucket
from tests.transport.house import SECRET, WAIT_S, House, all_bytes, nothing, raw

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:29500", ("127.0.0.1", 29500)),
        ("server.example.org:0", ("server.example.org", 0)),
        ("[::1]:65535", ("::1", 65535)),
        (" 0.0.0.0:80 ", ("0.0.0.0", 80)),
    ],
)
def test_addresses(text, expected):
    assert parse_address(text) == expected


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("", "give HOST:PORT"), ("29500", "give HOST:PORT"), (":29500", "127.0.0.1:29500 for this machine only"),
        ("host", "give HOST:PORT"), ("host:", "give 0 to 65535"), ("host:65536", "give 0 to 65535"), ("host:-1", "0 to"),
        ("host:http", "give 0 to 65535"), ("::1:29500", r"in brackets, e.g. \[::1\]:29500"), ("host:٣", "0 to 65535"),
    ],
)  # fmt: skip
def test_bad_addresses_name_the_remedy(text, remedy):
    with pytest.raises(BadInput, match=remedy):
        parse_address(text)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", False), ("127.8.9.10", False), ("[::1]", False), ("localhost", False),
        ("0.0.0.0", True), ("[::]", True), ("10.0.0.1", True), ("server", True), ("127.0.0.1.example.org", True),
        ("localhost.example.org", True), ("[::ffff:10.0.0.1]", True), ("127.1", True),
    ],
)  # fmt: skip
def test_whoever_is_not_alone_encrypts(host, expected):
    assert module.encrypts(f"{host}:29500", None) is expected
    assert module.encrypts(f"{host}:29500", False) is False and module.encrypts(f"{host}:29500", True) is True


def test_a_socket_that_listens_says_itself_who_can_reach_it():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        assert module.encrypts(sock, None) is False and module.encrypts(sock, True) is True


def test_where_nothing_can_listen_is_bad_input():
    with House() as house:
        for address in (house.listener.address, "192.0.2.1:0", "no.such.host.invalid:1"):
            with pytest.raises(BadInput, match="where nothing can listen"):
                Listener(address, SECRET, print, print)


def test_of_two_that_have_bound_a_port_the_second_to_listen_is_told():
    first = House()
    second = House(first.listener.address)  # while neither listens the system lets both
    with first, pytest.raises(BadInput, match=r"where nothing can listen \(Address already in use\)"):
        second.listener.start()
    second.listener.close()


def test_a_clients_key_is_not_enough_for_a_server():
    with pytest.raises(BadInput, match="client 3 alone: a server needs the run's whole secret"):
        Listener("127.0.0.1:0", Secret(b"k" * 32, client=3), print, print)


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_client_with_the_secret_is_admitted_and_heard(encrypt):
    with House(encrypt=encrypt) as house, house.call(3) as client:
        pair, number, address = house.admitted.get(timeout=WAIT_S)
        assert number == 3 and pair.sealed == client.sealed == encrypt
        assert address.startswith("127.0.0.1:")
        tensors = FlatTensors.from_named({"w": torch.randn(100_000)})
        target = FlatTensors.empty(tensors.layout)
        assert client.send(Message(Kind.UPDATE, 5, 1, {"a": 1}, tensors)) > 400_000
        got = pair.recv(lambda *args: target, WAIT_S, finite=True)
        assert got.meta == {"a": 1} and target.fingerprint() == tensors.fingerprint()
        pair.send(Message(Kind.STOP))
        assert client.recv(nothing, WAIT_S).kind is Kind.STOP
    assert house.refused.empty()


def test_a_client_with_its_own_key_only(tmp_path):
    path = tmp_path / "key"
    path.write_text(SECRET.for_client(3).text())
    path.chmod(0o600)
    with (
        House() as house,
        connect(house.listener.address, handshake.load_secret(str(path)).for_client(3), timeout_s=WAIT_S),
    ):
        assert house.admitted.get(timeout=WAIT_S)[1] == 3


@pytest.mark.parametrize("key", [Secret(b"not the run's secret").for_client(3), ClientKey(4, SECRET.for_client(3).key)])
def test_a_wrong_key_is_refused_on_both_sides(key):
    with House() as house:
        with pytest.raises(Refused) as caught:
            connect(house.listener.address, key, timeout_s=WAIT_S)
        assert caught.value.reason == "wrong-secret" and house.listener.address in str(caught.value)
        assert house.reason() == "wrong-secret"
        with house.call(3):
            assert house.admitted.get(timeout=WAIT_S)[1] == 3
        assert house.refused.empty()


def test_demanded_encryption():
    with House() as house:
        with pytest.raises(Refused, match=r"not-encrypted: 127.*--encrypt true"):
            house.call(demand_encryption=True)
        assert house.reason() == "not-encrypted"
    with House(encrypt=True) as house, house.call(demand_encryption=True) as pair:
        assert pair.sealed


def test_another_version(monkeypatch, caplog):
    with House() as house:
        with raw(house.listener.address) as sock:
            sock.sendall(b"RAHS" + struct.pack("<HH", 9, 0) + b"more than is read of an unknown version" * 10)
            data, orderly = all_bytes(sock)
            assert data[:8] == b"RAHS\x01\x00\x00\x00" and len(data) == 40 and orderly
        assert house.reason() == "bad-version"
    assert "the client speaks version 9 of the handshake, this server 1" in caplog.text


def test_an_inherited_listening_socket():
    listener = socket.create_server(("127.0.0.1", 0))
    with House(listener) as house, house.call(1):
        assert house.listener.address == f"127.0.0.1:{parse_address(house.listener.address)[1]}"
        assert house.admitted.get(timeout=WAIT_S)[1] == 1
    assert listener.fileno() == -1


@pytest.mark.skipif(not socket.has_ipv6, reason="this system has no IPv6")
def test_ipv6():
    try:
        house = House("[::1]:0")
    except BadInput:
        pytest.skip("the loopback interface has no IPv6 address")
    with house, house.call(1):
        assert house.listener.address.startswith("[::1]:")
        assert house.admitted.get(timeout=WAIT_S)[2].startswith("[::1]:")


def test_close_ends_threads_frees_the_port_and_leaves_admitted_pairs():
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    house = House()
    with house:
        client = house.call(1)
        pair, *_ = house.admitted.get(timeout=WAIT_S)
        waiting = [raw(house.listener.address) for _ in range(3)]
        for sock in waiting:
            sock.sendall(b"RAHS" + struct.pack("<HHI", 1, 0, 3) + bytes(32))
            assert len(sock.recv(40, socket.MSG_WAITALL)) == 40
        house.listener.close()
        assert [house.reason() for _ in waiting] == ["stopped"] * 3
        for sock in waiting:
            assert all_bytes(sock) == (b"", False), "an end that is no judgement on a proof is a reset"
            sock.close()
        with pytest.raises(PeerLost, match="connection-refused: nothing listens at"):
            house.call(1)
        client.send(Message(Kind.KEEPALIVE))
        assert pair.recv(nothing, WAIT_S).kind is Kind.KEEPALIVE
        with House(house.listener.address):
            pass
        client.close()
    house.listener.close()
    # no more than before: what a test before this one left may have ended meanwhile
    assert threading.active_count() <= before[0] and len(os.listdir("/proc/self/fd")) <= before[1]


def test_a_listener_that_was_never_started_can_be_closed():
    house = House()
    house.listener.close()
    with pytest.raises(PeerLost, match="connection-refused: nothing listens at"):
        house.call(1)


def test_call_where_something_else_listens():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def answer():
            sock, _ = listener.accept()
            with sock:
                sock.sendall(b"220 mail.example.org ESMTP\r\n")
                sock.recv(1000)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Refused, match=f"bad-magic: {address}: what answers is no raafl server"):
            connect(address, SECRET.for_client(1), timeout_s=WAIT_S)
        thread.join()
        with pytest.raises(PeerTimeout):
            connect(address, SECRET.for_client(1), timeout_s=0.3)
    with pytest.raises(PeerLost, match="cannot reach"):
        connect("no.such.host.invalid:1", SECRET.for_client(1), timeout_s=5)


def test_who_comes_too_often_is_turned_away_before_anything_is_reckoned_and_nobody_else(monkeypatch):
    now = [0.0]
    greeted = []
    monkeypatch.setattr(handshake, "_client_key", lambda secret, client, made=handshake._client_key: (
        greeted.append(threading.current_thread().name), made(secret, client))[1])  # fmt: skip
    with House(turns=TokenBucket(2, 10.0, lambda: now[0])) as house:
        for _ in range(2):
            house.call(1).close()
            house.admitted.get(timeout=WAIT_S)
        with contextlib.closing(house.call(1)) as pair, pytest.raises(PeerLost):  # proven, and one too many
            pair.recv(nothing, WAIT_S)
        assert house.reason() == "too-often"
        before = greeted.count("caller")
        with pytest.raises(PeerLost):
            house.call(1)
        assert house.reason() == "too-often" and greeted.count("caller") == before
        house.call(2).close()
        house.admitted.get(timeout=WAIT_S)
        now[0] = 10.0
        house.call(1).close()
        house.admitted.get(timeout=WAIT_S)
