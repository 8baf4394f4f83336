"""Damaged frames through the code that a `TcpConnection` receives with: 10,000 each time, 100,000 by `make test-long`.

Whatever comes, the result is a message, `Refused`, or `PeerLost`; and nothing is allocated that was not declared, checked
and accepted.
"""

from __future__ import annotations

import os
import random
import struct
from collections import Counter

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raafl.submodel.flat import FlatTensors
from raafl.transport import Kind, Message, PeerLost, Refused, codec, frames
from raafl.transport.codec import HEADER_BYTES, MAX_JSON_BYTES
from raafl.transport.frames import Frames
from tests.helpers.raw_frames import encode

NUM_FRAMES = int(os.environ.get("RAAFL_FUZZ_FRAMES", "10000"))
DRAIN_BYTES = 4096
pytestmark = pytest.mark.timeout(300)


class Memory:
    """A stream with an end. It notes the longest read that was asked of it."""

    pending = False

    def __init__(self, data):
        self.data, self.num_read, self.num_written, self.longest = memoryview(data), 0, 0, 0

    def read_into(self, view):
        self.longest = max(self.longest, len(view))
        end = self.num_read + len(view)
        if end > len(self.data):
            raise PeerLost("connection-closed")
        view[:] = self.data[self.num_read : end]
        self.num_read = end

    def write(self, parts):
        self.num_written += sum(map(len, parts))

    def reading_into(self, view):
        self.read_into(view)
        yield from ()

    def writing_all(self, parts):
        self.write(parts)
        yield from ()


def tensors(**named):
    return FlatTensors.from_named(named)


MESSAGES = [
    Message(
        Kind.HELLO, 0, 0, {"raafl": "0.1.0", "model": "ab" * 16, "num_samples": 600, "tags": ["a", None, True, 1.5]}
    ),
    Message(Kind.STOP, 0, 3, {"reason": 'done: \u00e9\u4e2d \\ " {[ '}),
    Message(Kind.UPDATE, 2**63, 7, {"num_samples": 600, "metrics": {"loss": 0.5}}, tensors(w=torch.arange(12.0))),
    Message(
        Kind.ASSIGN,
        1,
        0,
        {"spec": {"kept": [[0, 4], [8, 12]]}},
        tensors(
            w=torch.ones(7),
            n=torch.tensor([3]),
            b=torch.tensor([True, False]),
            h=torch.ones(3, dtype=torch.float16),
        ),
    ),
    Message(Kind.KEEPALIVE),
]
VALID = [encode(message) for message in MESSAGES]
LENGTHS = [0, 1, 7, 55, 56, 2**16, MAX_JSON_BYTES, MAX_JSON_BYTES + 1, 2**31, 2**32 - 1]
PAYLOADS = [0, 1, 8, 48, 4096, 2**31, 2**32, 2**62, 2**63, 2**64 - 1]
TOKENS = [
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"NaN",
    b"1e999",
    b"-",
    b"null",
    b"\\ud800",
    b"\xff",
    b'"float32"',
    b"99999",
]


def sealed_again(frame):
    """Put right checksums on the header and JSON of a damaged frame, so that the damage gets past them."""
    data = bytearray(frame)
    if len(data) < HEADER_BYTES:
        return data
    (json_bytes,) = struct.unpack_from("<I", data, 20)
    text = bytes(data[HEADER_BYTES : HEADER_BYTES + json_bytes])
    struct.pack_into("<Q", data, 40, xxhash.xxh3_64_intdigest(text))
    struct.pack_into("<Q", data, 48, xxhash.xxh3_64_intdigest(bytes(data[:48])))
    return data


def flip_bits(rng, frame):
    data = bytearray(frame)
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def flip_header(rng, frame):
    data = bytearray(frame)
    data[rng.randrange(48)] ^= 1 << rng.randrange(8)
    return sealed_again(data)


def edit_length(rng, frame):
    data = bytearray(frame)
    offset, form, values = rng.choice(((20, "<I", LENGTHS), (24, "<I", LENGTHS), (32, "<Q", PAYLOADS)))
    (old,) = struct.unpack_from(form, data, offset)
    size = 2 ** (32 if form == "<I" else 64)
    struct.pack_into(form, data, offset, rng.choice((*values, old + 1, old - 1, old * 2)) % size)
    return sealed_again(data)


def edit_json(rng, frame):
    (old,) = struct.unpack_from("<I", frame, 20)
    text = bytearray(frame[HEADER_BYTES : HEADER_BYTES + old])
    for _ in range(rng.choice((1, 1, 3))):
        where = rng.randrange(len(text) + 1)
        what = rng.choice((*TOKENS, b"", rng.randbytes(2), text[where : where + 20]))
        text[where : where + rng.choice((0, 1, len(what)))] = what
    data = bytearray(frame[:HEADER_BYTES]) + text + frame[HEADER_BYTES + old :]
    struct.pack_into("<I", data, 20, len(text))
    return sealed_again(data)


