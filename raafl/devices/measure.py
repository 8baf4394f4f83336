"""Finding out what this machine can do, in about a second."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from raafl.devices.profiles import Profile

if TYPE_CHECKING:
    import torch

_WIDTH, _BATCH = 256, 64
# Each of 2 layers computes its output and the gradients of input and weight, at 2 FLOPs per multiply-add.
_STEP_FLOPS = 2 * 3 * 2 * _BATCH * _WIDTH * _WIDTH


def measure(name: str = "measured", device: str | torch.device = "cpu", duration_s: float = 1.0) -> Profile:
    """Measure this machine; links are left free, for no peer is asked.

    Args:
        name: the profile's name.
        device: where the client will train ("cpu", "cuda", ...).
        duration_s: about how long the speed measurement may take.
    """
    return Profile(
        name=name,
        flops_per_s=measure_flops_per_s(device, duration_s),
        memory_bytes=available_memory_bytes(device),
    )


def measure_flops_per_s(device: str | torch.device = "cpu", duration_s: float = 1.0) -> float:
    """Sustained training FLOP/s of a small two-layer network (forward and backward, float32), framework cost included.

    The layers are small (256 wide, batch 64) as a constrained client's are: a large GPU shows far below its peak
    here, and that is what such a client gets. The number of threads is whatever torch is set to. The fastest of
    several rounds counts, since other processes can only slow a round down.

    Raises:
        ValueError: `duration_s` is not above 0.
    """
    if not duration_s > 0:
        raise ValueError(f"duration_s is {duration_s}; give a number of seconds above 0")
    import torch

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_BATCH, _WIDTH, generator=generator).to(device).requires_grad_()
    weights = [torch.randn(_WIDTH, _WIDTH, generator=generator).to(device).div_(16).requires_grad_() for _ in range(2)]

    def step() -> None:
        loss = (x @ weights[0]).relu().mm(weights[1]).sum()
        torch.autograd.grad(loss, [x, *weights])

    def seconds(num_steps: int) -> float:
        start_s = time.perf_counter()
        for _ in range(num_steps):
            step()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start_s

    seconds(3)  # the first steps set up kernels and thread pools
    num_steps = max(1, int(duration_s / 10 / max(seconds(3) / 3, 1e-9)))
    stop_s = time.perf_counter() + duration_s * 0.9
    best_s = math.inf
    while time.perf_counter() < stop_s or best_s == math.inf:
        best_s = min(best_s, seconds(num_steps) / num_steps)
    return _STEP_FLOPS / best_s


def available_memory_bytes(device: str | torch.device = "cpu") -> float:
    """Memory a new process could use now, in bytes; infinite when this system does not say.

    For the CPU: what the kernel calls available, or what psutil does where there is no /proc, and no more than a
    container leaves (cgroup v2). For CUDA: what is free on the device.
    """
    if str(device).startswith("cuda"):
        import torch

        return float(torch.cuda.mem_get_info(device)[0])
    return min(_system_available_bytes(), _cgroup_left_bytes())


def _system_available_bytes(meminfo: Path = Path("/proc/meminfo")) -> float:
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024  # the file says kB and means KiB
    try:
        import psutil
    except ImportError:
        return math.inf
    return float(psutil.virtual_memory().available)


def _cgroup_left_bytes(folder: Path = Path("/sys/fs/cgroup")) -> float:
    try:
        limit = (folder / "memory.max").read_text().strip()
        used_bytes = float((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return math.inf
    if limit == "max":
        return math.inf
    cache_bytes = float(stat.get("inactive_file", 0))  # counted as used, but given up when a process asks
    return max(float(limit) - used_bytes + cache_bytes, 1.0)
