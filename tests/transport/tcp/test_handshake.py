"""Secrets and the handshake: what is proven, by whom, to whom, and what an outsider can do about it."""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest

from raafl.commands.cli import main
from raafl.errors import BadInput
from raafl.transport import PeerLost, PeerTimeout, Refused
from raafl.transport.tcp import handshake
from raafl.transport.tcp.cipher import derive
from raafl.transport.tcp.handshake import (
    CHALLENGE_BYTES,
    ClientKey,
    Secret,
    client_handshake,
    load_secret,
    server_handshake,
)
from raafl.transport.tcp.stream import SocketStream, TimeBudget

SECRET = Secret(b"sixteen bytes or more")


@pytest.fixture(autouse=True)
def no_secret_in_the_environment(monkeypatch):
    monkeypatch.delenv("RAAFL_SECRET", raising=False)
    monkeypatch.delenv("RAAFL_SECRET_FILE", raising=False)


def secret_file(folder, content, mode=0o600):
    path = folder / "raafl.secret"
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def test_secrets_come_from_the_option_the_variable_or_the_file_it_names(tmp_path, monkeypatch):
    path = secret_file(tmp_path, b"  the option's secret\n")
    monkeypatch.setenv("RAAFL_SECRET_FILE", path)
    assert load_secret() == Secret(b"the option's secret")
    monkeypatch.setenv("RAAFL_SECRET", "the variable's secret")
    assert load_secret() == Secret(b"the variable's secret")
    assert load_secret(path) == Secret(b"the option's secret")


def test_no_secret_names_the_remedy_and_the_remedy_works(tmp_path, monkeypatch):
    with pytest.raises(BadInput, match=r"--secret_file FILE.*RAAFL_SECRET.*this makes a file: ") as caught:
        load_secret()
    command = str(caught.value).partition("this makes a file: ")[2]
    monkeypatch.chdir(tmp_path)
    assert main(command.split()[1:]) == 0
    made = load_secret("raafl.secret")
    assert made.client is None and made.key.startswith(b"raafl-run-") and len(made.key) == 10 + 8 + 1 + 64


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_file_that_others_may_use_is_bad_input(tmp_path, mode):
    path = secret_file(tmp_path, b"sixteen bytes or more", mode)
    with pytest.raises(BadInput, match=rf"mode {mode:o}\): chmod 600 '.*raafl.secret'"):
        load_secret(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"fifteen bytes..", "secret of 15 bytes: give 16 to 4096"),
        (b"  fifteen bytes..  \n", "secret of 15 bytes"),
        (b"", "secret of 0 bytes"),
        (b"x" * 5000, "more than 4096"),
        (b"raafl-client-3:" + b"ab" * 31, "no client's key"),
        (b"raafl-client-0:" + b"ab" * 32, "no client's key"),
        (b"raafl-client-x:" + b"ab" * 32, "no client's key"),
        (b"raafl-client-3:" + b"xy" * 32, "no client's key"),
    ],
)
def test_bad_secrets(tmp_path, monkeypatch, content, message):
    with pytest.raises(BadInput, match=message):
        load_secret(secret_file(tmp_path, content))
    if content:
        monkeypatch.setenv("RAAFL_SECRET", content.decode())
        with pytest.raises(BadInput, match=message):
            load_secret()


def test_a_missing_file_is_bad_input(tmp_path):
    with pytest.raises(BadInput, match="No such file"):
        load_secret(str(tmp_path / "none"))


def test_a_client_key_is_good_for_its_client_only(tmp_path):
    key = SECRET.for_client(3)
    assert key.text() == "raafl-client-3:" + key.key.hex()
    mine = load_secret(secret_file(tmp_path, key.text().encode() + b"\n"))
    assert mine.client == 3 and mine.for_client(3) == key
    with pytest.raises(BadInput, match="key of client 3"):
        mine.for_client(5)
    assert SECRET.for_client(5).key != key.key
    for wrong in (0, -1, 2**32):
        with pytest.raises(BadInput, match="client is"):
            SECRET.for_client(wrong)


def test_keys_are_not_shown():
    assert "sixteen" not in repr(SECRET) and SECRET.for_client(3).key.hex() not in repr(SECRET.for_client(3))
    assert str(SECRET.for_client(3).key) not in repr(SECRET.for_client(3))


class Ends:
    """Two connected sockets."""

    def __init__(self):
        self.server, self.client = socket.socketpair()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.server.close()
        self.client.close()


def stream(sock, timeout_s=10.0):
    return SocketStream(sock, TimeBudget(timeout_s), 0)


def outcome(call, sock):
    """What a side of the handshake returned or raised; it hangs up after an error, as the listener does."""
    try:
        return call()
    except (Refused, PeerLost, PeerTimeout) as error:
        sock.close()
        return error


