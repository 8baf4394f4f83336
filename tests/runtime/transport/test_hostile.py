"""Hostile peers over real sockets, before and after they have proven a key: refused by name, and nobody else notices."""

from __future__ import annotations

import ctypes
import gc
import http.client
import os
import queue
import random
import socket
import ssl
import struct
import threading
import time
from contextlib import suppress

import psutil
import pytest
import torch
import xxhash

from raafl.runtime.transport import Kind, Message, PeerLost, PeerTimeout, Refused
from raafl.runtime.transport.handshake import ClientKey, Secret
from raafl.runtime.transport.listener import Listener, call, parse_address
from raafl.submodel.flat import FlatTensors, Layout
from tests.whole_frames import encode

SECRET = Secret(b"sixteen bytes or more")
LAYOUT = Layout.pack([("w", (1000,), torch.float32)])
WAIT_S = 60
PIECE_S = 1.5
pytestmark = pytest.mark.timeout(120)


class Server(threading.Thread):
    """Serves clients as a run does: each accepted update is answered, each assignment counts once, the rest is refused."""

    def __init__(self, encrypt=False, **more):
        super().__init__(daemon=True)
        self.refused, self.turned_away, self.lost = queue.Queue(), queue.Queue(), queue.Queue()
        self.sessions = []
        self.listener = Listener(
            "127.0.0.1:0", SECRET, self.admit, self.turned_away.put, encrypt=encrypt, timeout_s=PIECE_S, **more
        )

    def admit(self, pair, client, address):
        session = threading.Thread(target=self.serve, args=(pair, client), daemon=True)
        self.sessions.append((session, pair))
        session.start()

    def serve(self, pair, client):
        target, seen = FlatTensors.empty(LAYOUT), set()

        def expect(kind, assignment, meta):
            if assignment in seen:
                raise Refused("unknown-assignment", str(assignment))
            return target

        with pair:
            while not pair.closed:
                try:
                    message = pair.recv(expect, WAIT_S, finite=True)
                    seen.add(message.assignment)
                    pair.send(Message(Kind.KEEPALIVE, message.assignment))
                except Refused as refused:
                    self.refused.put((client, refused.reason))
                except (PeerLost, PeerTimeout) as error:
                    self.lost.put((client, getattr(error, "reason", "timeout")))

    def call(self, client):
        return call(self.listener.address, SECRET.for_client(client), timeout_s=WAIT_S, pair_timeout_s=WAIT_S)

    def raw(self):
        return socket.create_connection(parse_address(self.listener.address), WAIT_S)

    def __enter__(self):
        self.listener.start()
        return self

    def __exit__(self, *error):
        self.listener.close()
        for session, pair in self.sessions:
            pair.close()
            session.join(WAIT_S)


def update(assignment=1, tensors=None, **meta):
    return Message(Kind.UPDATE, assignment, 0, meta, tensors or good_tensors())


def good_tensors():
    return FlatTensors.from_named({"w": torch.ones(1000)}, LAYOUT)


def nothing(kind, assignment, meta):
    return None


def frame(text=b'{"meta":{},"buffers":[["float32",1000]]}', payload=bytes(4000), **changed):
    """A frame by hand, its checksums right whatever else is not."""
    values = {
        "magic": b"RAFL", "version": 1, "kind": 4, "flags": 0, "assignment": 1, "incarnation": 0,
        "json_bytes": len(text), "num_buffers": 1, "reserved": 0, "payload_bytes": len(payload),
        "json_checksum": xxhash.xxh3_64_intdigest(text), **changed,
    }  # fmt: skip
    fields = struct.pack("<4sHBBQIIIIQQ", *values.values())
    footer = struct.pack("<Q", xxhash.xxh3_64_intdigest(payload)) if payload else b""
    return fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields)) + text + payload + footer


def flipped(byte):
    data = bytearray(encode(update()))
    data[byte] ^= 1
    return bytes(data)


def with_value(value):
    tensors = good_tensors()
    tensors["w"][-1] = value
    return encode(update(tensors=tensors))


GOOD = encode(update())
HEAD = GOOD.index(b"}") + GOOD[GOOD.index(b"}") :].index(b"]]}") + 3  # header and JSON
CLOSED, USABLE = "closed", "usable"