def edit_payload(rng, frame):
    (json_bytes,) = struct.unpack_from("<I", frame, 20)
    start = HEADER_BYTES + json_bytes
    if len(frame) < start + 8:
        return bytearray(frame)
    data = bytearray(frame)
    for _ in range(4):
        data[rng.randrange(start, len(data) - 8)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
    struct.pack_into("<Q", data, len(data) - 8, xxhash.xxh3_64_intdigest(bytes(data[start:-8])))
    return data


def splice(rng, frame):
    other = rng.choice(VALID)
    data = bytearray(frame[: rng.randrange(len(frame))] + other[rng.randrange(len(other)) :])
    return sealed_again(data) if rng.random() < 0.5 else data


def truncate(rng, frame):
    return bytearray(frame[: rng.randrange(len(frame))])


def move(rng, frame):
    data = bytearray(frame)
    one, other, size = rng.randrange(len(data)), rng.randrange(len(data)), rng.randrange(1, 30)
    data[one : one + size] = data[other : other + size]
    return sealed_again(data) if rng.random() < 0.5 else data


def noise(rng, frame):
    return bytearray(rng.choice((b"", b"RAFL", b"RAFL\1\0", frame[:HEADER_BYTES])) + rng.randbytes(rng.randrange(200)))


def untouched(rng, frame):
    return bytearray(frame)


MUTATIONS = [
    flip_bits,
    flip_header,
    edit_length,
    edit_json,
    edit_json,
    edit_payload,
    splice,
    truncate,
    move,
    noise,
    untouched,
]

TARGETS = [FlatTensors.zeros(message.tensors.layout) for message in MESSAGES if message.tensors]
LARGEST = max(target.num_bytes for target in TARGETS)


def expectation(rng):
    """What the receiver of a frame expects: what was sent, something else, nothing, or it refuses."""
    choice = rng.randrange(8)
    if choice == 0:
        return lambda kind, assignment, meta: None
    if choice == 1:
        return refuse
    return lambda kind, assignment, meta: (
        TARGETS[0] if kind is Kind.UPDATE else TARGETS[1] if kind is Kind.ASSIGN else None
    )


def refuse(kind, assignment, meta):
    raise Refused("unknown-assignment")


def receive(data, expect, finite=True):
    """Receive all messages in ``data`` as a pair would; count messages, refusals by reason, and the end."""
    stream = Memory(data)
    reader, seen = Frames(stream), Counter()
    reader.drain_bytes = DRAIN_BYTES
    while reader.in_step:
        try:
            message = reader.receive(expect, finite)
            assert isinstance(message, Message)
            seen["message"] += 1
        except Refused as refused:
            seen[refused.reason] += 1
        except PeerLost:
            seen["lost"] += 1
            break
    return seen, stream


@pytest.fixture
def allocations(monkeypatch):
    """The sizes of all buffers that receiving makes."""
    sizes = []

    def noted(size):
        sizes.append(size)
        return bytearray(size)

    monkeypatch.setattr(frames, "bytearray", noted, raising=False)
    return sizes


REASONS = {
    "message",
    "lost",
    "bad-magic",
    "bad-version",
    "bad-checksum",
    "bad-kind",
    "bad-flags",
    "bad-length",
    "bad-json",
    "bad-dtype",
    "bad-value",
    "wrong-layout",
    "non-finite",
    "unknown-assignment",
}


def test_damaged_frames(allocations, capsys):
    rng, total, by_mutation = random.Random(20261121), Counter(), Counter()
    for _ in range(NUM_FRAMES):
        mutate = rng.choice(MUTATIONS)
        frame = mutate(rng, rng.choice(VALID))
        del allocations[:]
        seen, stream = receive(frame, expectation(rng), rng.random() < 0.8)
        total += seen
        by_mutation[mutate.__name__] += 1
        assert max(allocations) <= MAX_JSON_BYTES, frame
        assert stream.longest <= max(MAX_JSON_BYTES, DRAIN_BYTES, LARGEST)
        assert mutate is not untouched or set(seen) <= {"message", "lost", "wrong-layout", "unknown-assignment"}, frame
    with capsys.disabled():
        print(f" {sum(by_mutation.values())} frames: {dict(sorted(total.items()))} ", end="")
    assert sum(by_mutation.values()) >= NUM_FRAMES
    assert set(total) == REASONS, "every way to refuse a frame was taken, and no other"


def test_nothing_of_a_huge_frame_is_read_or_allocated(allocations):
    for payload in (DRAIN_BYTES + 1, 2**31, 2**59):
        text = b'{"meta":{},"buffers":[["int8",%d]]}' % payload
        fields = struct.pack("<4sHBBQIIIIQQ", b"RAFL", 1, 4, 0, 1, 0, len(text), 1, 0, payload, 0)
        frame = sealed_again(fields + bytes(8) + text + bytes(10_000))
        for expect in (refuse, lambda *args: None, lambda *args: TARGETS[0]):
            del allocations[:]
            seen, stream = receive(frame, expect)
            assert sum(seen.values()) == 1 and stream.num_read == HEADER_BYTES + len(text)
            assert sum(allocations) == HEADER_BYTES + len(text)


changes = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 6), st.binary(max_size=6)), max_size=5)


