"""Encode and decode messages as bytes ("frames"), and refuse invalid ones. Pure functions, no input or output.

A frame is a header of 56 bytes, a JSON section, the raw tensor buffers and, if there are any, 8 bytes: their checksum.
All numbers are little-endian:

====== ==== ==================================================
offset size field
====== ==== ==================================================
0      4    magic ``RAFL``
4      2    format version
6      1    kind
7      1    flags, all zero in this version
8      8    assignment id
16     4    incarnation
20     4    length of the JSON section in bytes
24     4    number of tensor buffers
28     4    reserved, zero
32     8    total length of the tensor buffers in bytes
40     8    xxh3_64 of the JSON section
48     8    xxh3_64 of the 48 bytes above
====== ==== ==================================================

The JSON section is ``{"meta": {...}, "buffers": [[dtype, numel], ...]}``. Nothing received is executed or evaluated.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Any, Never, Protocol

import torch
import xxhash

from raafl.sanitize import sanitize_text
from raafl.submodel.flat import DTYPE_NAMES, DTYPES, FlatTensors

MAGIC = b"RAFL"
FORMAT_VERSION = 1
HEADER_BYTES = 56
FOOTER_BYTES = 8
MAX_JSON_BYTES = 1 << 20
MAX_HELLO_BYTES = 16 << 10
"""Largest size of the JSON section of a HELLO, which is written to the journal at every join."""
MAX_DEPTH = 32
MAX_CONTAINERS = 1 << 16
"""Largest number of lists and objects in a JSON section, each of which takes the thread of all sessions a moment."""

_FIELDS = struct.Struct("<4sHBBQIIIIQQ")
_CHECKSUM = struct.Struct("<Q")
# possessive, and to the end where a quote is missing: else text without a last quote would be searched from each quote anew
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_SQUARE, _NO_BRACKETS = bytes.maketrans(b"{}", b"[]"), bytes({*range(256)} - {*b"[]{}"})
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

_MAX_DETAIL = 500


class Kind(IntEnum):
    """Type of a message; `raafl.runtime.protocol` lists which side sends which type."""

    HELLO = 1
    WELCOME = 2
    ASSIGN = 3
    UPDATE = 4
    KEEPALIVE = 5
    STOP = 6
    REFUSED = 7
    CONFIG = 8
    QUESTION = 9
    REPLY = 10
    FAILED = 11
    MEASURE = 12
    MEASURED = 13
    RESUME = 14
    RUNS = 15


GIVEN_UP = "given-up"
"""Reason of a `Refused` raised by a `Kind.FAILED` message: the client will not answer."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message, sent or received."""

    kind: Kind  # type of the message
    assignment: int = 0  # id of the task to which the message belongs; 0 = none
    # number of times that the client had joined before, by which messages of an earlier connection are recognized
    incarnation: int = 0
    meta: dict[str, Any] = field(default_factory=dict)  # a JSON object with string keys and finite numbers
    # tensors of the message; in a received message, the storage that `Expect` returned
    tensors: FlatTensors | None = None


class Refused(Exception):
    """Raised for a received message that must not be used.

    Attributes:
        reason: short reason code, such as bad-magic, bad-json, bad-checksum, wrong-layout, non-finite or too-large.
        detail: description of the error, for a log.
        message: the message without its tensors, if its header and JSON were valid.
    """

    def __init__(self, reason: str, detail: str = "", message: Message | None = None) -> None:
        detail = sanitize_text(detail, _MAX_DETAIL)  # sanitized, since most of this text comes from the peer
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
        self.message = message


class Expect(Protocol):
    """Callback that returns the storage for a message's tensors, given the message's type, task id and JSON fields.

    It may raise `Refused`.
    """

    def __call__(self, kind: Kind, assignment: int, meta: dict[str, Any], /) -> FlatTensors | None:
        """Return a buffer for the tensors of a message that declares them; None if it has none."""
        ...


@dataclass(frozen=True, slots=True)
class Header:
    """Decoded header of a message: its fixed-size first part."""

    kind: Kind
    assignment: int
    incarnation: int
    json_bytes: int
    num_buffers: int
    payload_bytes: int
    json_checksum: int

    @property
    def frame_bytes(self) -> int:
        """Number of bytes of the whole message, header included."""
        footer = FOOTER_BYTES if self.payload_bytes else 0
        return HEADER_BYTES + self.json_bytes + self.payload_bytes + footer


@dataclass(frozen=True, slots=True)
class Body:
    """Decoded JSON section of a message: the JSON object, and the dtype and number of elements of each buffer that follows."""

    meta: dict[str, Any]
    buffers: tuple[tuple[torch.dtype, int], ...]


class Checksum:
    """Running xxh3_64 checksum over a payload, or over one chunk of it; the chunk's index is the seed."""

    def __init__(self, index: int = 0) -> None:
        self._hash = xxhash.xxh3_64(seed=index)

    def update(self, data: memoryview) -> None:
        """Add the next bytes to the checksum."""
        self._hash.update(data)

    def footer(self) -> bytes:
        """Return the checksum as the 8 bytes that end a message."""
        return _CHECKSUM.pack(self._hash.intdigest())


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous 1-D tensor as uint8, without a copy."""
    return (tensor.detach() if tensor.requires_grad else tensor).view(torch.uint8)


def memory(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous 1-D CPU tensor as a memoryview, without a copy."""
    array: Any = byte_view(tensor).numpy()
    return memoryview(array)


