"""Transfer tensors from GPU to GPU over NCCL if asked to, and decide whether two devices can use it.

Control frames and short messages use Gloo, which also detects a dead peer; NCCL alone would wait for it forever. The two ends
test NCCL before the first payload, so that a failure is found while Gloo still works.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from raafl.submodel.flat import FlatTensors, sum_of_bits
from raafl.transport import codec
from raafl.transport.codec import FOOTER_BYTES, Body, Header
from raafl.transport.connection import Connection, PeerLost, PeerTimeout
from raafl.transport.frames import problem_of
from raafl.transport.gloo import _REST, GlooConnection, cloned, dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

MIN_BYTES_PER_S = 1e8
"""Assumed speed of the slowest NCCL link, from which the timeout of a payload is computed."""

_POLL_S = 0.0005
_log = logging.getLogger(__name__)

WATCHDOG = {
    # torch must not end the process: the session waits for each transfer, and handles errors and timeouts
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # off, since a watchdog thread that hangs would end the process
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Settings of torch's watchdog, unless the user has set them: by default it would end the whole server process."""


def identity(device: torch.device) -> str:
    """Return a text that identifies a device: for a GPU its machine and bus id, for any other device its type.

    NCCL cannot connect two processes whose devices have the same id: parts of one GPU (MIG), or one GPU shared by both
    (MPS).
    """
    if device.type != "cuda":
        return device.type
    gpu: Any = torch.cuda.get_device_properties(device)
    boot = Path("/proc/sys/kernel/random/boot_id")  # an id of the machine's last boot, equal in all its containers
    machine = boot.read_text().strip() if boot.is_file() else socket.gethostname()
    return f"cuda:{machine}/{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}"


def nccl_problem(server: str, client: str) -> str | None:
    """Explain why NCCL cannot connect two devices, given as the texts that `identity` returns; return None if it can."""
    for side, name in (("server", server), ("client", client)):
        if not name.startswith("cuda:"):
            return f"the {side}'s tensors are on {name}"
    if server == client:
        return "both ends share one GPU"
    return None if dist.is_nccl_available() else "this torch is built without NCCL"


def connect(
    store: Store,
    prefix: str,
    server: bool,
    timeout_s: float,
    hostname: str | None = None,
    *,
    device: torch.device | str = "cpu",
    nccl: bool = False,
) -> Connection:
    """Connect to the peer: over NCCL if both sides ask for it and NCCL supports their devices, else over Gloo.

    Both sides must call this with the same ``nccl``.

    `hostname`: network address to listen on; None = the default.
    """
    pair = GlooConnection.connect(store, prefix, server, timeout_s, hostname)
    if not nccl:
        return pair
    device, group = torch.device(device), None
    try:
        mine = identity(device) if dist.is_nccl_available() else "a torch without NCCL"
        theirs = _told(pair, mine, timeout_s)
        problem = nccl_problem(*((mine, theirs) if server else (theirs, mine)))
        if problem is None:
            own = dist.PrefixStore(f"{prefix}/nccl", cloned(store))
            # wait half as long as the peer waits in `_told`, so that the peer gets this end's result
            group, mine = opened(partial(_joined, own, 0 if server else 1, device, timeout_s / 2), timeout_s / 2)
            problem = _told(pair, mine, timeout_s) or mine  # both ends use NCCL, or neither does
    except BaseException:
        if group is not None:
            group.abort()
        pair.close()
        raise
    if not problem:
        return NcclConnection(pair, group, device)
    if group is not None:
        group.abort()
    _log.warning(f"NCCL is not used, tensors are staged: {problem}")
    return pair


def _told(pair: GlooConnection, mine: str, timeout_s: float) -> str:
    """Exchange error messages ("" = no error) with the peer: send this end's, return the peer's."""
    pair.send(codec.Message(codec.Kind.HELLO, meta={"nccl": mine}))
    return str(pair.recv(lambda kind, assignment, meta: None, timeout_s).meta.get("nccl"))


def opened(make: Callable[[], Any], timeout_s: float) -> tuple[Any, str]:
    """Create an NCCL group within ``timeout_s``; return (group, "") on success, else (None, error message).

    NCCL may block in a call that cannot be interrupted, for example if the peer dies while connecting. So the call runs
    on its own thread, which is abandoned if it blocks.
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
        except InvalidStateError:  # the caller has stopped waiting
            group.abort()

    threading.Thread(target=run, name="nccl", daemon=True).start()
    try:
        return found.result(timeout_s), ""
    except TimeoutError:
        return (None, f"nothing came of it within {timeout_s:g} s") if found.cancel() else (found.result(), "")
    except Exception as error:  # after any error host memory is used instead of NCCL
        return None, str(error).partition("\n")[0]


def new_group(store: Store, rank: int, size: int, timeout_s: float) -> Any:
    """Create a ProcessGroupNCCL whose watchdog does not end the process after an error."""
    for name, value in WATCHDOG.items():
        os.environ.setdefault(name, value)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(store, rank, size, options)


def checked_group(store: Store, rank: int, size: int, timeout_s: float, check: Callable[[Any], None]) -> Any:
    """Create an NCCL group and check it; abort the group if the check fails.

    NCCL connects the ranks only at the first operation, which the check performs.
    """
    group = new_group(store, rank, size, timeout_s)
    try:
        check(group)
    except BaseException:
        group.abort()
        raise
    return group


def _joined(store: Store, rank: int, device: torch.device, timeout_s: float) -> Any:
    """Create an NCCL group of two ranks, and test it by one number each way; raises `RuntimeError` or `PeerTimeout`."""
    cuda: Any = torch.cuda

    def check(group: Any) -> None:
        # use a separate stream, as for payloads: other GPU work must not wait for the peer
        with cuda.stream(cuda.Stream(device)):
            words = torch.tensor([rank, -1], device=device)
            for sender in (0, 1):
                work = group.send([words[:1]], 1 - rank, 0) if sender == rank else group.recv([words[1:]], 1 - rank, 0)
                work.wait()
            _synchronize(device, timeout_s)
            if int(words[1]) != 1 - rank:
                raise RuntimeError("NCCL delivered other values than were sent")

    return checked_group(store, rank, 2, timeout_s, check)


def _buffers(tensors: FlatTensors) -> list[Tensor]:
    """Return the payload's buffers, one for each dtype, which NCCL sends as one message each."""
    return [tensors.buffers[dtype].detach() for dtype, _ in codec.declared(tensors)]


