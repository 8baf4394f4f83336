"""Measure the speed and memory of this machine, in about a second."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from raafl.devices.profiles import Profile
from raafl.errors import BadInput, parse_address
from raafl.submodel.cost.ledger import Ledger, launches_of


def measure_speeds(device: str | torch.device = "cpu", duration_s: float = 1.0) -> tuple[float, float, float]:
    """Measure this machine's FLOP/s, bytes/s of memory traffic and seconds per kernel launch.

    The time of a training step can be predicted from these three numbers. A matrix product and a layer of elementwise
    operations are timed, forward and backward, with large and tiny tensors. Bytes are counted as in
    `Cost.moved_bytes_per_sample`. The fastest of several rounds counts.
    """
    probes, stop_s = Probes(device), time.perf_counter() + duration_s
    while time.perf_counter() < stop_s or probes.best_s[-1] == math.inf:
        probes.take()
    return probes.speeds()


def measure_machine(
    name: str = "measured", device: str | torch.device = "cpu", duration_s: float = 2.0, address: str | None = None
) -> Profile:
    """Measure a device profile of this machine: speed, memory traffic, kernel launches, memory, and the link to a server.

    `address`: ``HOST:PORT`` at which `raafl plan --answer` runs; None = do not measure the link; the profile then has
    transfers that take no time.

    Raises:
        BadInput: no raafl answers at the address.
    """
    link = {} if address is None else asdict(measure_link(address, duration_s))
    flops_per_s, bytes_per_s, launch_s = measure_speeds(device, duration_s)
    room = memory_room(device).for_task_bytes
    if torch.device(device).type == "cuda":
        link |= measure_host(device, duration_s)
    return Profile(
        name=name, flops_per_s=flops_per_s, bytes_per_s=bytes_per_s, launch_s=launch_s, memory_bytes=room, **link
    )


_CHAIN = 64


def measure_host(
    device: str | torch.device, duration_s: float = 1.0, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Measure the seconds in which a GPU's host launches an operation and a product, and the bandwidth, as fields of `Profile`.

    Two chains of layers on a few values, forward and backward, give the host's times, and a layer of elementwise
    operations on many values the bandwidth. The fastest of several rounds counts.
    """
    probes = Probes(device, clock)
    few = torch.ones(8, 8, device=device, requires_grad=True)
    chains = [
        nn.Sequential(*(kind() for _ in range(_CHAIN))).to(device) for kind in (nn.GELU, partial(nn.Linear, 8, 8))
    ]
    work = [partial(_pass, chain, few) for chain in chains] + [probes.layer_work]
    counts = []
    for probe in work[:2]:
        with Ledger() as ledger:
            probe()
        counts.append(launches_of(ledger.launched, {}))
    best_s, stop_s = [math.inf] * 3, time.perf_counter() + duration_s
    while time.perf_counter() < stop_s or best_s[-1] == math.inf:
        for place, probe in enumerate(work):
            begin_s = clock()
            probe()
            launched_s = clock() - begin_s
            probes.wait()
            best_s[place] = min(best_s[place], launched_s if place < 2 else clock() - begin_s)
    op_s = best_s[0] / counts[0].operations
    product_s = max(best_s[1] - counts[1].operations * op_s, op_s * counts[1].products) / counts[1].products
    moved = sum(number * num_bytes for (_, _, num_bytes), number in probes.layer.launched.items())
    return {"host_op_s": op_s, "host_product_s": product_s, "bandwidth_bytes_per_s": moved / best_s[2]}


def _pass(chain: nn.Module, x: torch.Tensor) -> None:
    x.grad = None
    chain.zero_grad()
    chain(x).backward(x.detach())


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """Memory that a process can still allocate, and the limit that bounds it."""

    num_bytes: float  # bytes that can be allocated below the limit
    limit: str  # name of the limit, in words
    # bytes reserved for libraries, in addition to a tenth of ``num_bytes`` for what allocators waste
    reserve_bytes: int = 64 * 2**20

    @property
    def for_task_bytes(self) -> float:
        """Number of bytes available for the tensors of a task: without the reserves."""
        return max((1 - RESERVE_SHARE) * self.num_bytes - self.reserve_bytes, 1.0)