def declared(tensors: FlatTensors | None) -> tuple[tuple[torch.dtype, int], ...]:
    """Return (dtype, number of elements) of each buffer in the order in which they are sent; empty buffers are not sent."""
    if tensors is None:
        return ()
    return tuple((d, tensors.buffers[d].numel()) for d in tensors.layout.dtypes if tensors.buffers[d].numel())


def num_payload_bytes(buffers: tuple[tuple[torch.dtype, int], ...]) -> int:
    """Return the number of bytes of the payload; ``buffers`` has the dtype and number of elements of each buffer."""
    return sum(numel * dtype.itemsize for dtype, numel in buffers)


def encode_head(message: Message) -> bytes:
    """Encode the header and JSON section of a message as bytes.

    Raises:
        ValueError: the JSON object is not valid, too long or too deep, or an id or dtype cannot be encoded.
    """
    if message.tensors is None and not message.meta:
        return _encode_plain(message.kind, message.assignment, message.incarnation)
    return _encode_head(message)


@lru_cache(maxsize=256)
def _encode_plain(kind: Kind, assignment: int, incarnation: int) -> bytes:
    """Encode a message without content, such as a heartbeat, once for all clients."""
    return _encode_head(Message(kind, assignment, incarnation))


def _encode_head(message: Message) -> bytes:
    buffers = declared(message.tensors)
    for dtype, _ in buffers:
        if dtype not in DTYPE_NAMES:
            raise ValueError(f"tensors hold {dtype}: cast to one of {', '.join(DTYPES)}")
    section = {"meta": message.meta, "buffers": [[DTYPE_NAMES[dtype], numel] for dtype, numel in buffers]}
    try:
        text = _ENCODER.encode(section).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"meta of {message.kind.name} is not JSON ({error}): send plain finite values only") from None
    if len(text) > MAX_JSON_BYTES or _problem_of_nesting(text):
        raise ValueError(
            f"meta of {message.kind.name} has {len(text)} bytes of JSON: at most {MAX_JSON_BYTES} bytes, {MAX_CONTAINERS} lists "
            f"and objects, and {MAX_DEPTH} nested levels can be sent"
        )
    payload_bytes = num_payload_bytes(buffers)
    sizes = (len(text), len(buffers), 0, payload_bytes, xxhash.xxh3_64_intdigest(text))
    try:
        fields = _FIELDS.pack(MAGIC, FORMAT_VERSION, message.kind, 0, message.assignment, message.incarnation, *sizes)
    except struct.error as error:
        ids = f"assignment {message.assignment}, incarnation {message.incarnation}"
        raise ValueError(f"{ids}: {error}; use unsigned 64-bit and 32-bit numbers") from None
    return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields)) + text


def decode_header(data: bytes | memoryview) -> Header:
    """Decode the header of a message from its first 56 bytes.

    Raises:
        Refused: the header is invalid.
    """
    if len(data) < HEADER_BYTES:
        raise Refused("bad-length", f"{len(data)} bytes are no header of {HEADER_BYTES}")
    fields = bytes(data[: HEADER_BYTES - 8])
    magic, version, kind, flags, assignment, incarnation, *sizes = _FIELDS.unpack(fields)
    json_bytes, num_buffers, reserved, payload_bytes, json_checksum = sizes
    if magic != MAGIC:
        raise Refused("bad-magic", repr(magic))
    if version != FORMAT_VERSION:
        raise Refused("bad-version", f"{version}, this side speaks {FORMAT_VERSION}")
    if _CHECKSUM.unpack(data[HEADER_BYTES - 8 : HEADER_BYTES])[0] != xxhash.xxh3_64_intdigest(fields):
        raise Refused("bad-checksum", "header")
    if kind not in _KINDS:
        raise Refused("bad-kind", str(kind))
    if flags or reserved:
        raise Refused("bad-flags", f"flags {flags}, reserved {reserved}")
    if json_bytes > MAX_JSON_BYTES:
        raise Refused("bad-length", f"JSON of {json_bytes} bytes, at most {MAX_JSON_BYTES}")
    if num_buffers > len(DTYPES) or payload_bytes < num_buffers or (payload_bytes and not num_buffers):
        raise Refused("bad-length", f"{num_buffers} buffers of {payload_bytes} bytes")
    return Header(_KINDS[kind], assignment, incarnation, json_bytes, num_buffers, payload_bytes, json_checksum)


