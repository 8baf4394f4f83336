"""Read and write encoded messages on a byte stream; tensors are read into and written from their own storage.

A payload goes in chunks of `PIECE_BYTES`, each followed by 8 bytes: its xxh3_64 checksum, seeded with its index, so that a chunk
in another's place is found like one that was damaged. (A payload of one chunk is the codec's, with its footer.) A message that
breaks off can be continued on another connection from its first missing chunk: its head is sent again, then the rest.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, tee
from typing import Any, Literal

import torch
from torch import Tensor

from raafl.submodel.flat import FlatTensors, is_finite
from raafl.transport import codec
from raafl.transport.codec import (
    FOOTER_BYTES,
    HEADER_BYTES,
    Body,
    Checksum,
    Expect,
    Header,
    Message,
    Refused,
    byte_view,
    declared,
)
from raafl.transport.connection import DRAIN_BYTES
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

    `sending` and `receiving` do no input or output: they yield the bytes to write and the memory to fill. `send` and `receive`
    perform them on the stream.

    `in_step`: whether the next byte to read is the first of a message; if not, nothing more can be read.
    `staging`: pinned host memory through which tensors on another device pass.
    `partial`: message that is being received; a new stream can continue it after this one breaks. None = none.
    """

    def __init__(self, stream: Stream, partial: Partial | None = None) -> None:
        self.in_step = True
        self._stream, self.drain_bytes = stream, DRAIN_BYTES
        self.staging = StagingRings()
        self.partial = partial

    def send(self, head: bytes, tensors: FlatTensors | None, first_chunk: int = 0) -> int:
        """Send a message; return the number of bytes sent.

        `tensors`: payload of the message; None = none.
        """
        before = self._stream.num_written
        for parts in self.sending(head, tensors, first_chunk):
            self._stream.write(parts)
        return self._stream.num_written - before

    def sending(
        self, head: bytes, tensors: FlatTensors | None, first: int = 0
    ) -> Iterator[Sequence[memoryview | bytes]]:
        """Yield the pieces of a message, each with its checksum, from chunk ``first`` on; each must be written before the next."""
        parts: list[memoryview | bytes] = [head]
        if tensors is None or not codec.declared(tensors):
            yield parts
            return
        checksum, index = Checksum(first), first
        pieces, places = tee(_chunked(tensors, first))
        with self.staging.ring("send", tensors) as staging:
            cut = (piece for piece, _ in pieces)
            hosts = cut if staging is None else staging.outgoing(cut)
            for host, (_, ends) in zip(hosts, places, strict=True):
                # a chunk ends here, and the next one begins
                if len(parts) > 1 and not isinstance(parts[-1], memoryview):
                    yield parts
                    parts = []
                view = codec.memory(host)
                checksum.update(view)
                parts.append(view)
                if ends:
                    parts.append(checksum.footer())
                    index += 1
                    checksum = Checksum(index)
                if staging is not None:  # this buffer of the ring will be reused, so send what it contains first
                    yield parts
                    parts = []
        yield parts

    def receive(self, expect: Expect, finite: bool) -> Message:
        """Receive a message; raises the same errors as `Connection.recv`."""
        steps = self.receiving(expect, finite)
        try:
            while True:
                self._stream.read_into(next(steps))
        except StopIteration as end:
            message: Message = end.value
            return message
        finally:
            steps.close()

    def receiving(self, expect: Expect, finite: bool) -> Generator[memoryview, None, Message]:
        """Yield the memory to fill with what the peer sends next; return the message.

        If a message was received in part on an earlier stream, the remaining part of that message is expected first.
        """
        self.in_step = False
        head_bytes = memoryview(bytearray(HEADER_BYTES))
        yield head_bytes
        header = codec.decode_header(head_bytes)
        pieces, left = list[bytearray](), header.json_bytes
        while left:  # in pieces, so that a header alone claims no memory
            pieces.append(bytearray(min(left, _SCRATCH_BYTES)))
            yield memoryview(pieces[-1])
            left -= len(pieces[-1])
        text = b"".join(pieces)
        head, partial = b"".join((head_bytes, text)), self.partial
        if partial is not None:
            if head != partial.head:
                raise Refused("wrong-message", f"another message than the {partial.header.kind.name} to be continued")
            return (yield from self._rest(partial, finite))
        body: Body | None = None
        try:
            body = codec.decode_body(header, text)
            target = codec.accept(header, body, expect)
        except Refused:
            yield from self._drain(header, body)
            raise
        if target is None or not header.payload_bytes:
            self.in_step = True
            return codec.finish(header, body.meta, target)
        self.partial = Partial(head, header, body, target)
        return (yield from self._rest(self.partial, finite))

    def _rest(self, partial: Partial, finite: bool) -> Generator[memoryview, None, Message]:
        """Receive the chunks of a message that are still missing, and return the message."""
        yield from self._receive_payload(partial, finite)
        self.in_step, self.partial = True, None
        header, meta = partial.header, partial.body.meta
        if partial.problem is not None:
            raise Refused(*partial.problem, codec.finish(header, meta, None))
        return codec.finish(header, meta, partial.target)

    def _receive_payload(self, partial: Partial, finite: bool) -> Iterator[memoryview]:
        """Receive the missing chunks of a payload into its target, and store the first problem found in ``partial``."""
        checksum, footer, problem = Checksum(partial.num_chunks), bytearray(FOOTER_BYTES), partial.problem
        with self.staging.ring("recv", partial.target) as staging:
            for piece, ends in _chunked(partial.target, partial.num_chunks):
                host = piece if staging is None else staging.take(piece)
                view = codec.memory(host)
                yield view
                if staging is not None:
                    # start the copy to the GPU first, so that it overlaps with the checks of the values
                    staging.land(host, piece)
                checksum.update(view)
                problem = problem or problem_of(host, finite)
                if not ends:
                    continue
                yield memoryview(footer)
                if footer != checksum.footer():
                    problem = ("bad-checksum", "payload")
                partial.num_chunks, partial.problem = partial.num_chunks + 1, problem
                checksum = Checksum(partial.num_chunks)

    def _drain(self, header: Header, body: Body | None) -> Iterator[memoryview]:
        """Read and discard a refused payload, so that the stream stays in step; a payload over the limit is not read."""
        # check the size first, since a peer may declare more chunks than can be counted
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
            yield scratch[:step]
            left -= step
        self.in_step = True


