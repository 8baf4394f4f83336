"""Frames in chunks: their checksums by hand, and a message that is continued on another stream."""

from __future__ import annotations

import struct

import pytest
import torch
import xxhash

from raafl.submodel.flat import FlatTensors
from raafl.transport import Kind, Message, PeerLost, Refused, codec, frames
from raafl.transport.frames import Frames, count_chunks
from tests.transport.test_fuzz import Memory

CHUNK = 64


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(frames, "PIECE_BYTES", CHUNK)


class Wire(Memory):
    """A stream whose written bytes can be read back."""

    def __init__(self, data=b""):
        super().__init__(data)
        self.written = b""

    def write(self, parts):
        self.written += b"".join(map(bytes, parts))
        self.num_written = len(self.written)


def message(values, number=7):
    return Message(Kind.UPDATE, number, 0, {"num_samples": 1}, FlatTensors.from_named({"w": values}))


def sent(one, first=0):
    wire = Wire()
    Frames(wire).send(codec.encode_head(one), one.tensors, first)
    return wire.written


def into(one):
    target = FlatTensors.empty(one.tensors.layout)
    return target, lambda kind, number, meta: target


def checksum(data, index):
    return struct.pack("<Q", xxhash.xxh3_64_intdigest(data, seed=index))


def test_each_chunk_is_followed_by_a_checksum_that_its_index_seeds():
    values = torch.arange(40.0)  # 160 bytes: two chunks of 64, one of 32
    raw, one = values.numpy().tobytes(), message(values)
    head = codec.encode_head(one)
    chunks = [raw[:64], raw[64:128], raw[128:]]
    expected = [chunk + checksum(chunk, index) for index, chunk in enumerate(chunks)]
    assert sent(one) == head + b"".join(expected)
    assert sent(one, first=1) == head + b"".join(expected[1:])
    assert sent(one, first=3) == head
    assert count_chunks(codec.declared(one.tensors)) == 3


def test_a_header_alone_claims_no_memory():
    meta = {"text": "x" * 300_000}
    data = codec.encode_head(Message(Kind.UPDATE, 7, 0, meta))
    steps, start, sizes = Frames(Wire()).receiving(lambda *_: None, False), 0, []
    with pytest.raises(StopIteration) as end:
        while True:
            view = next(steps)
            view[:] = data[start : start + len(view)]
            sizes.append(len(view))
            start += len(view)
    assert end.value.value.meta == meta
    assert sizes[0] == codec.HEADER_BYTES and sum(sizes) == len(data) and max(sizes) <= 64 << 10


def test_pieces_of_several_dtypes_make_chunks_of_at_least_their_length():
    sizes = ((torch.bool, 3), (torch.float32, 20), (torch.int64, 1))  # pieces of 3; 64 and 16; 8 bytes
    assert count_chunks(sizes) == 2  # 3 + 64, 16 + 8
    assert count_chunks(((torch.int8, CHUNK),)) == 1 and count_chunks(()) == 0


@pytest.mark.parametrize("cut", [0, 30, 150, 64 + 8 + 63, 64 + 8 + 64 + 7])
def test_a_message_that_breaks_off_is_continued_from_its_first_missing_chunk(cut):
    values = torch.arange(40.0)
    one = message(values)
    data, head = sent(one), codec.encode_head(one)
    target, expect = into(one)
    broken = Frames(Wire(data[: len(head) + cut]))
    with pytest.raises(PeerLost):
        broken.receive(expect, True)
    partial = broken.partial
    assert partial.target is target and partial.num_chunks == cut // (64 + 8)

    def never(*_):
        raise AssertionError("the storage is known")

    rest = Frames(Wire(sent(one, partial.num_chunks)), partial)
    found = rest.receive(never, True)
    assert torch.equal(found.tensors["w"], values) and rest.in_step and rest.partial is None


def test_a_chunk_in_anothers_place_is_refused_like_one_that_was_damaged():
    one = message(torch.arange(40.0))
    head = codec.encode_head(one)
    data = bytearray(sent(one))
    first, second = slice(len(head), len(head) + 72), slice(len(head) + 72, len(head) + 144)
    data[first], data[second] = data[second], data[first]
    reader = Frames(Wire(data))
    with pytest.raises(Refused, match="bad-checksum"):
        reader.receive(into(one)[1], True)
    assert reader.in_step  # it was read to its end


def test_what_was_wrong_with_the_first_part_is_not_forgotten():
    values = torch.arange(40.0)
    values[3] = float("nan")
    one = message(values)
    head = codec.encode_head(one)
    broken = Frames(Wire(sent(one)[: len(head) + 80]))
    with pytest.raises(PeerLost):
        broken.receive(into(one)[1], True)
    with pytest.raises(Refused, match="non-finite"):
        Frames(Wire(sent(one, 1)), broken.partial).receive(into(one)[1], True)


def test_another_message_than_the_one_that_broke_off_is_refused():
    one, other = message(torch.arange(40.0)), message(torch.arange(40.0), number=8)
    head = codec.encode_head(one)
    broken = Frames(Wire(sent(one)[: len(head) + 80]))
    with pytest.raises(PeerLost):
        broken.receive(into(one)[1], True)
    reader = Frames(Wire(sent(other, 1)), broken.partial)
    with pytest.raises(Refused, match="wrong-message"):
        reader.receive(into(other)[1], True)
    assert not reader.in_step  # where it ends is of no interest
    assert broken.partial.target["w"][:16].equal(torch.arange(16.0))


def test_a_refused_message_of_many_chunks_is_read_to_its_end():
    one, next_one = message(torch.arange(400.0)), message(torch.arange(2.0), number=8)
    reader = Frames(Wire(sent(one) + sent(next_one)))

    def refuse(*_):
        raise Refused("unknown-assignment")

    with pytest.raises(Refused, match="unknown-assignment"):
        reader.receive(refuse, True)
    assert reader.receive(into(next_one)[1], True).assignment == 8
