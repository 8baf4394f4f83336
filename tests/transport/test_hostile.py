"""Hostile peers over real sockets, before and after they have proven a key: refused by name, and nobody else notices."""

from __future__ import annotations

import struct

import pytest

from raafl.transport import PeerLost
from tests.transport.hostile import (
    FRAMES,
    GOOD,
    HEAD,
    USABLE,
    WAIT_S,
    Server,
    answered,
    nothing,
)

pytestmark = pytest.mark.timeout(120)


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
