"""A pair whose tensors go from GPU to GPU over NCCL, for who asks for it; and the choice between pairs.

Control frames and short messages go over Gloo, which also notices a dead peer; NCCL alone would wait for it for ever.
Whether NCCL joins the two ends is tried before the first payload: what does not work is found out while Gloo still does.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from raafl.runtime.transport import codec
from raafl.runtime.transport.codec import FOOTER_BYTES, Body, Header
from raafl.runtime.transport.gloo import _REST, GlooPair, cloned, dist
from raafl.runtime.transport.pair import Pair, PeerLost, PeerTimeout
from raafl.runtime.transport.payload import CHUNK_BYTES, chunks, piece_bytes, problem_of
from raafl.submodel.flat import FlatTensors

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_POLL_S = 0.0005

WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # an error, or a transfer past its time, is its session's: here it is waited for
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # a watchdog that stands still does not end the process either
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Set where the user has not: by its defaults torch's watchdog ends the whole process, rank 0 with all of its sessions."""


def identity(device: torch.device) -> str:
    """Identify this device among all: a GPU's machine and bus id, else the device's type.

    By these NCCL tells GPUs apart: parts of one (MIG), which have UUIDs of their own, and processes that share one (MPS) have
    the same, and it refuses to join them.
    """
    if device.type != "cuda":
        return device.type
    gpu: Any = torch.cuda.get_device_properties(device)
    boot = Path("/proc/sys/kernel/random/boot_id")  # alike in all containers of a machine
    machine = boot.read_text().strip() if boot.is_file() else socket.gethostname()
    return f"cuda:{machine}/{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}"


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
    *, device: torch.device | str = "cpu", nccl: bool = False,
) -> Pair:  # fmt: skip
    """Meet the peer as `GlooPair.connect` does; with ``nccl`` over NCCL where that joins the two, and says why where not.

    Both ends must call this function, and want NCCL or not; ``device`` is where this end's tensors lie.
    """
    pair = GlooPair.connect(store, prefix, server, timeout_s, hostname)
    if not nccl:
        return pair
    device, group = torch.device(device), None
    try:
        mine = identity(device) if dist.is_nccl_available() else "a torch without NCCL"
        theirs = _told(pair, mine, timeout_s)
        problem = nccl_problem(*((mine, theirs) if server else (theirs, mine)))
        if problem is None:
            own = dist.PrefixStore(f"{prefix}/nccl", cloned(store))
            # half of the time that the peer will wait for the word below
            group, mine = opened(partial(_joined, own, 0 if server else 1, device, timeout_s / 2), timeout_s / 2)
            problem = _told(pair, mine, timeout_s) or mine  # both ends take it, or neither
    except BaseException:
        if group is not None:
            group.abort()
        pair.close()
        raise
    if not problem:
        return NcclPair(pair, group, device)
    if group is not None:
        group.abort()
    warnings.warn(f"NCCL is not used, tensors are staged: {problem}", stacklevel=1)
    return pair


def _told(pair: GlooPair, mine: str, timeout_s: float) -> str:
    """Tell the peer something and return what it tells."""
    pair.send(codec.Message(codec.Kind.HELLO, meta={"nccl": mine}))
    return str(pair.recv(lambda kind, assignment, meta: None, timeout_s).meta.get("nccl"))


def opened(make: Callable[[], Any], timeout_s: float) -> tuple[Any, str]:
    """Make a group of NCCL's; return it and "", or None and what went wrong, at the latest after ``timeout_s``.

    NCCL may wait in a call that nothing interrupts, such as where the other end has died while both were joined. So it has
    a thread of its own, which is left behind where it hangs; what that comes to later is thrown away.
    """
    found: Future[Any] = Future()

    def run() -> None:
        try:
            group = make()
        except BaseException as error:
            with suppress(InvalidStateError):
                found.set_exception(error)
            return
        try:
            found.set_result(group)
        except InvalidStateError:  # given up meanwhile
            group.abort()

    threading.Thread(target=run, name="nccl", daemon=True).start()
    try:
        return found.result(timeout_s), ""
    except TimeoutError:
        return (None, f"nothing came of it within {timeout_s:g} s") if found.cancel() else (found.result(), "")
    except Exception as error:  # of whatever kind: staging is there
        return None, str(error).partition("\n")[0]


def new_group(store: Store, rank: int, size: int, timeout_s: float) -> Any:
    """Make a ProcessGroupNCCL whose watchdog leaves the process alone (`WATCHDOG`)."""
    for name, value in WATCHDOG.items():
        os.environ.setdefault(name, value)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(store, rank, size, options)


def checked_group(store: Store, rank: int, size: int, timeout_s: float, check: Callable[[Any], None]) -> Any:
    """Make a group, which ``check`` then uses for the first time, and so joins; one for which it raises is aborted."""
    group = new_group(store, rank, size, timeout_s)
    try:
        check(group)
    except BaseException:
        group.abort()
        raise
    return group


def _joined(store: Store, rank: int, device: torch.device, timeout_s: float) -> Any:
    """Make a group of two and send a word each way; raises `RuntimeError` or `PeerTimeout` where that does not come."""
    words = torch.tensor([rank, -1], device=device)

    def check(group: Any) -> None:
        for sender in (0, 1):
            work = group.send([words[:1]], 1 - rank, 0) if sender == rank else group.recv([words[1:]], 1 - rank, 0)
            work.wait()
        _synchronize(device, timeout_s)
        if int(words[1]) != 1 - rank:
            raise RuntimeError("NCCL does not bring what was sent")

    return checked_group(store, rank, 2, timeout_s, check)


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

    def __init__(self, control: GlooPair, group: Any, device: torch.device) -> None:
        """Take over ``control``, which must not be used any more, and a two-rank ProcessGroupNCCL on ``device``."""
        self.__dict__.update(control.__dict__)
        self._device, self._nccl = device, group

    def close(self) -> None:
        """End the session; see `Pair.close`."""
        # NCCL first: a kernel that waits for the peer on the GPU ends only by abort, and Gloo's end would not wake it.
        nccl, self._nccl = getattr(self, "_nccl", None), None
        if nccl is not None:
            nccl.abort()
        super().close()

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Close the pair when anything goes wrong inside; an error of NCCL's is a lost peer."""
        with super()._ending():
            try:
                yield
            except RuntimeError as error:
                raise PeerLost("connection-broken", str(error).partition("\n")[0]) from None

    def _send_payload(self, tensors: FlatTensors, timeout_s: float) -> None:
        total, held = 0, []
        for index, chunk in enumerate(chunks(tensors)):
            held.append(chunk.to(self._device))
            self._nccl.send([codec.byte_view(held[-1])], self._peer, 0).wait()
            total += (index + 1) * _sum(held[-1])
        footer = torch.frombuffer(bytearray(struct.pack("<Q", total % 2**64)), dtype=torch.uint8)
        self._wait(self._start("send", footer, _REST), timeout_s)
        _synchronize(self._device, timeout_s)

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
        _synchronize(self._device, self.timeout_s)
        return int(struct.unpack("<Q", codec.memory(footer))[0])


def _synchronize(device: torch.device, timeout_s: float) -> None:
    event: Any = torch.cuda.Event
    done, deadline = event(), time.monotonic() + timeout_s
    done.record(torch.cuda.current_stream(device))
    while not done.query():
        if time.monotonic() > deadline:
            raise PeerTimeout(f"NCCL moved nothing more within {timeout_s:g} s")
        time.sleep(_POLL_S)
