"""Connect two ranks by a Gloo process group of their own, so that a dead peer affects no other connection.

A frame of at most `FIRST_BYTES` is one Gloo message. A longer one is its first `FIRST_BYTES` without payload, the rest of its
JSON section, the payload in pieces, and the checksum. Each end keeps the receive of the next first message posted, so a short
message needs no rendezvous. Gloo accepts a message shorter than the posted receive; a longer one terminates the receiving
process (an enforce in Gloo's own thread), so both ends must run raafl on a trusted network.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as _distributed

from raafl.submodel.flat import FlatTensors
from raafl.transport import codec
from raafl.transport.codec import FOOTER_BYTES, HEADER_BYTES, Body, Checksum, Expect, Header, Message, Refused
from raafl.transport.connection import DRAIN_BYTES, Connection, PeerLost, PeerTimeout
from raafl.transport.frames import (
    CHUNK_BYTES,
    NUM_AHEAD,
    NUM_POSTED,
    NUM_STAGED,
    Staging,
    StagingRings,
    chunks,
    piece_bytes,
    problem_of,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

dist: Any = _distributed  # untyped: most of torch.distributed has no annotations

FIRST_BYTES = 64 << 10
# Tags of a message's first transfer and of its other ones. Nothing is ever sent with the third: a receive with it times
# out.
_FIRST, _REST, _NEVER = 0, 1, 2
_POKE_S = 0.001


class GlooConnection(Connection):
    """Connection over Gloo; CUDA tensors pass through a pinned buffer of 24 MiB for each direction."""

    def __init__(self, group: Any, rank: int, timeout_s: float) -> None:
        """Create a connection over a Gloo process group of two ranks; callers use `connect`."""
        self.timeout_s, self.drain_bytes = timeout_s, DRAIN_BYTES
        self._group: Any = group
        self._peer = 1 - rank
        self._closing = threading.Lock()
        self._out, self._in = (torch.zeros(FIRST_BYTES, dtype=torch.uint8) for _ in range(2))
        self._out_memory, self._in_memory = codec.memory(self._out), codec.memory(self._in)
        self._scratch: Tensor | None = None
        self.staging = StagingRings()
        self._ended: PeerLost | PeerTimeout | None = None
        self._posted: Any = self._start("recv", self._in, _FIRST)

    @classmethod
    def connect(
        cls, store: Store, prefix: str, server: bool, timeout_s: float, hostname: str | None = None
    ) -> GlooConnection:
        """Connect to a peer; both call this with the same ``prefix``, one with ``server=True`` and one with ``server=False``.

        Args:
            store: store shared with the peer. It is cloned if possible, since a store that waits blocks all its users.
            prefix: name of the connection in the store, e.g. ``pair/3/0`` for the first connection of client 3; never
                used twice.
            server: whether this side is rank 0.
            timeout_s: seconds to wait for the peer; later, for each piece of a long message.
            hostname: network address to listen on; None = ``GLOO_SOCKET_IFNAME`` or Gloo's default interface.

        Raises:
            PeerTimeout: the peer did not connect in time.
            PeerLost: the peer connected and then left.
        """
        store = cloned(store)
        options = dist.ProcessGroupGloo._Options()
        options._timeout, options._threads = _span(timeout_s), 1
        options._devices = [_device(hostname)]
        rank = 0 if server else 1
        try:
            group = dist.ProcessGroupGloo(dist.PrefixStore(prefix, store), rank, 2, options)
            return cls(group, rank, timeout_s)
        except RuntimeError as error:
            raise _translate(error, f"no peer at '{prefix}' within {timeout_s:g} s") from None

    def send(self, message: Message, timeout_s: float | None = None) -> int:
        """Send a message; see `Connection.send`."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        head = codec.encode_head(message)
        payload_bytes = codec.num_payload_bytes(codec.declared(message.tensors))
        total = len(head) + payload_bytes + (FOOTER_BYTES if payload_bytes else 0)
        with self._ending():
            if total <= FIRST_BYTES:
                self._send_first(self._fill(head, message.tensors, payload_bytes), timeout_s)
                return total
            first = min(len(head), FIRST_BYTES)
            self._out_memory[:first] = head[:first]
            self._send_first(first, timeout_s)
            if first < len(head):
                rest = torch.frombuffer(bytearray(head[first:]), dtype=torch.uint8)
                self._wait(self._start("send", rest, _REST), timeout_s)
            if message.tensors is not None and payload_bytes:
                self._send_payload(message.tensors, timeout_s)
        return total

    def recv(self, expect: Expect, timeout_s: float, *, finite: bool = False) -> Message:
        """Receive a message; see `Connection.recv`."""
        self.received_bytes = 0
        with self._ending():
            if self._ended is not None:
                raise self._ended
            self._wait(self._posted, timeout_s)
            self.received_bytes = HEADER_BYTES
            header = codec.decode_header(self._in_memory[:HEADER_BYTES])
            self.received_bytes = header.frame_bytes
            # clear the old header, which must not be taken for a new one if the next message is cut short
            self._in_memory[:HEADER_BYTES] = bytes(HEADER_BYTES)
            refused = None
            try:
                message = self._receive(header, expect, finite)
            except Refused as error:
                refused = error
            self._post_next()
        if refused is not None:
            raise refused
        return message

    def close(self) -> None:
        """End the connection; see `Connection.close`."""
        with self._closing:  # two threads may close at once, and only one may get the group
            # set this before the group ends: a thread that is woken by that reads it to learn which end closed
            self.closed = True
            group, self._group, self._posted = self._group, None, None
        if group is None:
            return
        # Gloo's abort does not wake a waiting thread, but a receive that times out makes all pending operations fail
        with suppress(RuntimeError):
            group.recv([torch.empty(1, dtype=torch.uint8)], self._peer, _NEVER).wait(_span(_POKE_S))

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Close the connection if the ``with`` block raises an error."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _start(self, what: str, tensor: Tensor, tag: int) -> object:
        group = self._group  # read once, since `close` in another thread may set it to None at any time
        if group is None:
            raise PeerLost("closed-here")
        try:
            return getattr(group, what)([tensor], self._peer, tag)
        except RuntimeError as error:
            raise self._error(error, 0.0) from None

    def _wait(self, work: Any, timeout_s: float) -> None:
        if work is None:
            raise PeerLost("closed-here")
        try:
            work.wait(_span(timeout_s))
        except RuntimeError as error:
            raise self._error(error, timeout_s) from None

    def _error(self, error: RuntimeError, timeout_s: float) -> PeerLost | PeerTimeout:
        if self.closed:
            return PeerLost("closed-here")
        return _translate(error, f"nothing from the peer within {timeout_s:g} s")

    def _post_next(self) -> None:
        # a peer may leave after its last message; the next receive reports the error
        try:
            if not self.closed:
                self._posted = self._start("recv", self._in, _FIRST)
        except (PeerLost, PeerTimeout) as error:
            self._ended = error

    def _fill(self, head: bytes, tensors: FlatTensors | None, payload_bytes: int) -> int:
        """Copy a short message into the sending buffer, and return its length in bytes."""
        end = len(head)
        self._out_memory[:end] = head
        if tensors is None or not payload_bytes:
            return end
        for dtype, numel in codec.declared(tensors):
            start, end = end, end + numel * dtype.itemsize
            self._out[start:end].copy_(codec.byte_view(tensors.buffers[dtype]))
        checksum = Checksum()
        checksum.update(self._out_memory[len(head) : end])
        self._out_memory[end : end + FOOTER_BYTES] = checksum.footer()
        return end + FOOTER_BYTES

    def _send_first(self, length: int, timeout_s: float) -> None:
        self._wait(self._start("send", self._out[:length], _FIRST), timeout_s)

    def _send_payload(self, tensors: FlatTensors, timeout_s: float) -> None:
        checksum, in_flight = Checksum(), deque[tuple[Any, Tensor]]()
        with self.staging.ring("send", tensors) as staging:
            for host in chunks(tensors) if staging is None else staging.outgoing(chunks(tensors)):
                in_flight.append((self._start("send", codec.byte_view(host), _REST), host))
                checksum.update(codec.memory(host))
                if len(in_flight) >= _num_in_flight(staging):
                    self._wait(in_flight.popleft()[0], timeout_s)
        footer = torch.frombuffer(bytearray(checksum.footer()), dtype=torch.uint8)
        in_flight.append((self._start("send", footer, _REST), footer))
        for work, _ in in_flight:
            self._wait(work, timeout_s)

    def _receive(self, header: Header, expect: Expect, finite: bool) -> Message:
        inline = header.frame_bytes <= FIRST_BYTES
        body = None
        try:
            body = codec.decode_body(header, self._json(header))
            target = codec.accept(header, body, expect)
        except Refused:
            if not inline and header.payload_bytes:
                self._drain(header, body)
            raise
        if target is not None and header.payload_bytes:
            if inline:
                start = HEADER_BYTES + header.json_bytes
                codec.read_payload(header, body, self._in_memory[start : header.frame_bytes], target)
                problem = next(filter(None, (problem_of(buffer, finite) for buffer in target.buffers.values())), None)
            else:
                problem = self._recv_payload(target, finite)
            if problem is not None:
                raise Refused(*problem, codec.finish(header, body.meta, None))
        return codec.finish(header, body.meta, target)

    def _json(self, header: Header) -> memoryview:
        inline = memoryview(self._in_memory[HEADER_BYTES : HEADER_BYTES + header.json_bytes])
        if len(inline) == header.json_bytes:
            return inline
        whole = torch.empty(header.json_bytes, dtype=torch.uint8)
        whole[: len(inline)] = self._in[HEADER_BYTES:]
        self._wait(self._start("recv", whole[len(inline) :], _REST), self.timeout_s)
        return codec.memory(whole)

    def _recv_payload(self, target: FlatTensors, finite: bool) -> tuple[str, str] | None:
        """Receive a payload into ``target``; return reason and description of its first problem, None if it has none."""
        footer = torch.empty(FOOTER_BYTES, dtype=torch.uint8)
        checksum, problem = Checksum(), None
        todo = itertools.chain(chunks(target), [footer])
        in_flight = deque[tuple[Any, Tensor, Tensor]]()
        with self.staging.ring("recv", target) as staging:

            def post() -> None:
                chunk = next(todo, None)
                if chunk is not None:
                    host = chunk if staging is None or chunk is footer else staging.take(chunk)
                    in_flight.append((self._start("recv", codec.byte_view(host), _REST), host, chunk))

            for _ in range(_num_in_flight(staging)):
                post()
            while in_flight:
                work, host, chunk = in_flight.popleft()
                self._wait(work, self.timeout_s)
                if staging is not None and chunk is not footer:
                    # start the copy to the GPU first, so that it overlaps with the checks of the values
                    staging.land(host, chunk)
                if chunk is not footer:
                    checksum.update(codec.memory(host))
                    problem = problem or problem_of(host, finite)
                post()
        return problem if bytes(codec.memory(footer)) == checksum.footer() else ("bad-checksum", "payload")

    def _drain(self, header: Header, body: Body | None) -> None:
        """Read and discard a refused payload, or close the connection if the payload is over the limit."""
        if body is None or header.payload_bytes > self.drain_bytes:
            self.close()
            return
        if self._scratch is None:
            self._scratch = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        for length in piece_bytes(body.buffers):
            self._wait(self._start("recv", self._scratch[:length], _REST), self.timeout_s)
        self._wait(self._start("recv", self._scratch[:FOOTER_BYTES], _REST), self.timeout_s)


def _num_in_flight(staging: Staging | None) -> int:
    return NUM_POSTED if staging is None else NUM_STAGED - NUM_AHEAD


def cloned(store: Store) -> Store:
    """Return a second handle of the same store, since a handle that waits (in C++) blocks all its other users."""
    with suppress(AttributeError, RuntimeError, NotImplementedError):
        return store.clone()
    return store


def _span(seconds: float) -> timedelta:
    # Gloo counts milliseconds, and 0 would mean no timeout
    return timedelta(milliseconds=min(max(1, round(seconds * 1000)), 10**12))


def _device(hostname: str | None) -> object:
    if hostname is not None:
        return dist.ProcessGroupGloo.create_device(hostname=hostname)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()


def _translate(error: RuntimeError, waited: str) -> PeerLost | PeerTimeout:
    detail = str(error).splitlines()[0].partition("] ")[2].partition(". ")[0][:200]
    lower = str(error).lower()
    if "timed out" in lower or "timeout" in lower:
        return PeerTimeout(waited)
    for word in ("closed", "reset"):
        if f"{word} by peer" in lower:
            return PeerLost(f"connection-{word}", detail)
    return PeerLost("connection-broken", detail)