FRAMES = {
    "random bytes": (random.Random(1).randbytes(5000), "bad-magic", CLOSED),
    "zeros": (bytes(5000), "bad-magic", CLOSED),
    "another format version": (frame(version=2), "bad-version", CLOSED),
    "an unknown kind": (frame(kind=77), "bad-kind", CLOSED),
    "unknown flags": (frame(flags=1), "bad-flags", CLOSED),
    "a bit flipped in the header": (flipped(20), "bad-checksum", CLOSED),
    "a bit flipped in the JSON": (flipped(60), "bad-checksum", USABLE),
    "a bit flipped in the payload": (flipped(HEAD + 1000), "bad-checksum", USABLE),
    "a bit flipped in the footer": (flipped(-1), "bad-checksum", USABLE),
    "halves of the payload in the wrong order": (
        encode(update(tensors=FlatTensors.from_named({"w": torch.arange(1000.0)})))[:HEAD]
        + GOOD[HEAD + 2000 :] + GOOD[HEAD : HEAD + 2000], "bad-checksum", USABLE,
    ),
    "the same update again": (GOOD + GOOD, "unknown-assignment", USABLE),
    "a JSON section of 4 GB": (frame(json_bytes=2**32 - 1), "bad-length", CLOSED),
    "a JSON section of a byte too many": (frame(json_bytes=(1 << 20) + 1), "bad-length", CLOSED),
    "4 billion buffers": (frame(num_buffers=2**32 - 1), "bad-length", CLOSED),
    "a payload of 2^62 bytes that is not declared": (frame(payload=b"", payload_bytes=2**62), "bad-length", CLOSED),
    "a payload of 2^59 bytes": (
        frame(b'{"meta":{},"buffers":[["int8",%d]]}' % 2**59, b"", payload_bytes=2**59), "wrong-layout", CLOSED,
    ),
    "a payload over the drain limit": (
        frame(b'{"meta":{},"buffers":[["int8",%d]]}' % (2**30 + 1), b"", payload_bytes=2**30 + 1), "wrong-layout", CLOSED,
    ),
    "a hundred times what is expected": (
        encode(update(tensors=FlatTensors.from_named({"w": torch.ones(100_000)}))), "wrong-layout", USABLE,
    ),
    "one element less": (encode(update(tensors=FlatTensors.from_named({"w": torch.ones(999)}))), "wrong-layout", USABLE),
    "another dtype of the same length": (
        encode(update(tensors=FlatTensors.from_named({"w": torch.ones(1000, dtype=torch.int32)}))),
        "wrong-layout", USABLE,
    ),
    "no tensors": (encode(Message(Kind.UPDATE, 1)), "wrong-layout", USABLE),
    "a dtype that is none": (frame(b'{"meta":{},"buffers":[["float8",4000]]}'), "bad-dtype", USABLE),
    "a pickle for JSON": (frame(b"\x80\x04\x95" + bytes(40)), "bad-json", USABLE),
    "JSON nested a thousand deep": (frame(b'{"meta":' + b"[" * 1000 + b"]" * 1000 + b"}"), "bad-json", USABLE),
    "NaN in JSON": (frame(b'{"meta":{"loss":NaN},"buffers":[["float32",1000]]}'), "bad-json", USABLE),
    "a NaN": (with_value(float("nan")), "non-finite", USABLE),
    "an infinity": (with_value(float("inf")), "non-finite", USABLE),
}  # fmt: skip


def answered(pair, assignment):
    """Send a sound update and return whether it is answered."""
    pair.send(update(assignment))
    while (answer := pair.recv(nothing, WAIT_S)).assignment != assignment:
        pass
    return answer.kind is Kind.KEEPALIVE


@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "sealed"])
@pytest.mark.parametrize("name", FRAMES)
def test_a_hostile_frame_is_refused_by_name(name, encrypt):
    data, reason, then = FRAMES[name]
    with Server(encrypt) as server, server.call(1) as other, server.call(2) as pair:
        pair._stream.write([data])
        assert server.refused.get(timeout=WAIT_S) == (2, reason)
        assert answered(other, 1), "another client is served"
        if then is USABLE:
            assert answered(pair, 7), "the client may go on"
        else:
            with pytest.raises(PeerLost):
                while True:
                    pair.recv(nothing, WAIT_S)
        assert server.refused.empty()


def test_a_cut_frame_and_then_another():
    """The end of the first is taken from the second, of which the rest is no frame."""
    with Server() as server, server.call(1) as other, server.call(2) as pair:
        pair._stream.write([GOOD[:-100] + GOOD])
        assert [server.refused.get(timeout=WAIT_S) for _ in range(2)] == [(2, "bad-checksum"), (2, "bad-magic")]
        assert answered(other, 1)


