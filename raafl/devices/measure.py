"""Measure the speed and memory of this machine, in about a second."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raafl.devices.profiles import Profile

if TYPE_CHECKING:
    import torch


def measure_speeds(device: str | torch.device = "cpu", duration_s: float = 1.0) -> tuple[float, float, float]:
    """Measure this machine's FLOP/s, bytes/s of memory traffic and seconds per kernel launch.

    The time of a training step can be predicted from these three numbers. A matrix product and a layer of elementwise
    operations are timed, forward and backward, with large and tiny tensors. Bytes are counted as in
    `Cost.moved_bytes_per_sample`. The fastest of several rounds counts.
    """
    from raafl.devices.probes import Probes

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
    from raafl.devices.link import measure_link

    link = {} if address is None else asdict(measure_link(address, duration_s))
    flops_per_s, bytes_per_s, launch_s = measure_speeds(device, duration_s)
    room = memory_room(device).for_task_bytes
    return Profile(
        name=name, flops_per_s=flops_per_s, bytes_per_s=bytes_per_s, launch_s=launch_s, memory_bytes=room, **link
    )


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """Memory that a process can still allocate, and what limits it."""

    num_bytes: float  # number of bytes that can be allocated before the limit is reached
    limit: str  # name of the limit, in words
    # number of bytes reserved for libraries; a tenth of ``num_bytes`` is reserved, too, since memory allocators
    # waste some
    reserve_bytes: int = 64 * 2**20

    @property
    def for_task_bytes(self) -> float:
        """Number of bytes available for the tensors of a task: without the reserves."""
        return max((1 - RESERVE_SHARE) * self.num_bytes - self.reserve_bytes, 1.0)


RESERVE_SHARE = 0.1
GPU_RESERVE_BYTES = 512 * 2**20
"""Of a GPU, for each process: its context, kernels that are loaded when first used, workspaces of cuBLAS and cuDNN. Assumed."""


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


def _own_limits() -> Iterator[MemoryRoom]:
    """Yield the bytes left by the process's resource limits."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    for name, field in (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")):
        limit = resource.getrlimit(getattr(resource, name))[0]
        if limit != resource.RLIM_INFINITY and field in fields:
            yield MemoryRoom(max(float(limit) - float(fields[field].split()[0]) * 1024, 1.0), name)


def _system_available_bytes(meminfo: Path = Path("/proc/meminfo")) -> float:
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return float(fields["MemAvailable"].split()[0]) * 1024  # the file says kB and means KiB


_V2 = ("memory.max", "memory.current", "active_file", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file")


def _cgroup_left_bytes(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float:
    """Return the bytes left by the tightest of this process's control groups; infinite without any limit."""
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
    """Yield a control group's folder and those of its ancestors; a container may show the root alone."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:length])


def _left_in(folder: Path, limit_file: str, usage_file: str, *cache_fields: str) -> float:
    try:
        limit = (folder / limit_file).read_text().strip()
        limit_bytes = math.inf if limit == "max" else float(limit)
        used_bytes = float((folder / usage_file).read_text())
        stat = dict(line.split(None, 1) for line in (folder / "memory.stat").read_text().splitlines() if line.strip())
        cache_bytes = sum(float(stat.get(field, 0)) for field in cache_fields)  # used, but given up when a process asks
    except (OSError, ValueError):
        return math.inf
    if limit_bytes >= _NO_LIMIT:
        return math.inf
    return max(limit_bytes - used_bytes + cache_bytes, 1.0)


_NO_LIMIT = 2.0**62  # version 1 says "none" as the largest number of whole pages
