"""The way in: addresses, who is admitted, who is turned away and why, and that nothing is left when it closes."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
import torch

from raafl.errors import BadInput, parse_address
from raafl.submodel.flat import FlatTensors
from raafl.transport import Kind, Message, PeerLost, PeerTimeout, Refused
from raafl.transport.tcp.credentials import LocalToken
from raafl.transport.tcp.listener import Listener, TokenBucket, connect
from raafl.transport.tcp.transport import is_loopback
from tests.helpers.certificates import TOKEN, federation
from tests.transport.house import WAIT_S, House, all_bytes, nothing, raw

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
        ("", "give HOST:PORT"),
        ("29500", "give HOST:PORT"),
        (":29500", "127.0.0.1:29500 for this machine only"),
        ("host", "give HOST:PORT"),
        ("host:", "give 0 to 65535"),
        ("host:65536", "give 0 to 65535"),
        ("host:-1", "0 to"),
        ("host:http", "give 0 to 65535"),
        ("::1:29500", r"in brackets, e.g. \[::1\]:29500"),
        ("host:٣", "0 to 65535"),
    ],
)
def test_bad_addresses_name_the_remedy(text, remedy):
    with pytest.raises(BadInput, match=remedy):
        parse_address(text)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("[::]", False),
        ("10.0.0.1", False),
        ("server", False),
        ("127.0.0.1.example.org", False),
        ("localhost.example.org", False),
        ("[::ffff:10.0.0.1]", False),
        ("127.1", False),
    ],
)
def test_what_this_machine_alone_can_reach(host, expected):
    assert is_loopback(f"{host}:29500") is expected


def test_a_socket_that_listens_says_itself_who_can_reach_it():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        assert is_loopback(sock)


def test_where_nothing_can_listen_is_bad_input():
    with House() as house:
        for address in (house.listener.address, "192.0.2.1:0", "no.such.host.invalid:1"):
            with pytest.raises(BadInput, match="on which this machine cannot listen"):
                Listener(address, TOKEN, print, print)


def test_of_two_that_have_bound_a_port_the_second_to_listen_is_told():
    first = House()
    second = House(first.listener.address)  # while neither listens the system lets both
    with first, pytest.raises(BadInput, match=r"on which this machine cannot listen \(Address already in use\)"):
        second.listener.start()
    second.listener.close()


@pytest.mark.parametrize("credentials", [None, TOKEN], ids=["tls", "token"])
def test_a_client_that_proves_itself_is_admitted_and_heard(credentials):
    with House(credentials=credentials) as house, house.call(3) as client:
        pair, number, address = house.admitted.get(timeout=WAIT_S)
        assert number == 3 and pair.is_encrypted == client.is_encrypted == (credentials is None)
        assert address.startswith("127.0.0.1:")
        tensors = FlatTensors.from_named({"w": torch.randn(100_000)})
        target = FlatTensors.empty(tensors.layout)
        assert client.send(Message(Kind.UPDATE, 5, 1, {"a": 1}, tensors)) > 400_000
        got = pair.recv(lambda *args: target, WAIT_S, finite=True)
        assert got.meta == {"a": 1} and target.fingerprint() == tensors.fingerprint()
        pair.send(Message(Kind.STOP))
        assert client.recv(nothing, WAIT_S).kind is Kind.STOP
    assert house.refused.empty()


def test_another_commands_token_is_refused_in_words():
    with House(credentials=TOKEN) as house:
        with pytest.raises(Refused, match=r"wrong-token: 127.*: the server was started by another command"):
            house.call(3, LocalToken(bytes(32)))
        assert house.reason() == "wrong-token"
        with house.call(3):
            assert house.admitted.get(timeout=WAIT_S)[1] == 3
        assert house.refused.empty()


def test_who_may_not_come_in_is_told_why_and_the_others_come_in():
    def authorize(peer):
        if peer.site != "north":
            raise Refused("unknown-site", f"site '{peer.site}' is not in sites.yaml")

    with House(authorize=authorize) as house:
        with pytest.raises(Refused, match=r"unknown-site: 127.*: site 'south' is not in sites\.yaml"):
            house.call(1, federation().site("south"))
        assert house.reason() == "unknown-site"
        with house.call(1):
            assert house.admitted.get(timeout=WAIT_S)[1] == 1


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
        while len(house.listener._callers) < 3:
            time.sleep(0.01)
        house.listener.close()
        assert [house.reason() for _ in waiting] == ["stopped"] * 3
        for sock in waiting:
            assert len(all_bytes(sock)[0]) in (0, 7), "nothing, or an alert"
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
        site = federation().site().client_login()
        with pytest.raises(Refused, match=f"bad-magic: {address}: the other end speaks no TLS"):
            connect(address, 1, site, timeout_s=WAIT_S)
        thread.join()
        with pytest.raises(PeerTimeout):
            connect(address, 1, site, timeout_s=0.3)
    with pytest.raises(PeerLost, match="cannot reach"):
        connect("no.such.host.invalid:1", 1, site, timeout_s=5)


def test_who_comes_too_often_is_turned_away_and_nobody_else():
    now = [0.0]
    with House(turns=TokenBucket(2, 10.0, lambda: now[0])) as house:
        for _ in range(2):
            house.call(1).close()
            house.admitted.get(timeout=WAIT_S)
        for _ in range(2):
            with pytest.raises(PeerLost, match="too-often: client 1: try again later"):
                house.call(1)
            assert house.reason() == "too-often"
        house.call(2).close()
        house.admitted.get(timeout=WAIT_S)
        now[0] = 10.0
        house.call(1).close()
        house.admitted.get(timeout=WAIT_S)
