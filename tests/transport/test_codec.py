"""Frames: header bytes by hand, round trips, and that no damaged frame passes for a sound one."""

from __future__ import annotations

import json

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from raafl.submodel.flat import FlatTensors, Layout
from raafl.transport.codec import DTYPES, HEADER_BYTES, MAX_CONTAINERS, MAX_DEPTH, Kind, Message, Refused
from tests.helpers.raw_frames import decode, encode
from tests.transport import hostile


def no_tensors(kind, assignment, meta):
    return None


def never(kind, assignment, meta):
    raise AssertionError("expect must not be called for an unsound frame")


def into(target):
    return lambda kind, assignment, meta: target


def frame(text: bytes, num_buffers=0, payload=b"", **changed) -> bytes:
    return hostile.frame(text, payload, **({"num_buffers": num_buffers, "assignment": 5, "incarnation": 6} | changed))


def section(meta="{}", buffers="[]") -> bytes:
    return f'{{"meta":{meta},"buffers":{buffers}}}'.encode()


def sample() -> Message:
    tensors = FlatTensors.from_named({"w": torch.tensor([1.0, -2.0]), "n": torch.tensor([3], dtype=torch.int64)})
    return Message(Kind.UPDATE, 0x0102030405060708, 9, {"loss": 0.5}, tensors)


def refusal(data: bytes, expect=never) -> str:
    with pytest.raises(Refused) as caught:
        decode(data, expect)
    return caught.value.reason


def test_header_bytes_by_hand():
    data = encode(sample())
    text = b'{"meta":{"loss":0.5},"buffers":[["float32",2],["int64",1]]}'
    by_hand = (
        b"RAFL"
        + b"\x01\x00"
        + b"\x04"
        + b"\x00"  # magic, version 1, UPDATE, no flags
        + b"\x08\x07\x06\x05\x04\x03\x02\x01"
        + b"\x09\x00\x00\x00"  # assignment, incarnation
        + b"\x3b\x00\x00\x00"
        + b"\x02\x00\x00\x00"
        + b"\x00\x00\x00\x00"  # 59 bytes of JSON, two buffers, reserved
        + b"\x10\x00\x00\x00\x00\x00\x00\x00"  # 2 * 4 + 1 * 8 bytes
    )
    assert len(text) == 59 and data[:40] == by_hand
    assert data[40:48] == xxhash.xxh3_64_digest(text)[::-1]  # digest() is big-endian
    assert data[48:56] == xxhash.xxh3_64_digest(data[:48])[::-1]
    payload = b"\x00\x00\x80\x3f" + b"\x00\x00\x00\xc0" + b"\x03" + bytes(7)  # 1.0, -2.0, 3
    assert data[56:] == text + payload + xxhash.xxh3_64_digest(payload)[::-1]


def test_a_frame_without_tensors_has_no_footer():
    data = encode(Message(Kind.STOP))
    assert data[HEADER_BYTES:] == b'{"meta":{},"buffers":[]}'
    assert decode(data, no_tensors) == Message(Kind.STOP)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('ab"\\{[é'), inner, max_size=4),
    max_leaves=20,
)


@given(
    st.sampled_from(list(Kind)),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.dictionaries(st.text("xyz\n"), json_values, max_size=4),
    st.lists(st.sampled_from(list(DTYPES.values()))),
    st.randoms(use_true_random=False),
)
def test_round_trip(kind, assignment, incarnation, meta, dtypes, random):
    named = {}
    for index, dtype in enumerate(dtypes):
        raw = torch.tensor(
            [random.randrange(2) for _ in range(random.randrange(5) * dtype.itemsize)], dtype=torch.uint8
        )
        named[str(index)] = raw.view(dtype)
    tensors = FlatTensors.from_named(named)
    target = FlatTensors.empty(tensors.layout)
    got = decode(encode(Message(kind, assignment, incarnation, meta, tensors)), into(target))
    assert got.tensors is target and got.tensors.fingerprint() == tensors.fingerprint()
    assert (got.kind, got.assignment, got.incarnation, got.meta) == (kind, assignment, incarnation, meta)


