"""Which ends NCCL joins, and its checksum; the pair itself needs two GPUs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from raafl.runtime.transport import nccl
from raafl.runtime.transport.gloo import GlooPair


def test_the_name_of_a_device_decides():
    one, two = "cuda:GPU-1", "cuda:GPU-2"
    assert nccl.nccl_problem("cpu", two) == "the server's tensors are on cpu"
    assert nccl.nccl_problem(one, "cpu") == "the client's tensors are on cpu"
    assert nccl.nccl_problem(one, one) == "both ends share one GPU"
    expected = None if dist.is_nccl_available() else "this torch is built without NCCL"
    assert nccl.nccl_problem(one, two) == expected
    assert nccl.identity(torch.device("cpu")) == "cpu"


def test_ends_without_gpus_choose_gloo_and_nccl_names_it_as_the_remedy():
    store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=10), wait_for_workers=False)
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(nccl.connect, store, "pair/1", server, 10.0, "127.0.0.1") for server in (True, False)]
        server, client = (end.result() for end in ends)
    with server, client:
        assert type(server) is GlooPair and type(client) is GlooPair
        with pytest.raises(RuntimeError, match=r"cpu.*use GlooPair"):
            nccl.NcclPair(server, store, "pair/1", torch.device("cpu"))


def test_the_word_sum_finds_lost_and_altered_words():
    piece = torch.arange(1, 12, dtype=torch.int32)  # 44 bytes: five words of 8 and 4 bytes
    by_hand = sum(low + (high << 32) for low, high in ((1, 2), (3, 4), (5, 6), (7, 8), (9, 10))) + 11
    assert nccl._sum(piece) == by_hand