@settings(suppress_health_check=list(HealthCheck))
@given(st.sampled_from(VALID), changes, st.booleans(), st.integers(0, 2**32))
def test_changes_that_hypothesis_thinks_of(frame, changes, right_checksums, seed):
    data = bytearray(frame)
    for where, length, what in changes:
        data[where : where + length] = what
    seen, _ = receive(sealed_again(data) if right_checksums else data, expectation(random.Random(seed)))
    assert set(seen) <= REASONS


@given(st.binary(max_size=400))
def test_any_bytes(data):
    assert set(receive(data, refuse)[0]) <= REASONS


def chunks_of(message):
    """Return a message's head, and its chunks with their footers."""
    view = b"" if message.tensors is None else bytes(codec.memory(message.tensors.buffers[torch.uint8]))
    chunks = []
    for index, start in enumerate(range(0, len(view), frames.PIECE_BYTES)):
        checksum = codec.Checksum(index)
        checksum.update(memoryview(view[start : start + frames.PIECE_BYTES]))
        chunks.append(view[start : start + frames.PIECE_BYTES] + checksum.footer())
    return codec.encode_head(message), chunks


def resumed(rng, size):
    """Break a message off, and go on with another body; return how that ended, and what is in the target."""
    values, others = (
        torch.arange(4 * size, dtype=torch.uint8),
        torch.full((4 * size,), 7, dtype=torch.uint8),
    )
    first = Message(Kind.UPDATE, 5, 1, {"num_samples": 3}, tensors(w=values))
    second = rng.choice(
        [
            first,
            Message(Kind.UPDATE, 5, 1, {"num_samples": 9}, tensors(w=values)),
            Message(Kind.UPDATE, 6, 1, {"num_samples": 3}, tensors(w=values)),
            Message(Kind.UPDATE, 5, 1, {"num_samples": 3}, tensors(w=others)),
            Message(Kind.KEEPALIVE),
            Message(Kind.UPDATE, 5, 1, {"num_samples": 3}, tensors(w=values[:99])),
        ]
    )
    target = FlatTensors.zeros(first.tensors.layout)
    head, chunks = chunks_of(first)
    data = head + b"".join(chunks)
    reader = Frames(Memory(data[: rng.randrange(HEADER_BYTES + 30, len(data) - 1)]))
    with pytest.raises(PeerLost):
        reader.receive(lambda *_: target, True)
    partial = reader.partial
    done = 0 if partial is None else partial.num_chunks
    head, chunks = chunks_of(second)
    start = done if rng.random() < 0.6 else rng.randrange(len(chunks) + 1)
    data = head + b"".join(chunks[start:])
    if rng.random() < 0.3:
        data = bytes(flip_bits(rng, data))
    again = Frames(Memory(data), partial)
    try:
        message = again.receive(lambda *_: target, True)
    except Refused as refused:
        return refused.reason, again.in_step, None
    except PeerLost:
        return "lost", again.in_step, None
    if message.tensors is None:
        return "message", again.in_step, None
    cut = done * size
    whole = torch.cat([values[:cut], (others if second.tensors["w"][0] == 7 else values)[cut:]])
    return "message", again.in_step, torch.equal(message.tensors["w"], whole)


def test_a_resumed_transfer_with_another_body(monkeypatch, capsys):
    """It is refused where its head is another; else the chunks that had come stay, and each other has its place and checksum."""
    monkeypatch.setattr(frames, "PIECE_BYTES", 256)
    rng, seen = random.Random(5), Counter()
    for _ in range(500 if NUM_FRAMES <= 10_000 else 10_000):
        reason, in_step, equal = resumed(rng, 256)
        assert reason in {*REASONS, "wrong-message"} and equal is not False
        assert in_step or reason != "message"
        seen[reason] += 1
    with capsys.disabled():
        print(f" {sum(seen.values())} resumed transfers: {dict(sorted(seen.items()))} ", end="")
    assert {"message", "wrong-message", "bad-checksum", "lost"} <= seen.keys()
