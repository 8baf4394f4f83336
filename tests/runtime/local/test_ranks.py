"""Ranks that this process starts: they meet at its store, and end soon after it."""

from __future__ import annotations

import os
import sys
import time

import pytest
from torch import distributed

from raafl.runtime.supervisor import local_ranks

MEET = """
import os, sys, time
from torch import distributed as dist
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store.set("rank " + os.environ["RANK"], os.environ["WORLD_SIZE"] + os.environ["OWN"])
time.sleep(float(sys.argv[1]))
"""
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def command(seconds):
    return [sys.executable, "-c", MEET, str(seconds)]


@pytest.fixture(autouse=True)
def without_torchrun(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "of the user")


def test_ranks_meet_hear_of_the_end_and_complain_of_nothing_and_this_process_is_rank_0_for_the_block_alone(tmp_path):
    waits = MEET + "try:\n    store.get('never')\nexcept dist.DistNetworkError:\n    sys.exit(3)\n"
    before = dict(os.environ)
    with (
        (tmp_path / "stderr").open("wb") as stderr,
        local_ranks([sys.executable, "-c", waits, "0"], 3, environment={"OWN": "!"}, stderr=stderr) as ranks,
    ):
        assert (os.environ["RANK"], os.environ["LOCAL_WORLD_SIZE"]) == ("0", "3")
        store = distributed.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
        assert [store.get(f"rank {rank}") for rank in (1, 2)] == [b"3!", b"3!"]
        time.sleep(0.2)  # so that they wait
        del store
    assert dict(os.environ) == before
    assert [process.returncode for process in ranks] == [3, 3]
    assert (tmp_path / "stderr").read_text() == ""


def test_ranks_are_killed_soon_after_a_block_that_fails(monkeypatch):
    monkeypatch.setattr("raafl.runtime.supervisor._FAILED_S", 0.2)
    with pytest.raises(RuntimeError, match="of rank 0"), local_ranks(command(100), 3, environment={"OWN": ""}) as ranks:
        begin = time.monotonic()
        raise RuntimeError("of rank 0")
    assert time.monotonic() - begin < 10
    assert [process.returncode for process in ranks] == [-9, -9]
