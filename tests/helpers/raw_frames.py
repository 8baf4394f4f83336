"""Encode and decode whole frames as bytes, which raafl itself writes and reads in pieces."""

from __future__ import annotations

from raafl.transport import codec
from raafl.transport.codec import HEADER_BYTES, Expect, Message, Refused


def encode(message: Message) -> bytes:
    """Return the frame of a message whose tensors are on the CPU; raises as `codec.encode_head` does."""
    payload = [codec.memory(message.tensors.buffers[dtype]) for dtype, _ in codec.declared(message.tensors)]
    checksum = codec.Checksum()
    for part in payload:
        checksum.update(part)
    return b"".join([codec.encode_head(message), *payload, checksum.footer() if payload else b""])


def decode(data: bytes, expect: Expect) -> Message:
    """Return the message of a frame, its tensors in the buffer that ``expect`` returns; raises `Refused`."""
    view = memoryview(data)
    header = codec.decode_header(view)
    if len(view) != header.frame_bytes:
        raise Refused("bad-length", f"frame of {len(view)} bytes, header says {header.frame_bytes}")
    start = HEADER_BYTES + header.json_bytes
    body = codec.decode_body(header, view[HEADER_BYTES:start])
    target = codec.accept(header, body, expect)
    if target is not None and header.payload_bytes:
        codec.read_payload(header, body, view[start:], target)
    return codec.finish(header, body.meta, target)
