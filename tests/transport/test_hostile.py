"""Hostile peers over real sockets, before and after they have proven who they are: refused by name, and nobody else notices."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

import pytest

from raafl.errors import parse_address
from raafl.transport import PeerLost, Refused
from raafl.transport.tcp.listener import connect
from tests.transport.hostile import (
    FRAMES,
    GOOD,
    HEAD,
    USABLE,
    WAIT_S,
    Server,
    answered,
    nothing,
    update,
)

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("tls", [False, True], ids=["token", "tls"])
@pytest.mark.parametrize("name", FRAMES)
def test_a_hostile_frame_is_refused_by_name(name, tls):
    data, reason, then = FRAMES[name]
    with Server(tls) as server, server.call(1) as other, server.call(2) as pair:
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


@pytest.mark.parametrize("tls", [False, True], ids=["token", "tls"])
@pytest.mark.parametrize("length", [1, 55, 56, HEAD, HEAD + 1, len(GOOD) - 1])
def test_a_truncated_frame_is_a_lost_peer(length, tls):
    with Server(tls) as server, server.call(2) as pair:
        pair._stream.write([GOOD[:length]])
        pair.close()
        assert server.lost.get(timeout=WAIT_S) == (2, "connection-closed")
        assert server.refused.empty()


def below(pair, data):
    """Send bytes on the connection below TLS."""
    socket.socket.sendall(pair._socket.sock, data)


def test_bytes_outside_of_records_are_a_bad_record():
    """Somebody on the way inserts bytes: noise, a frame in the clear, and a record that nobody encrypted."""
    with Server() as server:
        for data in (GOOD, bytes(100), b"\x17\x03\x03" + struct.pack(">H", 40) + bytes(40)):
            with server.call(2) as pair:
                below(pair, data)
                assert server.refused.get(timeout=WAIT_S) == (2, "bad-record")


ATTACKS = {
    "repeat": lambda data: data + data,
    "flip": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "drop": lambda data: b"",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_records_that_are_not_the_next_are_a_bad_record(attack):
    """Somebody on the way repeats, alters or leaves out a part of a session."""
    with Server() as server, Relay(parse_address(server.listener.address)) as relay:
        pair = connect(relay.address, 2, server.theirs.client_login(), timeout_s=WAIT_S)
        with pair:
            assert answered(pair, 1)
            passed = threading.Event()
            relay.meddle = lambda data: (passed.set(), ATTACKS[attack](data))[1]
            pair.send(update(2))
            assert passed.wait(WAIT_S)
            if attack == "drop":
                relay.meddle = lambda data: data
                pair.send(update(3))
            elif attack == "repeat":
                assert pair.recv(nothing, WAIT_S).assignment == 2
            assert server.refused.get(timeout=WAIT_S) == (2, "bad-record")
            with pytest.raises((PeerLost, Refused)) as told:
                pair.recv(nothing, WAIT_S)
            assert told.value.reason in ("bad-record", "connection-closed", "connection-reset")


class Relay:
    """Passes on what a client and a server say, changed by ``meddle`` on the way to the server; a context manager.

    Attributes:
        address: where the client calls.
        meddle: changes a piece of bytes; each is what came at once.
    """

    def __init__(self, target):
        self._listener, self._target = socket.create_server(("127.0.0.1", 0)), target
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.meddle = lambda data: data
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        with suppress(OSError), self._listener.accept()[0] as client, socket.create_connection(self._target) as server:
            back = threading.Thread(target=self._pass, args=(server, client, lambda data: data))
            back.start()
            self._pass(client, server, lambda data: self.meddle(data))
            back.join()

    def _pass(self, source, sink, change):
        with suppress(OSError):
            while data := source.recv(1 << 20):
                sink.sendall(change(data))
            sink.shutdown(socket.SHUT_WR)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._listener.close()
        self._thread.join()
