"""Damage messages by a seed: replace parts of their plain data, or bytes of their frames, with or without valid checksums."""

from __future__ import annotations

import os
import random
import struct
from typing import Any

import xxhash

from raafl.transport import Message
from raafl.transport.codec import HEADER_BYTES
from tests.helpers.raw_frames import encode

NUM_LONG = int(os.environ.get("RAAFL_FUZZ_MESSAGES", "10000"))
"""Frames of each message in `make test-long`."""
NUM_QUICK = 60
"""Frames of each message in each run."""

DEEP: Any = []
for _ in range(30):
    DEEP = [DEEP]
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    2**31,
    2**53,
    2**64,
    10**30,
    -(10**18),
    0.5,
    -0.0,
    1e308,
    5e-324,
    "",
    "0",
    "x",
    "x" * 5000,
    "\x1b[2J",
    "a\nb",
    "\u202e",
    "\ud7ff",
    "NaN",
    "__class__",
    "full",
    [],
    [[]],
    [0, 1],
    [0] * 200,
    {},
    {"": None},
    {"a": {"b": [1]}},
    DEEP,
]


class Bender:
    """Source of damaged messages, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def value(self, value: Any, strength: float = 0.15) -> Any:
        """Return plain data in which some parts are replaced, left out, doubled or added, a share of about ``strength``."""
        rng = self.rng
        if rng.random() < strength / 3:
            return rng.choice(VALUES)
        if isinstance(value, dict):
            names = [name for name in value if rng.random() > strength / 3]
            made = {name: self.value(value[name], strength) for name in names}
            if rng.random() < strength:
                made[str(rng.choice([*value, "x" * 300, "\x1b", "more", "confirms", "ahead"]))] = rng.choice(VALUES)
            return made
        if isinstance(value, list | tuple):
            made = [self.value(one, strength) for one in value if rng.random() > strength / 6]
            return made * 2 if rng.random() < strength / 6 else made
        return rng.choice([*VALUES, value]) if rng.random() < strength else value

    def frame(self, message: Message) -> bytes:
        """Return the frame of a message of the same kind whose fields, and perhaps whose bytes, are damaged."""
        rng, number = self.rng, self.rng.choice
        meta = message.meta if rng.random() < 0.2 else self.value(message.meta, rng.choice([0.05, 0.15, 0.5]))
        assignment = message.assignment if rng.random() < 0.85 else number([0, 1, 2, 7, 2**63, 2**64 - 1])
        incarnation = message.incarnation if rng.random() < 0.9 else number([0, 1, 2, 2**32 - 1])
        tensors = message.tensors if rng.random() < 0.95 else None
        kept = meta if isinstance(meta, dict) else {}
        try:
            data = encode(Message(message.kind, assignment, incarnation, kept, tensors))
        except (ValueError, TypeError, UnicodeError, RecursionError):  # raafl could not encode such a message
            data = encode(Message(message.kind, assignment, incarnation, {}, tensors))
        return bytes(self._bytes(data)) if rng.random() < 0.25 else data

    def _bytes(self, data: bytes) -> bytearray:
        """Damage bytes of a frame; half of the time, make its checksums valid again."""
        rng, frame = self.rng, bytearray(data)
        how = rng.randrange(4)
        if how == 0:
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        elif how == 1:
            struct.pack_into("<I", frame, 20, rng.choice([0, 1, 2**16, 2**20 + 1, 2**32 - 1]))
        elif how == 2:
            struct.pack_into("<Q", frame, 32, rng.choice([0, 8, 4096, 2**31, 2**62]))
        else:
            frame[6] = rng.randrange(20)
        if rng.random() < 0.5:
            (size,) = struct.unpack_from("<I", frame, 20)
            text = bytes(frame[HEADER_BYTES : HEADER_BYTES + size])
            struct.pack_into("<Q", frame, 40, xxhash.xxh3_64_intdigest(text))
            struct.pack_into("<Q", frame, 48, xxhash.xxh3_64_intdigest(bytes(frame[:48])))
        return frame[: rng.randrange(1, len(frame))] if rng.random() < 0.1 else frame
