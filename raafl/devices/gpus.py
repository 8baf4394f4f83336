"""Assign a GPU to each process of a run (docs/gpu.md shows the result as a table).

Training processes get their machine's GPUs in turn. The coordinator uses no GPU without `server_device`; with one, that GPU
comes last in the turn, so that a training process shares it only where there are too few.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Rank of a process among the run's processes on its machine; it determines the process's GPU."""

    local_rank: int = 0
    num_ranks: int = 1
    num_gpus: int = 0
    server_device: str | None = None
    chosen: int | None = None

    @classmethod
    def here(cls, server_device: str | None, chosen: int | None = None) -> Place:
        """Read the rank of this process from the environment set by torchrun or `fit --local`.

        `server_device`: device that holds the global model, if the process of rank 0 is only the server; None = rank
        0 trains, too, or is on another machine.
        `chosen`: index of the GPU that the user asked for; None = assigned by the rank.
        """
        import torch

        local_rank, num_ranks = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        # `fit --local` sets only LOCAL_RANK; it runs on one machine, where RANK is the same
        rank = int(os.environ.get("RANK", local_rank))
        with_rank_0 = num_ranks > 0 and rank == local_rank
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return cls(local_rank, max(num_ranks, 1), num_gpus, server_device if with_rank_0 else None, chosen)

    @property
    def gpu(self) -> int | None:
        """Index of the GPU of this process; None = it uses no GPU."""
        return self.gpu_of(self.local_rank)

    def gpu_of(self, local_rank: int) -> int | None:
        """Return the index of the GPU of another process on this machine, given by its local rank; None = it uses no GPU."""
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
        """Count the processes that share a GPU, or the machine's memory if ``gpu`` is None; the server's process counts, too."""
        if gpu is None:
            return self.num_ranks
        return max(sum(self.gpu_of(rank) == gpu for rank in range(self.num_ranks)), 1)
