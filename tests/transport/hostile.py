"""What hostile peers send."""

from __future__ import annotations

import queue
import random
import socket
import struct
import threading

import torch
import xxhash

from raafl.errors import parse_address
from raafl.submodel.flat import FlatTensors, Layout
from raafl.transport import Kind, Message, PeerLost, PeerTimeout, Refused
from raafl.transport.tcp.listener import Listener, connect
from tests.helpers.certificates import TOKEN, federation
from tests.helpers.raw_frames import encode

LAYOUT = Layout.pack([("w", (1000,), torch.float32)])
WAIT_S = 60
PIECE_S = 1.5


class Server(threading.Thread):
    """Serves clients as a run does: each accepted update is answered, each assignment counts once, the rest is refused."""

    def __init__(self, tls=True, **more):
        super().__init__(daemon=True)
        self.refused, self.turned_away, self.lost = queue.Queue(), queue.Queue(), queue.Queue()
        self.sessions = []
        ours, self.theirs = (federation().server, federation().site()) if tls else (TOKEN, TOKEN)
        self.listener = Listener("127.0.0.1:0", ours, self.admit, self.turned_away.put, timeout_s=PIECE_S, **more)

    def admit(self, pair, peer):
        session = threading.Thread(target=self.serve, args=(pair, peer.client), daemon=True)
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
        return connect(
            self.listener.address, client, self.theirs.client_login(), timeout_s=WAIT_S, pair_timeout_s=WAIT_S
        )

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
        "magic": b"RAFL",
        "version": 1,
        "kind": 4,
        "flags": 0,
        "assignment": 1,
        "incarnation": 0,
        "json_bytes": len(text),
        "num_buffers": 1,
        "reserved": 0,
        "payload_bytes": len(payload),
        "json_checksum": xxhash.xxh3_64_intdigest(text),
        **changed,
    }
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
        + GOOD[HEAD + 2000 :]
        + GOOD[HEAD : HEAD + 2000],
        "bad-checksum",
        USABLE,
    ),
    "the same update again": (GOOD + GOOD, "unknown-assignment", USABLE),
    "a JSON section of 4 GB": (frame(json_bytes=2**32 - 1), "bad-length", CLOSED),
    "a JSON section of a byte too many": (frame(json_bytes=(1 << 20) + 1), "bad-length", CLOSED),
    "4 billion buffers": (frame(num_buffers=2**32 - 1), "bad-length", CLOSED),
    "a payload of 2^62 bytes that is not declared": (frame(payload=b"", payload_bytes=2**62), "bad-length", CLOSED),
    "a payload of 2^59 bytes": (
        frame(b'{"meta":{},"buffers":[["int8",%d]]}' % 2**59, b"", payload_bytes=2**59),
        "wrong-layout",
        CLOSED,
    ),
    "a payload over the drain limit": (
        frame(b'{"meta":{},"buffers":[["int8",%d]]}' % (2**30 + 1), b"", payload_bytes=2**30 + 1),
        "wrong-layout",
        CLOSED,
    ),
    "a hundred times what is expected": (
        encode(update(tensors=FlatTensors.from_named({"w": torch.ones(100_000)}))),
        "wrong-layout",
        USABLE,
    ),
    "one element less": (
        encode(update(tensors=FlatTensors.from_named({"w": torch.ones(999)}))),
        "wrong-layout",
        USABLE,
    ),
    "another dtype of the same length": (
        encode(update(tensors=FlatTensors.from_named({"w": torch.ones(1000, dtype=torch.int32)}))),
        "wrong-layout",
        USABLE,
    ),
    "no tensors": (encode(Message(Kind.UPDATE, 1)), "wrong-layout", USABLE),
    "a dtype that is none": (frame(b'{"meta":{},"buffers":[["float8",4000]]}'), "bad-dtype", USABLE),
    "a pickle for JSON": (frame(b"\x80\x04\x95" + bytes(40)), "bad-json", USABLE),
    "JSON nested a thousand deep": (frame(b'{"meta":' + b"[" * 1000 + b"]" * 1000 + b"}"), "bad-json", USABLE),
    "NaN in JSON": (frame(b'{"meta":{"loss":NaN},"buffers":[["float32",1000]]}'), "bad-json", USABLE),
    "a NaN": (with_value(float("nan")), "non-finite", USABLE),
    "an infinity": (with_value(float("inf")), "non-finite", USABLE),
}


def answered(pair, assignment):
    """Send a sound update and return whether it is answered."""
    pair.send(update(assignment))
    while (answer := pair.recv(nothing, WAIT_S)).assignment != assignment:
        pass
    return answer.kind is Kind.KEEPALIVE