def count_chunks(buffers: tuple[tuple[torch.dtype, int], ...]) -> int:
    """Return the number of chunks of a payload; ``buffers`` has the dtype and number of elements of each buffer."""
    return sum(_ends(buffers))


def _ends(buffers: tuple[tuple[torch.dtype, int], ...]) -> Iterator[bool]:
    """Yield for each piece of a payload whether it is the last one of its chunk."""
    filled, left = 0, codec.num_payload_bytes(buffers)
    for num_bytes in piece_sizes(buffers, PIECE_BYTES):
        filled, left = filled + num_bytes, left - num_bytes
        yield filled >= PIECE_BYTES or not left
        if filled >= PIECE_BYTES:
            filled = 0


def _chunked(tensors: FlatTensors, first: int) -> Iterator[tuple[Tensor, bool]]:
    """Yield the pieces of a payload from chunk ``first`` on, each with whether it ends its chunk."""
    buffers = codec.declared(tensors)
    pieces = chain.from_iterable(
        # split only large tensors: for small ones, which are frequent, a split costs as much as the checksum
        torch.split(tensors.buffers[dtype].detach(), PIECE_BYTES // dtype.itemsize)
        if numel * dtype.itemsize > PIECE_BYTES
        else (tensors.buffers[dtype],)
        for dtype, numel in buffers
    )
    index = 0
    for piece, ends in zip(pieces, _ends(buffers), strict=True):
        if index >= first:
            yield piece, ends
        index += ends


CHUNK_BYTES = 4 << 20
"""Longest piece. How a payload is cut belongs to the wire format: both ends must do it alike."""

NUM_POSTED = 128
"""Pieces handed to the transport at a time: few enough to bound its queues, enough never to stall it."""

NUM_STAGED, NUM_AHEAD = 6, 2
"""Pieces of the staging buffer that a CUDA tensor passes through, and how many of them are filled ahead of the wire."""


def chunks(tensors: FlatTensors) -> Iterator[Tensor]:
    """Split tensors into 1-D views of at most `CHUNK_BYTES` each; yield these in the order in which they are sent."""
    for dtype, _ in declared(tensors):
        yield from torch.split(tensors.buffers[dtype].detach(), CHUNK_BYTES // dtype.itemsize)


def piece_bytes(buffers: tuple[tuple[torch.dtype, int], ...]) -> Iterator[int]:
    """Yield the length in bytes of each piece that `chunks` makes.

    ``buffers`` has the dtype and number of elements of each buffer.
    """
    yield from piece_sizes(buffers, CHUNK_BYTES)


def piece_sizes(buffers: tuple[tuple[torch.dtype, int], ...], longest: int) -> Iterator[int]:
    """Yield the length in bytes of each piece, at most ``longest``.

    ``buffers`` has the dtype and number of elements of each buffer.
    """
    for dtype, numel in buffers:
        whole, rest = divmod(numel * dtype.itemsize, longest)
        yield from itertools.repeat(longest, whole)
        if rest:
            yield rest


def is_sound(piece: Tensor) -> bool:
    """Check whether the received bytes are valid values of the tensor's dtype: a bool must be 0 or 1."""
    return piece.dtype != torch.bool or piece.numel() == 0 or int(byte_view(piece).max()) <= 1


def problem_of(piece: Tensor, finite: bool) -> tuple[str, str] | None:
    """Check received values; return a reason code and detail if they must be refused, else None."""
    if not is_sound(piece):
        return "bad-value", "a bool is neither 0 nor 1"
    if finite and not is_finite(piece):
        return "non-finite", f"a NaN or an infinity among the {piece.dtype}"
    return None


class Staging:
    """Ring of pinned host buffers (slots) through which the pieces of a GPU tensor pass; allocated once, then reused.

    The GPU copies on a stream of this ring, independent of its other work. Each slot of the ring has an event that
    marks the end of its copy, so that the next pieces are copied while one is hashed or sent.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocate the ring of `NUM_STAGED` host buffers of `CHUNK_BYTES` each and, for a GPU, a CUDA stream for the copies."""
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(device) if device.type == "cuda" else None
        memory = torch.empty(NUM_STAGED * CHUNK_BYTES, dtype=torch.uint8, pin_memory=self._stream is not None)
        self._slots = torch.split(memory, CHUNK_BYTES)
        self._copied: list[Any] = [None] * NUM_STAGED  # per buffer: CUDA event after the last copy from or to it
        self._next = 0

    @contextmanager
    def in_use(self) -> Iterator[Staging]:
        """Return a context for transferring one payload: copies wait for earlier GPU work, and are complete at the end."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        try:
            yield self
        finally:  # also after an error: the next user of the buffers does not wait for this stream
            for index in range(NUM_STAGED):
                self._wait(index)

    def take(self, like: Tensor) -> Tensor:
        """Return the next host buffer of the ring as a 1-D tensor; wait until the last copy from or to it is complete.

        Args:
            like: tensor that determines length and dtype.
        """
        index = self._next % NUM_STAGED
        self._next += 1
        self._wait(index)
        return self._slots[index][: like.numel() * like.dtype.itemsize].view(like.dtype)

    def outgoing(self, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
        """Copy pieces of a GPU tensor to host buffers; yield each buffer while the next `NUM_AHEAD` pieces are copied.

        Each yielded buffer must be used before `NUM_STAGED` - `NUM_AHEAD` further buffers are yielded, since it is reused.
        """
        ahead = deque[Tensor]()
        for piece in pieces:
            ahead.append(self.take(piece))
            self._copy(ahead[-1], piece, ahead[-1])
            if len(ahead) > NUM_AHEAD:
                yield self._filled(ahead.popleft())
        while ahead:
            yield self._filled(ahead.popleft())

    def land(self, slot: Tensor, piece: Tensor) -> None:
        """Start to copy a received piece from a host buffer to the GPU.

        Args:
            slot: host buffer from `take`.
            piece: part of the tensor on the GPU.
        """
        self._copy(piece, slot, slot)

    def _copy(self, target: Tensor, source: Tensor, slot: Tensor) -> None:
        # copy bytes, since a copy of bools would change invalid values
        target, source, cuda = byte_view(target), byte_view(source), torch.cuda
        if self._stream is None:
            target.copy_(source)
            return
        with cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        event: Any = cuda.Event
        self._copied[self._index(slot)] = copied = event(blocking=True)
        copied.record(self._stream)

    def _filled(self, slot: Tensor) -> Tensor:
        self._wait(self._index(slot))
        return slot

    def _wait(self, index: int) -> None:
        event, self._copied[index] = self._copied[index], None
        if event is not None:
            event.synchronize()

    @staticmethod
    def _index(slot: Tensor) -> int:
        return int(slot.storage_offset()) * slot.dtype.itemsize // CHUNK_BYTES


class StagingRings:
    """Host buffers of a connection, one `Staging` ring for each direction, allocated at first use."""

    def __init__(self) -> None:
        self._rings: dict[tuple[str, torch.device], Staging] = {}

    def ring(self, way: Literal["send", "recv"], tensors: FlatTensors) -> AbstractContextManager[Staging | None]:
        """Return a context for transferring one payload; it yields the ring of host buffers through which the tensors pass.

        It yields None if the tensors are in host memory and need no ring.
        """
        if not self.are_needed(tensors):
            return nullcontext()
        key = way, tensors.device
        if key not in self._rings:
            self._rings[key] = Staging(tensors.device)
        return self._rings[key].in_use()

    def are_needed(self, tensors: FlatTensors) -> bool:
        """Check whether the tensors are on a device that the transport cannot read directly."""
        return tensors.device.type != "cpu"
