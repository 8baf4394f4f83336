"""Emulate streams and events of GPUs, and check the order of accesses to memory.

An asynchronous copy between host and GPU is made as late as on a real GPU: when the CPU waits for it, or when work
after it in its stream begins. An access to memory that another stream still uses is refused unless the stream, or the
CPU, has waited for that, where a real GPU would now and then compute wrong values.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
Mark = dict["Stream", int]
"""Of each stream, how much of its work."""


class Stream:
    """Queue of a GPU's work, done in order.

    `number`: number of its last piece of work. `after`: last piece of work of each other stream for which this stream
    has waited.
    """

    def __init__(self, of: Streams, index: int) -> None:
        self.of, self.device, self.number = of, torch.device("cuda", index), 0
        of.all.append(self)
        self.after: Mark = {}
        self.late = deque[tuple[int, Any, Any]]()
        self._lock = threading.RLock()

    def mark(self) -> Mark:
        return {**self.after, self: self.number}

    def wait_stream(self, other: Stream) -> None:
        merge(self.after, other.mark())

    def wait_event(self, event: Event) -> None:
        merge(self.after, event.mark)

    def synchronize(self) -> None:
        self.of.counts.add("waits")
        self.of.known(self.mark())

    def run(self, number: int) -> None:
        """Make the postponed copies up to piece of work ``number``."""
        with self._lock:
            while self.late and self.late[0][0] <= number:
                for other, known in self.after.items():
                    other.run(known)
                _, func, args = self.late.popleft()
                with torch._C._DisableTorchDispatch():
                    func(*args)


class Event:
    """Mark in a stream's work for which others can wait."""

    def __init__(self, of: Streams) -> None:
        self.of, self.mark = of, Mark()

    def record(self, stream: Stream) -> None:
        self.mark = stream.mark()

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)

    def synchronize(self) -> None:
        self.of.counts.add("events")
        self.of.known(self.mark)

    def query(self) -> bool:
        self.of.known(self.mark)
        return True


@dataclass(frozen=True, eq=False)
class Access:
    """One access of a postponed copy to memory: read or write."""

    stream: Stream
    number: int
    start: int
    end: int
    writes: bool


class Streams:
    """All streams of the emulated GPUs, and a record of which accesses are still pending.

    `counts`: numbers of ``late`` copies, of ``events`` that the CPU waited for, and of ``waits`` for all of a stream.
    `pending`: accesses of copies for which the CPU has not waited. `host`: work of each stream that the CPU knows to be
    done.
    """

    def __init__(self, counts: Counts, num_devices: int) -> None:
        self.counts, self.host = counts, Mark()
        self.all: list[Stream] = []
        self.defaults = [Stream(self, index) for index in range(num_devices)]
        self.pending: dict[Access, None] = {}
        self._read: dict[int, tuple[Stream, int]] = {}
        self._written: dict[int, tuple[Stream, int]] = {}
        self._of_thread = threading.local()

    def current(self, index: int) -> Stream:
        """Return the stream to which this thread submits work of a GPU."""
        chosen: dict[int, Stream] = getattr(self._of_thread, "chosen", {})
        return chosen.get(index, self.defaults[index])

    def synchronize(self, index: int, counted: bool = True) -> None:
        """Let the CPU wait for all work of a GPU."""
        self.counts.add("waits", int(counted))
        for stream in [one for one in self.all if one.device.index == index]:
            self.known(stream.mark())

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Make ``stream`` the current one of this thread within the block."""
        before: dict[int, Stream] = getattr(self._of_thread, "chosen", {})
        self._of_thread.chosen = {**before, stream.device.index: stream}
        try:
            yield
        finally:
            self._of_thread.chosen = before

    def known(self, mark: Mark) -> None:
        """Record that the CPU has waited for the given piece of work of each stream."""
        for stream, number in mark.items():
            stream.run(number)
        merge(self.host, mark)
        for access in list(self.pending):
            if self.host.get(access.stream, 0) >= access.number:
                self.pending.pop(access, None)

    def begin(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], gpus: list[int]) -> bool:
        """Check an operation's accesses to memory; return True if it is a copy that is made later.

        `gpus`: numbers of the GPUs that take part; empty = the CPU computes.
        """
        if func.is_view:
            return False
        written = {id(leaf) for leaf in tree_leaves(writes(func, args, kwargs))}
        if not gpus:
            self._check(None, tensors, written)
            return False
        stream, *others = (self.current(index) for index in gpus)
        for other in others:  # a copy between two GPUs is ordered in the streams of both, as in ATen's Copy.cu
            stream.wait_stream(other)
        self._check(stream, tensors, written)
        for tensor in tensors:
            if tensor.is_cuda:
                self._ordered(stream, self._written.get(key(tensor)))
                if id(tensor) in written:
                    self._ordered(stream, self._read.get(key(tensor)))
        stream.number += 1
        if func is aten.copy_.default and args[2:] == (True,) and args[0].device.type != args[1].device.type:
            self.counts.add("late")
            stream.late.append((stream.number, func, args[:2]))
            for tensor in args[:2]:
                start = tensor.data_ptr()
                access = Access(stream, stream.number, start, start + tensor.nbytes, tensor is args[0])
                self.pending[access] = None
            return True
        for other in others:
            other.wait_stream(stream)
        for one, number in stream.mark().items():
            one.run(number)
        for tensor in tensors:
            if tensor.is_cuda:
                (self._written if id(tensor) in written else self._read)[key(tensor)] = stream, stream.number
        return False

    def made(self, tensor: Tensor) -> None:
        """Record a new tensor, and forget earlier accesses to its memory."""
        stream = self.current(tensor.get_device())
        self._read.pop(key(tensor), None)
        self._written[key(tensor)] = stream, stream.number

    def _check(self, stream: Stream | None, tensors: list[Tensor], written: set[int]) -> None:
        for access in list(self.pending):
            after = self.host if stream is None else {**self.host, **stream.mark()}
            if after.get(access.stream, 0) >= access.number:
                continue
            for tensor in tensors:
                start = tensor.data_ptr()
                overlaps = start < access.end and access.start < start + tensor.nbytes
                if overlaps and (access.writes or id(tensor) in written):
                    who = "the CPU" if stream is None else f"a stream of {stream.device}"
                    raise RuntimeError(f"{who} touches what a copy on another stream is at work on: wait for its event")

    def _ordered(self, stream: Stream, last: tuple[Stream, int] | None) -> None:
        if last is None or last[0] is stream:
            return
        if max(stream.after.get(last[0], 0), self.host.get(last[0], 0)) < last[1]:
            raise RuntimeError(f"a stream of {stream.device} touches what another is at work on: have it wait for that")


def merge(into: Mark, mark: Mark) -> None:
    """Merge two vector clocks: the larger count of each stream."""
    for stream, number in mark.items():
        into[stream] = max(number, into.get(stream, 0))


def key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def writes(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return those arguments of ATen's operation ``func`` to which it writes."""
    return [
        args[place] if place < len(args) else kwargs.get(name)
        for place, name in written_places(func)
        if place < len(args) or name in kwargs
    ]


class Counts(Counter[str]):
    """Counter that several threads may increase."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def add(self, what: str, number: int = 1) -> None:
        with self._lock:
            self[what] += number


@cache
def written_places(func: Any) -> list[tuple[int, str]]:
    if func is aten.native_batch_norm.default:  # its schema does not say that it writes the running statistics
        return [(3, "running_mean"), (4, "running_var")]
    return [(place, of.name) for place, of in enumerate(func._schema.arguments) if of.is_write]
