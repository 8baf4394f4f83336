"""Read and write the codec's frames on a stream of bytes; tensors are transferred in place."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from raafl.submodel.flat import FlatTensors
from raafl.transport import codec
from raafl.transport.codec import FOOTER_BYTES, HEADER_BYTES, Checksum, Expect, Header, Message, Refused
from raafl.transport.connection import DRAIN_BYTES
from raafl.transport.staging import StagingRings, problem_of
from raafl.transport.tcp.stream import Stream

PIECE_BYTES = 1 << 20
"""How much is hashed and checked at a time, while it is in the cache. The wire does not know of it."""

_SCRATCH_BYTES = 64 << 10


class Frames:
    """Messages on a `Stream`, of which one is sent and one received at a time.

    Attributes:
        in_step: whether the read position is at the start of a message; if not, nothing more can be read.
        staging: pinned memory for tensors on another device.
    """

    def __init__(self, stream: Stream) -> None:
        self.in_step = True
        self._stream, self.drain_bytes = stream, DRAIN_BYTES
        self._header = memoryview(bytearray(HEADER_BYTES))
        self.staging = StagingRings()

    def send(self, head: bytes, tensors: FlatTensors | None) -> int:
        """Send a message whose head is already encoded (`codec.encode_head`); return its bytes on the wire."""
        before = self._stream.num_written
        has_payload = tensors is not None and codec.declared(tensors)
        self._stream.write(self._send_payload(head, tensors) if has_payload else [head])  # type: ignore[arg-type]
        return self._stream.num_written - before

    def _send_payload(self, head: bytes, tensors: FlatTensors) -> list[memoryview | bytes]:
        """Send head and payload in pieces; return the rest that is still to be written, the footer last."""
        parts: list[memoryview | bytes] = [head]
        checksum, waiting = Checksum(), len(head)
        with self.staging.ring("send", tensors) as staging:
            for host in _pieces(tensors) if staging is None else staging.outgoing(_pieces(tensors)):
                view = codec.memory(host)
                checksum.update(view)
                parts.append(view)
                waiting += len(view)
                if waiting >= PIECE_BYTES or staging is not None:  # a slot of the staging buffer is soon used again
                    self._stream.write(parts)
                    parts, waiting = [], 0
        parts.append(checksum.footer())
        return parts

    def receive(self, expect: Expect, finite: bool) -> Message:
        """Receive a message; raise as `Connection.recv` does. After `Refused`, `in_step` tells whether another can follow."""
        self.in_step = False
        self._stream.read_into(self._header)
        header = codec.decode_header(self._header)
        text = memoryview(bytearray(header.json_bytes))
        self._stream.read_into(text)
        try:
            body = codec.decode_body(header, text)
            target = codec.accept(header, body, expect)
        except Refused:
            self._drain(header)
            raise
        if target is not None and header.payload_bytes:
            problem = self._receive_payload(target, finite)
            self.in_step = True
            if problem is not None:
                raise Refused(*problem, codec.finish(header, body.meta, None))
        self.in_step = True
        return codec.finish(header, body.meta, target)

    def _receive_payload(self, target: FlatTensors, finite: bool) -> tuple[str, str] | None:
        """Receive the payload into ``target`` and return what is wrong with it, if anything."""
        checksum, problem = Checksum(), None
        with self.staging.ring("recv", target) as staging:
            for piece in _pieces(target):
                host = piece if staging is None else staging.take(piece)
                view = codec.memory(host)
                self._stream.read_into(view)
                if staging is not None:
                    staging.land(host, piece)  # first, so that the copy runs beside what looks at the values
                checksum.update(view)
                problem = problem or problem_of(host, finite)
        footer = bytearray(FOOTER_BYTES)
        self._stream.read_into(memoryview(footer))
        return problem if footer == checksum.footer() else ("bad-checksum", "payload")

    def _drain(self, header: Header) -> None:
        """Read a refused payload to its end, unless that is too far away."""
        left = header.payload_bytes + FOOTER_BYTES if header.payload_bytes else 0
        if header.payload_bytes > self.drain_bytes:
            return
        scratch = memoryview(bytearray(min(left, _SCRATCH_BYTES)))
        while left:
            step = min(left, len(scratch))
            self._stream.read_into(scratch[:step])
            left -= step
        self.in_step = True


def _pieces(tensors: FlatTensors) -> Iterator[Tensor]:
    for dtype, _ in codec.declared(tensors):
        yield from torch.split(tensors.buffers[dtype].detach(), PIECE_BYTES // dtype.itemsize)