@given(st.integers(0, 8 * len(encode(sample())) - 1))
def test_every_flipped_bit_is_refused(bit):
    data = bytearray(encode(sample()))
    data[bit // 8] ^= 1 << bit % 8
    target = FlatTensors.zeros(sample().tensors.layout)
    with pytest.raises(Refused):
        decode(bytes(data), into(target))
    assert not any(buffer.any() for buffer in target.buffers.values()), "a damaged payload was written"


def test_every_truncation_and_every_added_byte_is_refused():
    data = encode(sample())
    for length in range(len(data)):
        assert refusal(data[:length]) == "bad-length"
    assert refusal(data + b"\x00") == "bad-length"


@given(st.binary(max_size=300), st.booleans())
def test_random_bytes_are_refused(noise, with_magic):
    refusal((b"RAFL\x01\x00" if with_magic else b"") + noise)


@given(
    st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode(errors="replace")), st.integers(0, 99)
)
def test_random_json_under_right_checksums_is_refused(text, num_buffers):
    refusal(frame(text, num_buffers))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"magic": b"RAFX"}, "bad-magic"),
        ({"version": 2}, "bad-version"),
        ({"kind": 0}, "bad-kind"),
        ({"kind": 99}, "bad-kind"),
        ({"flags": 1}, "bad-flags"),
        ({"reserved": 1}, "bad-flags"),
        ({"json_bytes": (1 << 20) + 1}, "bad-length"),
        ({"json_bytes": 2**32 - 1}, "bad-length"),
        ({"num_buffers": 2**32 - 1}, "bad-length"),
        ({"payload_bytes": 2**64 - 1}, "bad-length"),
        ({"payload_bytes": 8}, "bad-length"),
        ({"json_checksum": 1}, "bad-checksum"),
        ({"num_buffers": 1, "payload_bytes": 2**63}, "bad-length"),
    ],
)
def test_lying_headers_are_refused_by_name(changed, reason):
    assert refusal(frame(section(), **changed)) == reason


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b'{"meta":{}}',
        b'{"meta":{},"buffers":[],"more":1}',
        b'{"meta":[],"buffers":[]}',
        b'{"meta":{},"meta":{},"buffers":[]}',
        section('{"a":1,"a":1}'),
        section('{"a":NaN}'),
        section('{"a":Infinity}'),
        section('{"a":-Infinity}'),
        section('{"a":1e999}'),
        section('{"a":"\\ud800"}'),
        section('{"a":' + "9" * 5000 + "}"),
        section() + b" x",
        b"\xff\xfe" + section(),
        section().decode().encode("utf-16"),
        section('{"a":"\x01"}'),
        section('{"a":' + "[" * 40 + "]" * 40 + "}"),
        section('{"a":' * 200_000 + "1" + "}" * 200_000)[: 1 << 20],
    ],
)
def test_bad_json_is_refused(text):
    assert refusal(frame(text)) == "bad-json"


@pytest.mark.parametrize(
    ("buffers", "payload", "reason"),
    [
        ('[["float31",1]]', 4, "bad-dtype"),
        ('[["float32",2]]', 4, "bad-length"),
        ('[["float32",0]]', 4, "bad-length"),
        ('[["float32",-1]]', 4, "bad-length"),
        ('[["float32",1152921504606846976]]', 4, "bad-length"),
        ('[["float32",true]]', 4, "bad-json"),
        ('[["float32",1.0]]', 4, "bad-json"),
        ('[["float32"]]', 4, "bad-json"),
        ("[1]", 4, "bad-json"),
        ('{"float32":1}', 4, "bad-json"),
        ('[["float32",1],["int8",4]]', 8, "bad-length"),
    ],
)
def test_bad_declarations_are_refused(buffers, payload, reason):
    assert refusal(frame(section(buffers=buffers), 1, bytes(payload))) == reason


def test_a_dtype_declared_twice_is_refused():
    assert refusal(frame(section(buffers='[["int8",1],["int8",1]]'), 2, b"ab")) == "bad-json"


def test_brackets_inside_strings_are_not_nesting():
    text = json.dumps("[{" * 100 + '\\"')
    assert decode(frame(section(f'{{"a":{text}}}')), no_tensors).meta == {"a": "[{" * 100 + '\\"'}


@pytest.mark.parametrize("layout", [None, [("w", (3,), torch.float32)], [("w", (2,), torch.int32)]])
def test_wrong_layout_carries_the_message(layout):
    target = None if layout is None else FlatTensors.zeros(Layout.pack(layout))
    message = sample()
    with pytest.raises(Refused) as caught:
        decode(encode(message), into(target))
    assert caught.value.reason == "wrong-layout"
    assert caught.value.message == Message(message.kind, message.assignment, message.incarnation, message.meta)