def shake(key, secret=SECRET, encrypt=False, demand=False, meddle=None):
    """Run both sides, with a man in the middle where ``meddle(number, message)`` is given; return both outcomes."""
    with Ends() as one, Ends() as other, ThreadPoolExecutor(3) as pool:
        far = other if meddle else one
        server = pool.submit(outcome, lambda: server_handshake(stream(far.server), secret, encrypt), far.server)
        client = pool.submit(outcome, lambda: client_handshake(stream(one.client), key, demand), one.client)
        if meddle:
            relay(one.server, other.client, meddle)
        return server.result(20), client.result(20)


def relay(client, server, meddle):
    """Pass the four messages on, changed; end both connections where one ends."""
    for number, (source, sink, length) in enumerate(
        [(client, server, 44), (server, client, CHALLENGE_BYTES), (client, server, 64), (server, client, 68)]
    ):
        data = b""
        source.settimeout(10)
        while len(data) < length and (more := source.recv(length - len(data))):
            data += more
        if len(data) < length:
            break
        sink.sendall(meddle(number, data))
    for sock in (client, server):
        sock.close()


@pytest.mark.parametrize("encrypt", [False, True])
def test_both_ends_agree(encrypt):
    (client, ours), theirs = shake(SECRET.for_client(3), encrypt=encrypt)
    assert client == 3
    if not encrypt:
        assert ours is None and theirs is None
        return
    assert (ours.sending, ours.receiving) == (theirs.receiving, theirs.sending)
    assert ours.sending != ours.receiving and len(ours.sending) == 32
    (_, again), _ = shake(SECRET.for_client(3), encrypt=True)
    assert {again.sending, again.receiving}.isdisjoint({ours.sending, ours.receiving}), "keys are a session's own"


def test_the_messages_by_hand():
    """A client of its own making, from the table in the module's docstring, is let in."""
    key = SECRET.for_client(7)
    with Ends() as ends, ThreadPoolExecutor(1) as pool:
        server = pool.submit(server_handshake, stream(ends.server), SECRET, False)
        hello = b"RAHS" + struct.pack("<HHI", 1, 0, 7) + b"n" * 32
        ends.client.sendall(hello)
        challenge = receive(ends.client, 40)
        assert challenge[:8] == b"RAHS\x01\x00\x00\x00"
        said = hello + challenge + b"s" * 32
        proof = hmac.new(derive(key.key, b"", b"raafl client proof"), said, hashlib.sha256).digest()
        ends.client.sendall(b"s" * 32 + proof)
        confirm = receive(ends.client, 68)
        assert confirm[:4] == bytes(4)
        mac = hmac.new(
            derive(key.key, b"", b"raafl server proof"), said + proof + confirm[:36], hashlib.sha256
        ).digest()
        assert confirm[36:] == mac and server.result(10) == (7, None)


def receive(sock, length):
    data = b""
    sock.settimeout(10)
    while len(data) < length and (more := sock.recv(length - len(data))):
        data += more
    return data


@pytest.mark.parametrize(
    "key",
    [
        Secret(b"another secret of a run").for_client(3),
        ClientKey(3, SECRET.for_client(4).key),  # client 4 says that it is client 3
        ClientKey(3, bytes(32)),
        ClientKey(3, SECRET.key),
    ],
)
def test_a_wrong_key_is_a_wrong_secret_on_both_sides(key):
    for error in shake(key):
        assert isinstance(error, Refused) and error.reason == "wrong-secret"


def test_a_server_that_does_not_know_the_secret_is_found_out():
    """A server that takes every proof cannot make its own."""
    key = SECRET.for_client(3)
    with Ends() as ends, ThreadPoolExecutor(1) as pool:
        client = pool.submit(outcome, lambda: client_handshake(stream(ends.client), key, False), ends.client)
        receive(ends.server, 44)
        ends.server.sendall(b"RAHS\x01\x00\x00\x00" + b"n" * 32)
        proof = receive(ends.server, 64)
        ends.server.sendall(bytes(4) + b"s" * 32 + proof[32:])  # sends the client's own proof back
        error = client.result(20)
    assert error.reason == "wrong-secret" and "the server does not know" in error.detail


def test_every_flipped_bit_of_the_handshake_is_refused_by_both_or_one():
    """Flags, ids, nonces, shares: nothing can be altered on the way without one side breaking off before it is used."""
    fields = [
        (0, 6),
        (0, 8),
        (0, 12),
        (0, 43),
        (1, 8),
        (1, 39),
        (2, 0),
        (2, 31),
        (2, 32),
        (2, 63),
        (3, 0),
        (3, 4),
        (3, 67),
    ]
    for encrypt in (False, True):
        for message, byte in fields:

            def flip(number, data, message=message, byte=byte):
                return data[:byte] + bytes([data[byte] ^ 1]) + data[byte + 1 :] if number == message else data

            server, client = shake(SECRET.for_client(3), encrypt=encrypt, meddle=flip)
            assert isinstance(client, Exception), f"the client believed byte {byte} of message {message}"
            assert message == 3 or isinstance(server, Exception), (
                f"the server believed byte {byte} of message {message}"
            )


