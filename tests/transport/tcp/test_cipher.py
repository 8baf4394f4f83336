"""Sealed records: the format by hand, every kind of tampering, and what it costs in memory."""

from __future__ import annotations

import struct

import pytest
import torch
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from raafl.submodel.flat import FlatTensors
from raafl.transport import Kind, Message, PeerLost, Refused, codec
from raafl.transport.frames import Frames
from raafl.transport.tcp import cipher as seal
from raafl.transport.tcp.cipher import RECORD_BYTES, TAG_BYTES, RecordCipher, derive

CLIENT, SERVER = RecordCipher(b"c" * 32, b"s" * 32), RecordCipher(b"s" * 32, b"c" * 32)


class Memory:
    """A stream that keeps what is written, write by write, and is read from ``data``."""

    pending = False

    def __init__(self, data=b""):
        self.writes, self.data, self.num_read, self.num_written = [], memoryview(data), 0, 0

    def write(self, parts):
        self.writes.append(b"".join(parts))
        self.num_written += len(self.writes[-1])

    def read_into(self, view):
        if len(self.data) < len(view):
            raise PeerLost("connection-closed")
        view[:] = self.data[: len(view)]
        self.data = self.data[len(view) :]
        self.num_read += len(view)


def records(*plains, keys=CLIENT):
    memory = Memory()
    stream = keys.stream(memory)
    for plain in plains:
        stream.write([plain])
    return memory.writes


def read(data, num_bytes, keys=SERVER):
    out = bytearray(num_bytes)
    keys.stream(Memory(data)).read_into(memoryview(out))
    return bytes(out)


def test_derive_is_hkdf_as_others_compute_it():
    # RFC 5869, appendix A.1: the first 32 bytes of its 42
    okm = "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
    assert derive(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA))).hex() == okm
    assert derive(b"key", b"salt", b"info") == HKDF(hashes.SHA256(), 32, b"salt", b"info").derive(b"key")


def test_a_record_by_hand():
    first, second = records(b"hello", b"again")
    for number, record, plain in ((0, first, b"hello"), (1, second, b"again")):
        length = b"\x05\x00\x00\x00"
        nonce = bytes(4) + number.to_bytes(8, "little")
        assert record == length + AESGCM(b"c" * 32).encrypt(nonce, plain, length)
    assert read(first + second, 10) == b"helloagain"


@pytest.mark.parametrize("size", [1, 100, RECORD_BYTES - 1, RECORD_BYTES, RECORD_BYTES + 1, 3 * RECORD_BYTES + 7])
@pytest.mark.parametrize("step", [1 << 20, 60_000])
def test_round_trip_whatever_the_cuts(size, step):
    data = torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().tobytes()
    memory = Memory()
    CLIENT.stream(memory).write([data[:10], data[10:]])
    assert all(len(record) <= 4 + RECORD_BYTES + TAG_BYTES for record in memory.writes)
    stream, out = SERVER.stream(Memory(b"".join(memory.writes))), bytearray(size)
    for start in range(0, size, step):
        stream.read_into(memoryview(out)[start : start + step])
    assert out == data and not stream.pending


def refusal(data, num_bytes=15, keys=SERVER):
    with pytest.raises(Refused) as caught:
        read(data, num_bytes, keys)
    return caught.value.reason


def test_tampering_is_a_bad_seal():
    one, two, three = records(b"first", b"other", b"third")
    assert read(one + two + three, 15) == b"firstotherthird"
    for name, data in {
        "repeated": one + one + two,
        "out of order": two + one + three,
        "left out": one + three,
        "the first left out": two + three,
        "cut, and the next one moved up": one[:-1] + two + three,
        "too long": struct.pack("<I", RECORD_BYTES + 1) + one[4:],
        "empty": struct.pack("<I", 0) + one[4:],
        "length altered": b"\x04" + one[1:] + two,
        "made without the key": bytes(20) + one,
    }.items():
        assert refusal(data) == "bad-seal", name


def test_every_flipped_bit_is_a_bad_seal_or_a_cut():
    (record,) = records(b"first")
    for bit in range(8 * len(record)):
        data = bytearray(record)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises((Refused, PeerLost)) as caught:  # a length made longer reaches past the end
            read(bytes(data), 5)
        assert isinstance(caught.value, PeerLost) == (
            bit // 8 < 3 and 5 < int.from_bytes(data[:4], "little") <= RECORD_BYTES
        )


def test_a_record_cut_at_the_end_of_the_stream_is_a_lost_peer():
    (record,) = records(b"first")
    for length in range(len(record)):
        with pytest.raises(PeerLost):
            read(record[:length], 5)


def test_what_one_end_sends_does_not_open_at_that_end():
    assert refusal(b"".join(records(b"first")), 5, CLIENT) == "bad-seal"  # sent back to its sender
    assert (
        refusal(b"".join(records(b"first")), 5, RecordCipher(b"s" * 32, b"x" * 32)) == "bad-seal"
    )  # of another session


def test_the_next_key_comes_in_step(monkeypatch):
    monkeypatch.setattr(seal, "RECORDS_PER_KEY", 3)
    sent = records(*(b"%d" % number for number in range(8)))
    assert read(b"".join(sent), 8) == b"01234567"
    by_hand = b"c" * 32
    for number, record in enumerate(sent):
        by_hand = derive(by_hand, b"", b"raafl next key") if number in (3, 6) else by_hand
        nonce = bytes(4) + number.to_bytes(8, "little")
        assert AESGCM(by_hand).decrypt(nonce, record[4:], record[:4]) == b"%d" % number


def test_keys_are_not_shown():
    assert "ccc" not in repr(CLIENT)


def test_a_message_is_sealed_where_it_lies():
    tensors = FlatTensors.from_named({"w": torch.randn(1_000_000)})
    memory = Memory()
    frames = Frames(CLIENT.stream(memory))
    num_bytes = frames.send(codec.encode_head(Message(Kind.ASSIGN, 1, 0, {}, tensors)), tensors)
    assert num_bytes == sum(map(len, memory.writes))
    assert max(map(len, memory.writes)) <= 4 + RECORD_BYTES + TAG_BYTES, "sealed record by record, not as a whole"
    wire = b"".join(memory.writes)
    assert b"RAFL" not in wire and b"buffers" not in wire
    target = FlatTensors.empty(tensors.layout)
    Frames(SERVER.stream(Memory(wire))).receive(lambda *args: target, True)
    assert target.fingerprint() == tensors.fingerprint()