RESERVE_SHARE = 0.1
GPU_RESERVE_BYTES = 512 * 2**20
"""Assumed GPU memory of each process beside its tensors: CUDA context, loaded kernels, workspaces of cuBLAS and cuDNN."""


def memory_room(device: str | torch.device = "cpu", num_sharing: int = 1) -> MemoryRoom:
    """Measure how much more memory this process can allocate.

    On a CPU the limits are those of the process (``RLIMIT_AS``, ``RLIMIT_DATA``), of its control groups, and the memory
    that the kernel reports as available. On a GPU the limit is the free memory of the device. The result is infinite if
    nothing limits it.
    """
    if str(device).startswith("cuda"):
        import torch

        return MemoryRoom(torch.cuda.mem_get_info(device)[0] / num_sharing, f"free on {device}", GPU_RESERVE_BYTES)
    shared = [
        MemoryRoom(_system_available_bytes(), "available memory"),
        MemoryRoom(_cgroup_left_bytes(), "control group"),
    ]
    rooms = [*_own_limits(), *(MemoryRoom(room.num_bytes / num_sharing, room.limit) for room in shared)]
    return min(rooms, key=lambda room: room.num_bytes)


def free_on_machine() -> float:
    """Return the bytes of memory that new processes can allocate: the machine's free memory, or less if control groups limit it."""
    return min(_system_available_bytes(), _cgroup_left_bytes())


def _own_limits() -> Iterator[MemoryRoom]:
    """Yield for each resource limit of this process how many bytes it may still allocate."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    for name, field in (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")):
        limit = resource.getrlimit(getattr(resource, name))[0]
        if limit != resource.RLIM_INFINITY and field in fields:
            yield MemoryRoom(max(float(limit) - float(fields[field].split()[0]) * 1024, 1.0), name)


def _system_available_bytes(meminfo: Path = Path("/proc/meminfo")) -> float:
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return float(fields["MemAvailable"].split()[0]) * 1024  # the file's kB are KiB


_V2 = ("memory.max", "memory.current", "active_file", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file")


def _cgroup_left_bytes(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float:
    """Compute how many bytes this process may still allocate under the tightest limit of its control groups; infinite if none."""
    try:
        entries = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        entries = []
    paths = {controllers: path for _, controllers, path in entries}
    v1 = next((path for names, path in paths.items() if "memory" in names.split(",")), "/")
    left = [_left_in(folder, *_V2) for folder in _with_those_above(root, paths.get("", "/"))]
    left += [_left_in(folder, *_V1) for folder in _with_those_above(root / "memory", v1)]
    return min(left)


def _with_those_above(root: Path, path: str) -> Iterator[Path]:
    """Yield the folders of a control group and all its ancestors; in a container some of them may not exist."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:length])


def _left_in(folder: Path, limit_file: str, usage_file: str, *cache_fields: str) -> float:
    try:
        limit = (folder / limit_file).read_text().strip()
        limit_bytes = math.inf if limit == "max" else float(limit)
        used_bytes = float((folder / usage_file).read_text())
        stat = dict(line.split(None, 1) for line in (folder / "memory.stat").read_text().splitlines() if line.strip())
        # the page cache counts as used memory, but the kernel frees it on demand
        cache_bytes = sum(float(stat.get(field, 0)) for field in cache_fields)
    except (OSError, ValueError):
        return math.inf
    if limit_bytes >= _NO_LIMIT:
        return math.inf
    return max(limit_bytes - used_bytes + cache_bytes, 1.0)


_NO_LIMIT = 2.0**62  # cgroup v1 writes the largest number of whole pages for "no limit"


_TINY_DEPTH, _TINY_CALLS = 5, 20


