"""A pair whose tensors go from GPU to GPU over NCCL, where each end has a GPU of its own; and the choice between pairs.

Control frames and short messages go over Gloo, which also notices a dead peer; NCCL alone would wait for it for ever.
"""

from __future__ import annotations

import struct
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from raafl.runtime.transport import codec
from raafl.runtime.transport.codec import FOOTER_BYTES, Body, Header
from raafl.runtime.transport.gloo import _REST, GlooPair, dist
from raafl.runtime.transport.pair import Pair, PeerTimeout
from raafl.runtime.transport.payload import CHUNK_BYTES, chunks, piece_bytes, problem_of
from raafl.submodel.flat import FlatTensors

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_POLL_S = 0.0005


def identity(device: torch.device) -> str:
    """Identify this device among all: a GPU's UUID, else the device's type."""
    if device.type != "cuda":
        return device.type
    properties: Any = torch.cuda.get_device_properties(device)
    return f"cuda:{properties.uuid}"


def nccl_problem(server: str, client: str) -> str | None:
    """Explain why two devices, as `identity` names them, cannot be joined by NCCL, or None if they can."""
    for side, name in (("server", server), ("client", client)):
        if not name.startswith("cuda:"):
            return f"the {side}'s tensors are on {name}"
    if server == client:
        return "both ends share one GPU"
    return None if dist.is_nccl_available() else "this torch is built without NCCL"


def connect(
    store: Store, prefix: str, server: bool, timeout_s: float, hostname: str | None = None,
    *, device: torch.device | str = "cpu",
) -> Pair:  # fmt: skip
    """Meet the peer as `GlooPair.connect` does, over NCCL where both ends have a GPU of their own, else over Gloo.

    Both ends must call this function; ``device`` is where this end's tensors lie.
    """
    pair = GlooPair.connect(store, prefix, server, timeout_s, hostname)
    device = torch.device(device)
    mine = identity(device) if dist.is_nccl_available() else "a torch without NCCL"
    try:
        pair.send(codec.Message(codec.Kind.HELLO, meta={"device": mine}))
        theirs = str(pair.recv(lambda kind, assignment, meta: None, timeout_s).meta.get("device"))
        if nccl_problem(*((mine, theirs) if server else (theirs, mine))) is not None:
            return pair
        return NcclPair(pair, store, prefix, device)
    except BaseException:
        pair.close()
        raise


def _sum(piece: Tensor) -> int:
    """Return the wrap-around sum of 8-byte words, and of the bytes after the last: a GPU does it at memory speed."""
    data = codec.byte_view(piece)
    whole = data.numel() // 8 * 8
    return int(data[:whole].view(torch.int64).sum()) + int(data[whole:].sum())


class NcclPair(GlooPair):
    """Messages over Gloo, long payloads over NCCL, by way of the GPU if the tensors lie elsewhere.

    The checksum is a sum of words, weighted by piece: it finds lost and altered words, not a swap inside a piece. A
    sender whose peer dies inside a payload may learn of it only at its deadline.
    """

    def __init__(self, control: GlooPair, store: Store, prefix: str, device: torch.device) -> None:
        """Take over ``control``, which must not be used any more, and add NCCL on ``device``.

        Raises:
            RuntimeError: no NCCL, or ``device`` is no GPU of this process.
        """
        if not dist.is_nccl_available() or device.type != "cuda" or torch.cuda.device_count() == 0:
            raise RuntimeError(f"NcclPair on {device}: needs NCCL and a GPU; use GlooPair")
        self.__dict__.update(control.__dict__)
        self._device = device
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self.timeout_s)
        rank = 1 - self._peer
        self._nccl: Any = dist.ProcessGroupNCCL(dist.PrefixStore(f"{prefix}/nccl", store), rank, 2, options)

    def close(self) -> None:
        """End the session; see `Pair.close`."""
        # NCCL first: a kernel that waits for the peer on the GPU ends only by abort, and Gloo's end would not wake it.
        nccl, self._nccl = getattr(self, "_nccl", None), None
        if nccl is not None:
            nccl.abort()
        super().close()

    def _send_payload(self, tensors: FlatTensors, timeout_s: float) -> None:
        total, held = 0, []
        for index, chunk in enumerate(chunks(tensors)):
            held.append(chunk.to(self._device))
            self._nccl.send([codec.byte_view(held[-1])], self._peer, 0).wait()
            total += (index + 1) * _sum(held[-1])
        footer = torch.frombuffer(bytearray(struct.pack("<Q", total % 2**64)), dtype=torch.uint8)
        self._wait(self._start("send", footer, _REST), timeout_s)
        self._synchronize(timeout_s)

    def _recv_payload(self, target: FlatTensors, finite: bool) -> tuple[str, str] | None:
        pieces = [(chunk, self._on_device(chunk)) for chunk in chunks(target)]
        for _, there in pieces:
            self._nccl.recv([codec.byte_view(there)], self._peer, 0).wait()
        expected = (
            self._footer()
        )  # all pieces are there only now: NCCL's `wait` puts the wait into the stream, not here
        total, problem = 0, None
        for index, (chunk, there) in enumerate(pieces):
            total += (index + 1) * _sum(there)
            problem = problem or problem_of(there, finite)
            if there is not chunk:
                chunk.copy_(there)
        return problem if total % 2**64 == expected else ("bad-checksum", "payload")

    def _drain(self, header: Header, body: Body | None) -> None:
        if body is None or header.payload_bytes > self.drain_bytes:
            self.close()
            return
        scratch = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=self._device)
        for length in piece_bytes(body.buffers):
            self._nccl.recv([scratch[:length]], self._peer, 0).wait()
        self._footer()

    def _on_device(self, chunk: Tensor) -> Tensor:
        return chunk if chunk.device == self._device else torch.empty_like(chunk, device=self._device)

    def _footer(self) -> int:
        """Return the sender's sum once everything posted has come; Gloo tells at once of a peer that has died."""
        footer = torch.empty(FOOTER_BYTES, dtype=torch.uint8)
        self._wait(self._start("recv", footer, _REST), self.timeout_s)
        self._synchronize(self.timeout_s)
        return int(struct.unpack("<Q", codec.memory(footer))[0])

    def _synchronize(self, timeout_s: float) -> None:
        event: Any = torch.cuda.Event
        done, deadline = event(), time.monotonic() + timeout_s
        done.record(torch.cuda.current_stream(self._device))
        while not done.query():
            if time.monotonic() > deadline:
                raise PeerTimeout(f"NCCL moved nothing more within {timeout_s:g} s")
            time.sleep(_POLL_S)
