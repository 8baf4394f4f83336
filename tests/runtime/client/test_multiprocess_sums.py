"""How the processes of one client agree on what their sums go over; NCCL is a stand-in, on emulated GPUs."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from raafl.runtime.client.multiprocess import GroupSums
from raafl.transport import nccl

WAIT_S = 20.0


class Sums:
    """A ProcessGroupNCCL of two threads that can add; that of rank 1 may fail when it is made."""

    Options = SimpleNamespace
    fails = False

    def __init__(self, store, rank, size, options):
        self.rank, self.num_sums, self.aborted = rank, 0, False
        if self.fails and rank == 1:
            Sums.barrier.abort()
            raise ValueError("no GPUs found")

    def allreduce(self, tensors, options):
        def wait():
            try:
                Sums.given[self.rank] = tensors[0]
                Sums.barrier.wait(WAIT_S)
                total = sum(tensor.cpu() for tensor in Sums.given)
                Sums.barrier.wait(WAIT_S)
            except threading.BrokenBarrierError:
                raise RuntimeError("NCCL error: remote process exited") from None
            tensors[0].copy_(total)
            self.num_sums += 1

        return SimpleNamespace(wait=wait)

    def abort(self):
        self.aborted = True


@pytest.fixture
def groups(monkeypatch, emulated_cuda):
    """Makes the groups of two processes with a GPU each."""
    for name in nccl.WATCHDOG:
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Sums, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    Sums.barrier, Sums.given, Sums.fails = threading.Barrier(2), [None, None], False

    def made():
        store, names = dist.HashStore(), ["cuda:a/0", "cuda:a/1"]
        with ThreadPoolExecutor(2) as pool:
            making = [
                pool.submit(GroupSums, store, rank, 2, WAIT_S, torch.device("cuda", rank), names) for rank in (0, 1)
            ]
            return [one.result() for one in making]

    return made


def sums(made):
    """The sum of 1 and 2, as each process has it."""
    tensors = [torch.full((3,), float(rank + 1), device=f"cuda:{rank}") for rank in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        begun = [one.begin_sum(tensor) for one, tensor in zip(made, tensors, strict=True)]
        for adding in [pool.submit(wait) for wait in begun]:
            adding.result()
    return [tensor.tolist() for tensor in tensors]


def test_on_emulated_gpus_of_their_own_the_processes_add_over_nccl(groups, caplog):
    made = groups()
    assert not caplog.records
    assert sums(made) == [[3.0] * 3] * 2
    assert [one._nccl.num_sums for one in made] == [2, 2]  # the first one joined them


def test_on_emulated_gpus_where_nccl_fails_in_one_process_all_add_over_gloo(groups, caplog):
    Sums.fails = True
    made = groups()
    assert [one._nccl for one in made] == [None, None]
    assert re.search("NCCL is not used, gradients are summed over Gloo: .*no GPUs found", caplog.text)
    assert sums(made) == [[3.0] * 3] * 2
