"""Assign a GPU to each process of a run: one map for everything that starts processes (docs/gpu.md has it as a table).

Those that train are dealt their machine's GPUs in turn. The one that coordinates takes none of them away: without a
`server_device` it uses no GPU, and with one that GPU is dealt last, so that it is shared only where the others do not suffice.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a process among a run's processes on one machine."""

    local_rank: int = 0
    num_ranks: int = 1
    num_gpus: int = 0
    server_device: str | None = None
    chosen: int | None = None

    @classmethod
    def here(cls, server_device: str | None, chosen: int | None = None) -> Place:
        """Read this process's place from the environment that torchrun, or `fit --local`, has given it.

        Args:
            server_device: where rank 0 has the global model and does nothing else; None = rank 0 trains as well, or is elsewhere.
            chosen: see above.
        """
        import torch

        local_rank, num_ranks = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        rank = int(os.environ.get("RANK", local_rank))  # `fit --local` sets none: its machine is the only one
        with_rank_0 = num_ranks > 0 and rank == local_rank
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return cls(local_rank, max(num_ranks, 1), num_gpus, server_device if with_rank_0 else None, chosen)

    @property
    def gpu(self) -> int | None:
        """The index of this process's GPU; None = it uses none."""
        return self.gpu_of(self.local_rank)

    def gpu_of(self, local_rank: int) -> int | None:
        """Map a process of this machine to the index of its GPU; None = it uses none."""
        if not self.num_gpus:
            return None
        kind, _, index = (self.server_device or "").partition(":")
        server_gpu = int(index or 0) if kind == "cuda" else None
        if self.server_device is None:
            number, first = local_rank, 0
        elif local_rank == 0:
            return server_gpu
        else:
            number, first = local_rank - 1, 0 if server_gpu is None else server_gpu + 1
        return (first + number) % self.num_gpus if self.chosen is None else self.chosen

    def num_sharing(self, gpu: int | None) -> int:
        """Count the processes that share a GPU's memory, or the machine's (None); the coordinator's is one."""
        if gpu is None:
            return self.num_ranks
        return max(sum(self.gpu_of(rank) == gpu for rank in range(self.num_ranks)), 1)