@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "sealed"])
@pytest.mark.parametrize("length", [1, 55, 56, HEAD, HEAD + 1, len(GOOD) - 1])
def test_a_truncated_frame_is_a_lost_peer(length, encrypt):
    with Server(encrypt) as server, server.call(2) as pair:
        pair._stream.write([GOOD[:length]])
        pair.close()
        assert server.lost.get(timeout=WAIT_S) == (2, "connection-closed")
        assert server.refused.empty()


def test_bytes_outside_of_records_are_a_bad_seal():
    with Server(encrypt=True) as server:
        for data in (GOOD, bytes(100), struct.pack("<I", 40) + bytes(56)):
            with server.call(2) as pair:
                pair._socket.write([data])
                assert server.refused.get(timeout=WAIT_S) == (2, "bad-seal")


def test_records_played_again_are_a_bad_seal():
    """Somebody on the way who recorded a session repeats a part of it."""
    with Server(encrypt=True) as server, server.call(2) as pair:
        records = []
        write = pair._socket.write
        pair._socket.write = lambda parts: (records.append(b"".join(parts)), write(parts))
        assert answered(pair, 1)
        write(records)
        assert server.refused.get(timeout=WAIT_S) == (2, "bad-seal")


@pytest.mark.alone
@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "sealed"])
@pytest.mark.parametrize("fast", [10, HEAD + 10])
def test_a_client_that_drips_is_slow_and_the_others_are_served(fast, encrypt):
    reasons, pace = [], threading.Event()
    while "slow" not in reasons:  # where the processor is away for as long as PIECE_S, the peer is silent, not slow
        with Server(encrypt) as server, server.call(1) as other, server.call(2) as pair:
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


@pytest.mark.alone
def test_200_silent_connections_do_not_keep_a_client_out():
    with Server() as server, server.call(1) as other:
        crowd = silent(server)
        assert answered(other, 1)
        with server.call(2) as late:
            assert answered(late, 1)
        assert threading.active_count() < 32 + 20
        for sock in crowd:
            sock.close()
        reasons = [server.turned_away.get(timeout=WAIT_S) for _ in crowd]
        assert set(reasons) <= {"busy", "closed", "timeout"} and reasons.count("busy") >= 200 - 32


@pytest.mark.alone
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


def tls(server):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with server.raw() as sock, suppress(OSError), context.wrap_socket(sock):
        raise AssertionError("a TLS session with a raafl server")
    return "bad-magic"


def web(server):
    connection = http.client.HTTPConnection(*parse_address(server.listener.address), timeout=WAIT_S)
    with suppress(OSError, http.client.HTTPException):
        connection.request("POST", "/", body=b"x" * 10_000)
        raise AssertionError(f"an answer: {connection.getresponse().status}")
    connection.close()
    return "bad-magic"


def claims_another_id(server):
    with suppress(Refused):
        call(server.listener.address, ClientKey(1, SECRET.for_client(2).key), timeout_s=WAIT_S)
        raise AssertionError("client 2 passed for client 1")
    return "wrong-secret"


def knows_no_secret(server):
    with suppress(Refused):
        call(server.listener.address, Secret(os.urandom(16)).for_client(1), timeout_s=WAIT_S)
        raise AssertionError("let in without the secret")
    return "wrong-secret"


def noise(server):
    with server.raw() as sock:
        sock.sendall(os.urandom(1000).replace(b"RAHS", b"RAHT"))
        with suppress(ConnectionResetError):
            assert sock.recv(100) == b""
    return "bad-magic"


def frames_without_a_handshake(server):
    with server.raw() as sock, suppress(ConnectionResetError):
        sock.sendall(GOOD)
        assert sock.recv(100) == b""
    return "bad-magic"


def goes_in_mid_handshake(server):
    with server.raw() as sock:
        sock.sendall(b"RAHS" + struct.pack("<HHI", 1, 0, 3) + bytes(32))
        assert len(sock.recv(40, socket.MSG_WAITALL)) == 40
    return "closed"


STRANGERS = [tls, web, claims_another_id, knows_no_secret, noise, frames_without_a_handshake, goes_in_mid_handshake]


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


@pytest.mark.alone
@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "sealed"])
def test_a_siege_leaves_no_trace(encrypt):
    """Every attack above, again and again, while a client is served; memory, threads and descriptors come back."""
    with Server(encrypt) as server, server.call(1) as good:
        served = 0

        def once():
            nonlocal served
            crowd = silent(server, 60)
            for stranger in STRANGERS:
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
