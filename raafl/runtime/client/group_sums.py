"""Open the process groups in which several processes that train one client sum gradients and share values."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as _distributed

from raafl.transport.gloo import cloned
from raafl.transport.nccl import checked_group, opened

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

dist: Any = _distributed  # most of it has no type annotations

_LOOPBACK = "lo"
_log = logging.getLogger(__name__)


def open_mesh(store: Any, rank: int, size: int, timeout_s: float, device: torch.device) -> DeviceMesh:
    """Return the device mesh over which FSDP2 shards a model between the processes of one client.

    This initialises torch's default process group, which FSDP2 needs.
    """
    from torch.distributed.device_mesh import init_device_mesh

    backend, timeout = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout_s)
    with _local_interface():
        dist.init_process_group(
            backend, store=dist.PrefixStore("shards", store), rank=rank, world_size=size, timeout=timeout
        )
    return init_device_mesh(device.type, (size,))


@contextmanager
def _local_interface() -> Iterator[None]:
    """Let Gloo's default group use only the loopback interface if all processes run on this machine."""
    name = "GLOO_SOCKET_IFNAME"
    names = {interface for _, interface in socket.if_nameindex()}
    if name in os.environ or not _is_local() or _LOOPBACK not in names:
        yield
        return
    os.environ[name] = _LOOPBACK  # torch has no argument for this
    try:
        yield
    finally:
        del os.environ[name]


class GroupSums:
    """Sums and broadcasts between the processes of one client: over NCCL if each has its own GPU, else over Gloo and the CPU."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout_s: float, device: torch.device, devices: list[str]
    ) -> None:
        """Create the process groups together with the other processes."""
        self._span, self._device = timedelta(seconds=timeout_s), device
        options = dist.ProcessGroupGloo._Options()
        options._timeout, options._threads = self._span, 1
        options._devices = [_gloo_device()]
        self._gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)
        self._nccl: Any = None
        own = all(name.startswith("cuda:") for name in devices) and len(set(devices)) == size
        if own and dist.is_nccl_available():
            # half of the time for which the others wait for this process's result below
            self._nccl = self._agreed(*opened(partial(self._joined, store, rank, size, timeout_s / 2), timeout_s / 2))

    def _joined(self, store: Any, rank: int, size: int, timeout_s: float) -> object:
        """Create NCCL's group and compute a first sum, which establishes the connections."""

        def check(group: Any) -> None:
            one = torch.ones(1, device=self._device)
            group.allreduce([one], dist.AllreduceOptions()).wait()
            if one.item() != size:
                raise RuntimeError("NCCL returns a wrong sum")

        return checked_group(dist.PrefixStore("nccl", cloned(store)), rank, size, timeout_s, check)

    def _agreed(self, group: Any, problem: str) -> object:
        """Keep NCCL's group if every process has created it; otherwise use none."""
        missing = torch.tensor([int(group is None)])
        self._gloo.allreduce([missing], dist.AllreduceOptions()).wait(self._span)
        if not missing.item():
            return group
        if group is not None:
            group.abort()
        _log.warning(f"NCCL is not used, gradients are summed over Gloo: {problem or 'another process has none'}")
        return None

    def begin_sum(self, tensor: Tensor) -> Callable[[], None]:
        """Start to replace a tensor by its sum over all processes; return a function that waits until that is done."""
        if tensor.is_cuda and self._nccl is not None:
            on_gpu: Callable[[], None] = self._nccl.allreduce([tensor], dist.AllreduceOptions()).wait
            return on_gpu
        there = tensor.cpu()
        work = self._gloo.allreduce([there], dist.AllreduceOptions())

        def wait() -> None:
            work.wait(self._span)
            if there is not tensor:
                tensor.copy_(there)

        return wait

    def broadcast(self, tensor: Tensor) -> None:
        """Copy the tensor of process 0 into that of all other processes (broadcast)."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        if tensor.is_cuda and self._nccl is not None:
            self._nccl.broadcast([tensor.view(torch.uint8)], options).wait()
            return
        there = tensor.cpu()
        self._gloo.broadcast([there.view(torch.uint8)], options).wait(self._span)
        if there is not tensor:
            tensor.copy_(there)


def _gloo_device() -> object:
    from raafl.transport.gloo import _device

    return _device("127.0.0.1" if _is_local() else None)


def _is_local() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
