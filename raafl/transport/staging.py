"""Split tensors into pieces, so that one piece is hashed, checked and copied while the next is transferred."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from raafl.submodel.flat import FlatTensors, is_finite
from raafl.transport.codec import byte_view, declared

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
        """Allocate the ring, `NUM_STAGED` times `CHUNK_BYTES`, and a stream of ``device`` if that is a GPU."""
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(device) if device.type == "cuda" else None
        memory = torch.empty(NUM_STAGED * CHUNK_BYTES, dtype=torch.uint8, pin_memory=self._stream is not None)
        self._slots = torch.split(memory, CHUNK_BYTES)
        self._copied: list[Any] = [None] * NUM_STAGED  # the event after the last copy from or to each
        self._next = 0

    @contextmanager
    def in_use(self) -> Iterator[Staging]:
        """Return a context for transferring one payload: copies wait for earlier GPU work, and are complete at the end."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        try:
            yield self
        finally:  # after an error, too: whoever is given the memory next knows nothing of this stream
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
        # as bytes: a copy of bools would mend what is none
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
