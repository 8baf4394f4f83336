"""Read and write encoded messages on a byte stream; tensors are read into and written from their own storage.

A payload goes in chunks of `PIECE_BYTES`, each followed by 8 bytes: its xxh3_64 checksum, seeded with its index, so that a chunk
in another's place is found like one that was damaged. (A payload of one chunk is the codec's, with its footer.) A message that
breaks off can be continued on another connection from its first missing chunk: its head is sent again, then the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, tee

import torch
from torch import Tensor

from raafl.submodel.flat import FlatTensors
from raafl.transport import codec
from raafl.transport.codec import FOOTER_BYTES, HEADER_BYTES, Body, Checksum, Expect, Header, Message, Refused
from raafl.transport.connection import DRAIN_BYTES
from raafl.transport.staging import StagingRings, piece_sizes, problem_of
from raafl.transport.tcp.stream import Stream

PIECE_BYTES = 1 << 20
"""Length of a chunk, and how much is hashed and checked at a time, while it is in the cache.

Buffers of several dtypes are cut one by one, and pieces are put together until there are so many bytes: then a chunk may be up to
twice as long.
"""

_SCRATCH_BYTES = 64 << 10


@dataclass
class Partial:
    """A message that was received only in part.

    Attributes:
        head: header and JSON section, as received.
        header: decoded header of the message.
        body: decoded JSON section of the message.
        target: storage of the tensors; nobody else uses it until the message is complete or given up.
        num_chunks: number of chunks of the payload that were received completely.
        problem: reason code and detail if a received chunk must be refused; None = all are valid.
    """

    head: bytes
    header: Header
    body: Body
    target: FlatTensors
    num_chunks: int = 0
    problem: tuple[str, str] | None = None


class Frames:
    """Reader and writer of messages on a byte stream; one message is sent and one received at a time.

    `in_step`: whether the next byte to read is the first of a message; if not, nothing more can be read.
    `staging`: pinned host memory through which tensors on another device pass.
    `partial`: message that is being received; a new stream can continue it after this one breaks. None = none.
    """

    def __init__(self, stream: Stream, partial: Partial | None = None) -> None:
        self.in_step = True
        self._stream, self.drain_bytes = stream, DRAIN_BYTES
        self._header = memoryview(bytearray(HEADER_BYTES))
        self.staging = StagingRings()
        self.partial = partial

    def send(self, head: bytes, tensors: FlatTensors | None, first_chunk: int = 0) -> int:
        """Send a message; return the number of bytes sent.

        `tensors`: payload of the message; None = none.
        """
        before = self._stream.num_written
        has_payload = tensors is not None and codec.declared(tensors)
        self._stream.write(self._send_payload(head, tensors, first_chunk) if has_payload else [head])  # type: ignore[arg-type]
        return self._stream.num_written - before

    def _send_payload(self, head: bytes, tensors: FlatTensors, first: int) -> list[memoryview | bytes]:
        """Send head and payload in pieces; return the rest that is still to be written, a checksum last."""
        parts: list[memoryview | bytes] = [head]
        checksum, index = Checksum(first), first
        pieces, places = tee(_chunked(tensors, first))
        with self.staging.ring("send", tensors) as staging:
            cut = (piece for piece, _ in pieces)
            hosts = cut if staging is None else staging.outgoing(cut)
            for host, (_, ends) in zip(hosts, places, strict=True):
                if len(parts) > 1 and not isinstance(parts[-1], memoryview):  # a chunk is complete, and this is another
                    self._stream.write(parts)
                    parts = []
                view = codec.memory(host)
                checksum.update(view)
                parts.append(view)
                if ends:
                    parts.append(checksum.footer())
                    index += 1
                    checksum = Checksum(index)
                if staging is not None:  # a slot of the staging buffer is soon used again
                    self._stream.write(parts)
                    parts = []
        return parts

    def receive(self, expect: Expect, finite: bool) -> Message:
        """Receive a message; raises the same errors as `Connection.recv`.

        If a message was received in part on an earlier stream, the remaining part of that message is expected first.
        """
        self.in_step = False
        self._stream.read_into(self._header)
        header = codec.decode_header(self._header)
        text = memoryview(bytearray(header.json_bytes))
        self._stream.read_into(text)
        head, partial = b"".join((self._header, text)), self.partial
        if partial is not None:
            if head != partial.head:
                raise Refused("wrong-message", f"another message than the {partial.header.kind.name} to be continued")
            return self._rest(partial, finite)
        body: Body | None = None
        try:
            body = codec.decode_body(header, text)
            target = codec.accept(header, body, expect)
        except Refused:
            self._drain(header, body)
            raise
        if target is None or not header.payload_bytes:
            self.in_step = True
            return codec.finish(header, body.meta, target)
        self.partial = Partial(head, header, body, target)
        return self._rest(self.partial, finite)

    def _rest(self, partial: Partial, finite: bool) -> Message:
        """Receive the chunks of a message that are missing."""
        self._receive_payload(partial, finite)
        self.in_step, self.partial = True, None
        header, meta = partial.header, partial.body.meta
        if partial.problem is not None:
            raise Refused(*partial.problem, codec.finish(header, meta, None))
        return codec.finish(header, meta, partial.target)

    def _receive_payload(self, partial: Partial, finite: bool) -> None:
        """Receive the missing chunks into the target, and note in ``partial`` what is wrong with them."""
        checksum, footer, problem = Checksum(partial.num_chunks), bytearray(FOOTER_BYTES), partial.problem
        with self.staging.ring("recv", partial.target) as staging:
            for piece, ends in _chunked(partial.target, partial.num_chunks):
                host = piece if staging is None else staging.take(piece)
                view = codec.memory(host)
                self._stream.read_into(view)
                if staging is not None:
                    staging.land(host, piece)  # first, so that the copy runs beside what looks at the values
                checksum.update(view)
                problem = problem or problem_of(host, finite)
                if not ends:
                    continue
                self._stream.read_into(memoryview(footer))
                if footer != checksum.footer():
                    problem = ("bad-checksum", "payload")
                partial.num_chunks, partial.problem = partial.num_chunks + 1, problem
                checksum = Checksum(partial.num_chunks)

    def _drain(self, header: Header, body: Body | None) -> None:
        """Read a refused payload to its end, unless that is too far away, or unknown."""
        # First, since what a peer declares may have more chunks than can be counted.
        if header.payload_bytes > self.drain_bytes:
            return
        num_chunks = 1
        if header.payload_bytes > PIECE_BYTES:
            if body is None:
                return
            num_chunks = count_chunks(body.buffers)
        left = header.payload_bytes + num_chunks * FOOTER_BYTES if header.payload_bytes else 0
        scratch = memoryview(bytearray(min(left, _SCRATCH_BYTES)))
        while left:
            step = min(left, len(scratch))
            self._stream.read_into(scratch[:step])
            left -= step
        self.in_step = True


def count_chunks(buffers: tuple[tuple[torch.dtype, int], ...]) -> int:
    """Return the number of chunks of a payload; ``buffers`` has the dtype and number of elements of each buffer."""
    return sum(_ends(buffers))


def _ends(buffers: tuple[tuple[torch.dtype, int], ...]) -> Iterator[bool]:
    """Yield for each piece of a payload whether it ends a chunk."""
    filled, left = 0, codec.num_payload_bytes(buffers)
    for num_bytes in piece_sizes(buffers, PIECE_BYTES):
        filled, left = filled + num_bytes, left - num_bytes
        yield filled >= PIECE_BYTES or not left
        if filled >= PIECE_BYTES:
            filled = 0


def _chunked(tensors: FlatTensors, first: int) -> Iterator[tuple[Tensor, bool]]:
    """Yield the pieces of a payload from a chunk on, each with whether it ends its chunk."""
    buffers = codec.declared(tensors)
    pieces = chain.from_iterable(
        torch.split(tensors.buffers[dtype].detach(), PIECE_BYTES // dtype.itemsize) for dtype, _ in buffers
    )
    index = 0
    for piece, ends in zip(pieces, _ends(buffers), strict=True):
        if index >= first:
            yield piece, ends
        index += ends