@pytest.mark.parametrize(
    "message",
    [
        Message(Kind.HELLO, meta={"a": float("nan")}),
        Message(Kind.HELLO, meta={"a": float("inf")}),
        Message(Kind.HELLO, meta={"a": {1, 2}}),
        Message(Kind.HELLO, meta={"a": "\ud800"}),
        Message(Kind.HELLO, meta={"a": "x" * (1 << 20)}),
        Message(Kind.HELLO, assignment=-1),
        Message(Kind.HELLO, assignment=2**64),
        Message(Kind.HELLO, incarnation=2**32),
    ],
)
def test_what_cannot_be_encoded_is_a_value_error(message):
    with pytest.raises(ValueError):
        encode(message)


def test_nothing_is_allocated_for_a_lying_length(monkeypatch):
    monkeypatch.setattr(torch, "empty", never)
    monkeypatch.setattr(torch, "frombuffer", never)
    for payload_bytes in (2**40, 2**62):
        buffers = f'[["int8",{payload_bytes}]]'
        assert refusal(frame(section(buffers=buffers), 1, payload_bytes=payload_bytes)) == "bad-length"


# ---- how much a peer may make the thread of all sessions do ----


def depth_of(text: bytes) -> int:
    """Count as a reader does, one character at a time; brackets in strings do not count."""
    deepest = depth = 0
    quoted = escaped = False
    for letter in text.decode():
        if quoted:
            quoted, escaped = escaped or letter != '"', not escaped and letter == "\\"
        elif letter == '"':
            quoted = True
        else:
            depth += (letter in "[{") - (letter in "]}")
            deepest = max(deepest, depth)
    return deepest


plain = st.one_of(st.integers(), st.text('[]{}"\\,:', max_size=9))
nested = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("[{", max_size=2), inner)
)


@given(nested, st.integers(0, 40))
def test_depth_is_counted_as_by_a_reader(value, more):
    for _ in range(more):
        value = {"a": [value, [], {}]} if more % 2 else [value]
    text = json.dumps({"meta": {"a": value}, "buffers": []}).encode()
    try:
        decode(frame(text), no_tensors)
        assert depth_of(text) <= MAX_DEPTH
    except Refused as refused:
        assert depth_of(text) > MAX_DEPTH and str(refused) == f"bad-json: nested deeper than {MAX_DEPTH}"


@pytest.mark.parametrize("pair", ["[]", "{}", '{"[":"]"}'])
def test_lists_and_objects_have_a_bound(pair):
    """A megabyte of them would keep the thread of all sessions for a second; brackets in strings are free."""
    for num, is_sound in (
        (MAX_CONTAINERS - 4, True),
        (MAX_CONTAINERS - 3, False),
    ):  # two more around them, and the buffers
        text = f'{{"meta":{{"a":[{",".join([pair] * num)}],"b":"{"[" * 99999}"}},"buffers":[]}}'.encode()
        if is_sound:
            assert len(decode(frame(text), no_tensors).meta["a"]) == num
            continue
        with pytest.raises(Refused, match=rf"^bad-json: more than {MAX_CONTAINERS} lists and objects$"):
            decode(frame(text), no_tensors)
    with pytest.raises(ValueError, match=f"{MAX_CONTAINERS} lists and objects, and {MAX_DEPTH} nested levels"):
        encode(Message(Kind.UPDATE, 1, 0, {"a": [[]] * MAX_CONTAINERS}))


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 99,
        b"]" * 99,
        b"[" * 9 + b"]" * 40 + b"[" * 33,
        b"[]" * 40 + b"]",
        b"[" + b"[]," * 40 + b'"' + b'\\"' * 500_000,
        b"[" + b"[]," * 40 + b'"' + b'\\"' * 500_000 + b"\\",
    ],
)
def test_brackets_and_quotes_without_a_partner_are_refused(text):
    """In time in proportion to the text: a search for the last quote from each quote would take hours for the last two."""
    with pytest.raises(Refused, match=r"^bad-json"):
        decode(frame(b'{"meta":{"a":' + text), no_tensors)