def _sum(buffers: list[Tensor]) -> int:
    """Return a checksum of GPU buffers, which weights each buffer's sum of words by its position."""
    total = sum((place * sum_of_bits(buffer) for place, buffer in enumerate(buffers, 1)), torch.tensor(0))
    return int(total) % 2**64


class NcclConnection(GlooConnection):
    """Connection that sends messages over Gloo and long payloads over NCCL.

    The checksum of a payload is the weighted sum of its machine words, with one weight for each dtype. It detects lost
    and altered words, but not two words of one dtype that were swapped. If the peer dies while it receives a payload,
    the sender may notice this only when the time limit for sending has passed.

    NCCL's `wait` blocks the current CUDA stream until the peer has done its part. So each connection has its own
    stream: on the default stream, which runs all merges, one slow client would block every connection.
    """

    def __init__(self, control: GlooConnection, group: Any, device: torch.device) -> None:
        """Create a connection that sends tensors by the NCCL ``group``, and all else over ``control``, which it replaces."""
        self.__dict__.update(control.__dict__)
        self._device, self._nccl = device, group
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(device)

    def close(self) -> None:
        """End the connection; see `Connection.close`."""
        # abort NCCL first, since only that ends a GPU kernel that waits for the peer
        nccl, self._nccl = getattr(self, "_nccl", None), None
        if nccl is not None:
            nccl.abort()
        super().close()

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Close the connection if the ``with`` block raises, and report an error of NCCL as `PeerLost`."""
        with super()._ending():
            try:
                yield
            except RuntimeError as error:
                raise PeerLost("connection-broken", str(error).partition("\n")[0]) from None

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Run the ``with`` block on the connection's CUDA stream, after all work that is queued on the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def _send_payload(self, tensors: FlatTensors, timeout_s: float) -> None:
        with self._apart():
            held = [buffer.to(self._device) for buffer in _buffers(tensors)]
            # compute this before the sends: queued after them, it would wait for the peer without a deadline
            footer = torch.frombuffer(bytearray(struct.pack("<Q", _sum(held))), dtype=torch.uint8)
            for buffer in held:
                self._nccl.send([codec.byte_view(buffer)], self._peer, 0).wait()
            timeout_s += tensors.num_bytes / MIN_BYTES_PER_S
            self._wait(self._start("send", footer, _REST), timeout_s)
            _synchronize(self._device, timeout_s)

    def _recv_payload(self, target: FlatTensors, finite: bool) -> tuple[str, str] | None:
        buffers = _buffers(target)
        with self._apart():
            there = [b if b.device == self._device else torch.empty_like(b, device=self._device) for b in buffers]
            expected = self._received(there)
            is_whole = _sum(there) == expected
            problem = next(filter(None, (problem_of(buffer, finite) for buffer in there)), None)
            for buffer, received in zip(buffers, there, strict=True):
                if received is not buffer:
                    buffer.copy_(received)
        return problem if is_whole else ("bad-checksum", "payload")

    def _drain(self, header: Header, body: Body | None) -> None:
        if body is None or header.payload_bytes > self.drain_bytes:
            self.close()
            return
        with self._apart():
            self._received([torch.empty(numel, dtype=dtype, device=self._device) for dtype, numel in body.buffers])

    def _received(self, buffers: list[Tensor]) -> int:
        """Receive the buffers over NCCL; return the checksum, which comes over Gloo, since Gloo notices a dead peer."""
        for buffer in buffers:
            self._nccl.recv([codec.byte_view(buffer)], self._peer, 0).wait()
        footer = torch.empty(FOOTER_BYTES, dtype=torch.uint8)
        timeout_s = self.timeout_s + sum(buffer.nbytes for buffer in buffers) / MIN_BYTES_PER_S
        self._wait(self._start("recv", footer, _REST), timeout_s)
        _synchronize(self._device, timeout_s)
        return int(struct.unpack("<Q", codec.memory(footer))[0])


def _synchronize(device: torch.device, timeout_s: float) -> None:
    """Wait until the current CUDA stream is done; raises `PeerTimeout` after ``timeout_s``."""
    event: Any = torch.cuda.Event
    done, deadline = event(), time.monotonic() + timeout_s
    done.record(torch.cuda.current_stream(device))
    while not done.query():
        if time.monotonic() > deadline:
            raise PeerTimeout(f"NCCL transferred nothing for {timeout_s:g} s")
        time.sleep(_POLL_S)
