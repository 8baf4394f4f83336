"""What a process does with memory that it frees, as the kernel sees it; in processes of their own, for it cannot be undone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from raafl.local import heap

MIB = 2**20

PROCESS = """
import json, resource, sys
from raafl.local import heap

if sys.argv[1] != "as it is":
    assert getattr(heap, sys.argv[1])()
import torch

torch.set_num_threads(1)


def resident():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def step():  # blocks as a step of training takes and frees them: 48 + 24 + 16 MiB, the last in two
    blocks = [torch.ones(size * 2**18) for size in (48, 24, 8, 8)]
    held = resident()
    del blocks
    return held


for _ in range(3):  # until blocks have found their places
    step()
before, faults = resident(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
held = max(step() for _ in range(5))
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
after = resident()
given, again = heap.give_back(), heap.give_back(0)
print(json.dumps({"faults": faults, "held": held - before, "left": after - before, "given": given, "gone": after - resident()}))
"""


def told(how):
    result = subprocess.run(
        [sys.executable, "-c", PROCESS, how], capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


glibc = pytest.mark.skipif(not heap.is_glibc(), reason="the C library is not glibc")
PAGES = 5 * 88 * MIB // 4096
"""That five steps write to."""


@glibc
def test_a_process_that_keeps_what_it_frees_gets_no_new_pages_and_can_give_them_back():
    kept = told("keep_freed")
    assert kept["faults"] < PAGES / 50
    assert kept["held"] < 4 * MIB, "the pages of the first steps serve the others"
    assert kept["given"] and kept["gone"] > 80 * MIB


@glibc
def test_a_process_that_frees_at_once_holds_nothing_between_steps():
    tight = told("free_at_once")
    assert tight["faults"] > PAGES * 0.9
    assert tight["held"] > 80 * MIB and tight["left"] < 4 * MIB
    assert not tight["given"], "there is not enough to be worth it"


@glibc
def test_left_alone_large_blocks_come_from_the_system_each_time():
    assert told("as it is")["faults"] > PAGES / 4


def test_with_another_c_library_nothing_happens(monkeypatch):
    heap._glibc.cache_clear()
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: object())
    try:
        assert not heap.is_glibc()
        assert (heap.keep_freed(), heap.free_at_once(), heap.give_back(0)) == (False, False, False)
    finally:
        heap._glibc.cache_clear()
