"""Damaged frames through TLS, damage below it, and damaged openings: a sound beginning is read, or nothing."""

from __future__ import annotations

import os
import random
import socket
import ssl
import struct
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raafl.transport import PeerLost, Refused
from raafl.transport.tcp.connection import TcpConnection
from raafl.transport.tcp.listener import VERSION, client_opening, opening_stream, server_opening
from raafl.transport.tcp.stream import block
from tests.helpers.certificates import TOKEN, federation
from tests.transport.test_fuzz import (
    DRAIN_BYTES,
    MUTATIONS,
    REASONS,
    VALID,
    Memory,
    expectation,
    flip_bits,
    move,
    noise,
    truncate,
)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def contexts():
    return federation().server.context(server=True), federation().site().context(server=False)


def over_tls(contexts):
    """Two connected TLS sockets after their handshake, in one thread: neither blocks."""
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)
    server = contexts[0].wrap_socket(ours, server_side=True, do_handshake_on_connect=False)
    client = contexts[1].wrap_socket(theirs, server_hostname="localhost", do_handshake_on_connect=False)
    left = [client, server]
    while left:
        with suppress(ssl.SSLWantReadError):
            left[0].do_handshake()
            left.pop(0)
            continue
        left.reverse()
    return server, client


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_real_pair_over_a_socket(tls, contexts):
    """The same damage through sockets and through TLS; the sender hangs up after each frame."""
    rng, seen = random.Random(7), Counter()
    for _ in range(300 if tls else 1_500):
        ours, theirs = over_tls(contexts) if tls else socket.socketpair()
        pair = TcpConnection(ours, 60)
        pair._frames.drain_bytes = DRAIN_BYTES
        with TcpConnection(theirs, 60) as sender:
            sender._stream.write([rng.choice(MUTATIONS)(rng, rng.choice(VALID))])
        expect = expectation(rng)
        while not pair.closed:
            try:
                pair.recv(expect, 60, finite=True)
                seen["message"] += 1
            except Refused as refused:
                seen[refused.reason] += 1
            except PeerLost as lost:
                assert lost.reason == "connection-closed" and pair.closed
                seen["lost"] += 1
    assert set(seen) <= REASONS and seen["message"] > 20 and seen["lost"] > 20


def test_damage_below_tls(contexts):
    """Of 300 damaged sessions nothing is read but sound beginnings: records are taken in order, unchanged, or not at all."""
    rng, ends = random.Random(11), Counter()
    for _ in range(300):
        server, client = over_tls(contexts)
        records, plains = [], [rng.randbytes(rng.randrange(1, 60)) for _ in range(4)]
        out = socket.socket(fileno=os.dup(server.fileno()))  # takes the records away before TLS reads them
        for plain in plains:
            client.send(plain)
            records.append(out.recv(1 << 16))
        data = bytearray(b"".join(rng.choices(records, k=4) if rng.random() < 0.3 else records))
        data = rng.choice((flip_bits, truncate, move))(rng, data)
        socket.socket.sendall(client, data)
        got = bytearray()
        pair = TcpConnection(server, 60)
        socket.socket.shutdown(client, socket.SHUT_WR)
        try:
            while True:
                byte = bytearray(1)
                pair._stream.read_into(memoryview(byte))
                got += byte
        except Refused as refused:
            ends[refused.reason] += 1
        except PeerLost as lost:
            ends[lost.reason] += 1
        for sock in (out, client):
            sock.close()
        pair.close()
        assert b"".join(plains).startswith(got)
    assert set(ends) <= {"bad-record", "connection-closed", "tls-failed", "bad-certificate", "no-certificate"}
    assert ends["bad-record"] > 100


def opened(data, expected, sock=None):
    """What a server makes of the bytes with which somebody opens."""
    peers = []
    try:
        peers.append(block(server_opening(sock or Memory(data), expected.server_login(), "test", lambda peer: None)))
    except Refused as refused:
        return refused.reason
    except PeerLost:
        return "lost"
    return peers


def test_damaged_openings():
    """10,000 openings by somebody without the token: none is taken."""
    rng, reasons = random.Random(13), Counter()
    hello = b"RAJN" + struct.pack("<HHI", VERSION, 0, 3) + TOKEN.token
    for number in range(10_000):
        data = bytearray(hello if number % 2 else hello[:12] + rng.randbytes(32))
        data[rng.randrange(12, 44)] ^= 1 << rng.randrange(8)
        if rng.random() < 0.8:
            data = rng.choice((flip_bits, truncate))(rng, data)
        if data[12:44] != TOKEN.token:
            reasons[opened(data, TOKEN)] += 1
    assert set(reasons) == {"bad-magic", "bad-version", "wrong-token", "lost"}
    assert opened(hello, TOKEN)[0].client == 3


def test_damaged_tls_handshakes(contexts):
    """What a client sends first, damaged, and noise: no server lets it in, and each end has a name."""
    rng, reasons = random.Random(17), Counter()
    bio_in, bio_out = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = contexts[1].wrap_bio(bio_in, bio_out, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    hello = bio_out.read()
    for number in range(500):
        data = rng.choice((flip_bits, truncate, noise, move_bytes))(rng, bytearray(hello))
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            sock = contexts[0].wrap_socket(ours, server_side=True, do_handshake_on_connect=False)
            reason = opened(None, federation().server, opening_stream(sock, 5.0))
            sock.close()
        assert isinstance(reason, str), number
        reasons[reason] += 1
    assert set(reasons) <= {"bad-magic", "bad-version", "tls-failed", "lost", "no-certificate", "bad-certificate"}, (
        reasons
    )


def move_bytes(rng, data):
    """Copy a few bytes of the hello over others."""
    one, other, size = rng.randrange(len(data)), rng.randrange(len(data)), rng.randrange(1, 30)
    data[one : one + size] = data[other : other + size]
    return data


@given(st.binary(max_size=60))
def test_a_client_makes_an_error_of_any_answer(data):
    stream = Memory(data)
    try:
        client_opening(stream, 1, TOKEN.client_login())
    except (Refused, PeerLost):
        return
    assert data.startswith(b"RAJN" + struct.pack("<HH", VERSION, 0))