def test_encryption_cannot_be_talked_away():
    def no_demand(number, data):
        return data[:6] + bytes(2) + data[8:] if number == 0 else data

    def not_encrypted(number, data):
        return bytes(4) + data[4:] if number == 3 else data

    server, client = shake(SECRET.for_client(3), encrypt=False, demand=True, meddle=no_demand)
    assert server.reason == "wrong-secret" and client.reason == "wrong-secret"
    _, client = shake(SECRET.for_client(3), encrypt=True, meddle=not_encrypted)
    assert client.reason == "wrong-secret"


def test_a_demand_that_is_not_met_ends_both_sides_by_name():
    for error in shake(SECRET.for_client(3), encrypt=False, demand=True):
        assert isinstance(error, Refused) and error.reason == "not-encrypted"
    (_, ours), theirs = shake(SECRET.for_client(3), encrypt=True, demand=True)
    assert ours.sending == theirs.receiving


def test_a_recorded_handshake_cannot_be_played_again():
    said = []
    shake(SECRET.for_client(3), meddle=lambda number, data: said.append(data) or data)
    with Ends() as ends, ThreadPoolExecutor(1) as pool:
        server = pool.submit(outcome, lambda: server_handshake(stream(ends.server), SECRET, False), ends.server)
        ends.client.sendall(said[0])
        assert receive(ends.client, 40) != said[1], "a nonce came twice"
        ends.client.sendall(said[2])
        assert server.result(20).reason == "wrong-secret"
        assert receive(ends.client, 1) == b""


def test_shares_without_a_secret_are_refused_where_they_count():
    """The point at infinity would give every session the same shared secret."""
    key = SECRET.for_client(3)
    with Ends() as ends, ThreadPoolExecutor(1) as pool:
        server = pool.submit(outcome, lambda: server_handshake(stream(ends.server), SECRET, True), ends.server)
        hello = b"RAHS" + struct.pack("<HHI", 1, 0, 3) + b"n" * 32
        ends.client.sendall(hello)
        said = hello + receive(ends.client, 40) + bytes(32)
        ends.client.sendall(bytes(32) + hmac.digest(derive(key.key, b"", b"raafl client proof"), said, "sha256"))
        assert server.result(20).reason == "bad-share"


def test_another_version_is_one_clear_line_on_both_sides(monkeypatch):
    with Ends() as ends, ThreadPoolExecutor(2) as pool:
        server = pool.submit(outcome, lambda: server_handshake(stream(ends.server), SECRET, False), ends.server)
        ends.client.sendall(b"RAHS" + struct.pack("<HHI", 2, 0, 3) + b"a newer hello may be of any length")
        assert receive(ends.client, 40)[:8] == b"RAHS\x01\x00\x00\x00"
        refused = server.result(20)
    assert str(refused) == "bad-version: the client speaks version 2 of the handshake, this server 1"
    with Ends() as ends, ThreadPoolExecutor(2) as pool:
        client = pool.submit(
            outcome, lambda: client_handshake(stream(ends.client), SECRET.for_client(3), False), ends.client
        )
        ends.server.sendall(b"RAHS" + struct.pack("<HH", 2, 0) + bytes(32))
        refused = client.result(20)
    assert str(refused).startswith("bad-version: the server speaks version 2 of the handshake, this client 1: ")
    assert handshake.VERSION == 1


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01", b"HEAD / H", bytes(8)]
)
def test_what_is_no_raafl_is_bad_magic_as_soon_as_it_is_seen(said):
    for run in (
        lambda sock: server_handshake(stream(sock), SECRET, False),
        lambda sock: client_handshake(stream(sock), SECRET.for_client(3), False),
    ):
        with Ends() as ends:
            ends.client.sendall(said)
            assert outcome(lambda run=run, sock=ends.server: run(sock), ends.server).reason == "bad-magic"


def test_silence_is_a_timeout_and_a_closed_connection_a_lost_peer():
    with Ends() as ends:
        with pytest.raises(PeerTimeout):
            server_handshake(stream(ends.server, 0.2), SECRET, False)
        with pytest.raises(PeerTimeout):
            client_handshake(stream(ends.client, 0.2), SECRET.for_client(3), False)
    with Ends() as ends:
        ends.client.close()
        with pytest.raises(PeerLost):
            server_handshake(stream(ends.server), SECRET, False)