class Probes:
    """Timer of three workloads, from whose times a machine's speeds are computed.

    The workloads are a matrix product (bound by FLOP/s); a layer of elementwise operations, forward and backward (bound
    by memory traffic); and many operations on a single row (bound by the time to launch a kernel).

    `best_s`: shortest time of each workload so far, in seconds.
    `product`: counts of the FLOPs, bytes and kernels of the matrix product.
    `layer`: the same counts for the layer.
    `tiny`: the same counts for the operations on a single row.
    """

    def __init__(
        self,
        device: str | torch.device = "cpu",
        clock: Callable[[], float] = time.perf_counter,
        num_samples: int | None = None,
        num_calls: int = 1,
    ) -> None:
        """Allocate the workloads to be timed.

        `num_samples`: number of rows of 512 values in the layer; None = 4096, on a GPU 32 times as many. On a GPU the
        product is larger, too, so that its time is not dominated by kernel launches.
        """
        self._device = torch.device(device)
        wide = 4 if self._device.type == "cuda" else 1
        a, b = (torch.randn(rows * wide, 512 * wide, device=device) for rows in (2048, 512))
        rows = num_samples or 4096 * (32 if wide > 1 else 1)
        self.product, self.layer, self.tiny = Ledger(), Ledger(), Ledger()
        self._work: list[Callable[[], object]] = [lambda: a @ b, self._layer(rows), self._tiny()]
        for ledger, work in zip((self.product, self.layer, self.tiny), self._work, strict=True):
            with ledger:
                work()
        self._clock, self._calls = clock, (num_calls, num_calls, max(num_calls, _TINY_CALLS))
        self.best_s = [math.inf] * 3

    def _layer(self, num_samples: int) -> Callable[[], object]:
        x, gradient = (torch.randn(num_samples, 512, device=self._device) for _ in range(2))
        x.requires_grad_()
        return lambda: torch.autograd.grad(F.layer_norm(F.gelu(x), (512,)) + x, x, gradient)

    def _tiny(self) -> Callable[[], object]:
        blocks = [(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(_TINY_DEPTH)]
        model = nn.Sequential(*itertools.chain(*blocks)).to(self._device)
        x = torch.randn(1, 64, device=self._device)

        def passes() -> None:
            model.zero_grad()
            model(x).square().mean().backward()

        return passes

    @property
    def layer_work(self) -> Callable[[], object]:
        """Layer of elementwise operations, forward and backward."""
        return self._work[1]

    def wait(self) -> None:
        """Wait until the device has done all."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def take(self) -> None:
        """Time each workload once, and keep the shortest time so far."""
        for place, (work, num_calls) in enumerate(zip(self._work, self._calls, strict=True)):
            begin_s = self._clock()
            for _ in range(num_calls):
                work()
            self.wait()
            self.best_s[place] = min(self.best_s[place], (self._clock() - begin_s) / num_calls)

    def speeds(self) -> tuple[float, float, float]:
        """Compute FLOP/s, bytes/s of memory traffic and seconds per kernel launch from the shortest time of each workload."""
        product_s, layer_s, tiny_s = self.best_s
        product, layer, tiny = (one.kernels.total() for one in (self.product, self.layer, self.tiny))
        many, few = self.layer.moved_bytes, self.tiny.moved_bytes
        # launch_s solves, for layer and tiny: seconds = launches * launch_s + bytes / bytes_per_s
        launch_s = max(tiny_s * many - layer_s * few, 0.0) / (tiny * many - layer * few)
        bytes_per_s = many / max(layer_s - layer * launch_s, layer_s / 10)
        other_s = self.product.moved_bytes / bytes_per_s + product * launch_s
        return self.product.flops / max(product_s - other_s, product_s / 10), bytes_per_s, launch_s


MAGIC = b"RAAFLNK1"
MOST_BYTES = 1 << 28
DEADLINE_S = 30.0

_QUESTION = struct.Struct("!8scQ")
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Link:
    """Measured network link of a client: bytes per second in each direction, and one-way latency in seconds."""

    down_bytes_per_s: float
    up_bytes_per_s: float
    latency_s: float


class Answerer:
    """Server for measuring links; it answers one peer after another."""

    def __init__(self, address: str, deadline_s: float = DEADLINE_S) -> None:
        """Listen at the address; port 0 means any free port. Raise `BadInput` if that fails."""
        host, port = parse_address(address)
        self._deadline_s = deadline_s
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise BadInput(
                f"address is '{address}', on which this machine cannot listen ({error.strerror or error}): give another "
                "HOST:PORT"
            ) from error
        self.port: int = self._listener.getsockname()[1]

    def serve(self, num_peers: int | None = None) -> None:
        """Answer the measuring requests of ``num_peers`` peers, one after another; None = until `close`.

        A connection is closed when the peer sends anything but such a request.
        """
        left = math.inf if num_peers is None else num_peers
        while left > 0:
            try:
                peer, _ = self._listener.accept()
            except OSError:  # `close` was called
                return
            with peer, contextlib.suppress(OSError):
                peer.settimeout(self._deadline_s)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while self._answer(peer):
                    pass
            left -= 1

    def _answer(self, peer: socket.socket) -> bool:
        question = _take(peer, _QUESTION.size)
        if len(question) < _QUESTION.size:
            return False
        magic, kind, size = _QUESTION.unpack(question)
        if magic != MAGIC or size > MOST_BYTES or kind not in b"pdu":
            return False
        if kind == b"d":
            _send(peer, size)
        else:
            if kind == b"u" and _drop(peer, size) < size:
                return False
            peer.sendall(kind)
        return True

    def close(self) -> None:
        """Stop listening; `serve` then returns."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the `accept` in which `serve` waits
        self._listener.close()


def measure_link(address: str, duration_s: float = 2.0) -> Link:
    """Measure the network link to a machine on which `raafl plan --answer` runs.

    Latency is half of the shortest of ten round trips. For each direction, transfers of growing size are timed, and the
    last one counts.

    Raises:
        BadInput: no raafl answers at the address.
    """
    host, port = parse_address(address)
    try:
        with socket.create_connection((host, port), timeout=DEADLINE_S) as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            round_s = min(_ask(peer, b"p", 0) for _ in range(10))
            return Link(_rate(peer, b"d", duration_s, round_s), _rate(peer, b"u", duration_s, round_s), round_s / 2)
    except OSError as error:
        raise BadInput(
            f"address is '{address}', where no `raafl plan --answer` answers ({error.strerror or error}): run "
            f"`raafl plan --answer {address}` there"
        ) from error


def _rate(peer: socket.socket, kind: bytes, duration_s: float, round_s: float) -> float:
    size = _CHUNK
    while True:
        took_s = _ask(peer, kind, size)
        if took_s >= duration_s / 4 or 2 * size > MOST_BYTES:
            return size / max(took_s - round_s, took_s / 10)  # without the time that the request itself takes
        size *= 2


def _ask(peer: socket.socket, kind: bytes, size: int) -> float:
    """Request a transfer of ``size`` bytes, in the direction ``kind``; return the seconds until it is complete."""
    begin_s = time.perf_counter()
    peer.sendall(_QUESTION.pack(MAGIC, kind, size))
    if kind == b"u":
        _send(peer, size)
    wanted = size if kind == b"d" else 1
    if _drop(peer, wanted) < wanted:
        raise ConnectionError("the peer answered with another protocol")
    return time.perf_counter() - begin_s


def _send(peer: socket.socket, size: int) -> None:
    chunk = os.urandom(_CHUNK)
    for start in range(0, size, _CHUNK):
        peer.sendall(chunk[: min(_CHUNK, size - start)])


def _take(peer: socket.socket, size: int) -> bytes:
    """Receive ``size`` bytes, or fewer if the peer closes the connection."""
    found = b""
    while len(found) < size and (piece := peer.recv(size - len(found))):
        found += piece
    return found


def _drop(peer: socket.socket, size: int) -> int:
    """Receive and discard ``size`` bytes; return the number received."""
    buffer, got = bytearray(_CHUNK), 0
    while got < size and (more := peer.recv_into(buffer, min(_CHUNK, size - got))):
        got += more
    return got