def decode_body(header: Header, data: bytes | memoryview) -> Body:
    """Decode the JSON section of a message.

    Raises:
        Refused: the section is invalid.
    """
    text = bytes(data)
    if len(text) != header.json_bytes:
        raise Refused("bad-length", f"JSON of {len(text)} bytes, header says {header.json_bytes}")
    # refuse only after reading, so that the stream stays in step and the peer gets the reason
    if header.kind is Kind.HELLO and len(text) > MAX_HELLO_BYTES:
        raise Refused("bad-length", f"HELLO of {len(text)} bytes, at most {MAX_HELLO_BYTES}")
    if xxhash.xxh3_64_intdigest(text) != header.json_checksum:
        raise Refused("bad-checksum", "JSON")
    section = _parse(text)
    if not isinstance(section, dict) or section.keys() != {"meta", "buffers"}:
        raise Refused("bad-json", "the section is not an object of meta and buffers")
    meta, buffers = section["meta"], section["buffers"]
    if not isinstance(meta, dict) or not isinstance(buffers, list):
        raise Refused("bad-json", "meta is not an object or buffers is not an array")
    if len(buffers) != header.num_buffers:
        raise Refused("bad-length", f"{len(buffers)} buffers declared, header says {header.num_buffers}")
    pairs = tuple(_buffer(entry) for entry in buffers)
    if len({dtype for dtype, _ in pairs}) != len(pairs):
        raise Refused("bad-json", "a dtype is declared twice")
    if num_payload_bytes(pairs) != header.payload_bytes:
        raise Refused("bad-length", f"declared buffers do not make {header.payload_bytes} bytes")
    return Body(meta, pairs)


def accept(header: Header, body: Body, expect: Expect) -> FlatTensors | None:
    """Get the storage for a message's tensors from ``expect``, and check that the tensors fit into it.

    Raises:
        Refused: the tensors are not wanted or do not fit; the error has the message without tensors.
    """
    try:
        target = expect(header.kind, header.assignment, body.meta)
        if declared(target) != body.buffers:
            raise Refused("wrong-layout", f"declared {_names(body.buffers)}, expected {_names(declared(target))}")
    except Refused as refused:
        refused.message = refused.message or finish(header, body.meta, None)
        raise
    return target


def finish(header: Header, meta: dict[str, Any], tensors: FlatTensors | None) -> Message:
    """Build the message from its decoded parts.

    `tensors`: tensors of the message; None = none.
    """
    return Message(header.kind, header.assignment, header.incarnation, meta, tensors)


def read_payload(header: Header, body: Body, data: memoryview, target: FlatTensors) -> None:
    """Verify a received payload and its checksum, then copy it into ``target``, which may be on any device."""
    end = header.payload_bytes
    if _CHECKSUM.pack(xxhash.xxh3_64_intdigest(data[:end])) != data[end:]:
        raise Refused("bad-checksum", "payload", finish(header, body.meta, None))
    source, start = torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8), 0
    for dtype, numel in body.buffers:
        stop = start + numel * dtype.itemsize
        byte_view(target.buffers[dtype]).copy_(source[start:stop])
        start = stop


_KINDS = {int(kind): kind for kind in Kind}


def _parse(text: bytes) -> object:
    if problem := _problem_of_nesting(text):
        raise Refused("bad-json", problem)
    try:
        section = _DECODER.decode(text.decode())
        if _SURROGATE.search(text):
            _ENCODER.encode(section).encode()  # raises for an unpaired surrogate, which could not be written to a log
    except (ValueError, RecursionError) as error:
        raise Refused("bad-json", str(error)[:200]) from None
    return section


def _problem_of_nesting(text: bytes) -> str:
    """Say what is wrong with the lists and objects of a JSON section: too many, or nested too deep; "" if nothing is."""
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return ""
    brackets = _STRINGS.sub(b"", text).translate(_SQUARE, _NO_BRACKETS)
    if brackets.count(b"[") > MAX_CONTAINERS:
        return f"more than {MAX_CONTAINERS} lists and objects"
    for _ in range(MAX_DEPTH):  # each time the innermost pairs go, and those that hold only such pairs are next
        brackets = brackets.replace(b"[]", b"")
    # brackets without a partner are left in any case
    return f"nested deeper than {MAX_DEPTH}" if b"[]" in brackets or brackets.count(b"[") > MAX_DEPTH else ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise Refused("bad-json", "a key appears twice in one object")
    return made


def _no_constant(name: str) -> Never:
    raise Refused("bad-json", f"{name} is no JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Refused("bad-json", f"{text[:40]} is out of range")
    return value


# created once: json.dumps and json.loads with options create a new one at each call
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"), ensure_ascii=False)
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_finite_float)


def _buffer(entry: object) -> tuple[torch.dtype, int]:
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str) or type(entry[1]) is not int:
        raise Refused("bad-json", "a buffer is declared as [dtype, numel]")
    name, numel = entry
    if name not in DTYPES:
        raise Refused("bad-dtype", name[:40])
    if not 0 < numel < 1 << 60:
        raise Refused("bad-length", f"a buffer of {numel} elements")
    return DTYPES[name], numel


def _names(buffers: tuple[tuple[torch.dtype, int], ...]) -> str:
    return ", ".join(f"{DTYPE_NAMES.get(dtype, dtype)}[{numel}]" for dtype, numel in buffers) or "no tensors"
