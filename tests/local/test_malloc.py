"""What a process does with memory that it frees, as the kernel sees it; in processes of their own, for it cannot be undone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from raafl.local import malloc

MIB = 2**20
STEPS = 4
STEP_BYTES = 136 * MIB
STEP_PAGES = STEP_BYTES // 4096

PROCESS = """
import ctypes, json, os, resource, sys
from raafl.local import malloc

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: one fault is one page, whatever the machine's setting
import torch

torch.set_num_threads(1)


def resident():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def step():  # blocks as a step of training takes and frees them; more in one than glibc ever keeps, left alone
    blocks = [torch.ones(size * 2**18) for size in (96, 24, 8, 8)]
    held = resident()
    del blocks
    return held


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def told(how):
    if how != "as it is":
        assert getattr(malloc, how)()
    for _ in range(5):  # blocks move until they have found their places
        step()
    before, start = resident(), faults()
    held = max(step() for _ in range(STEPS))
    new = faults() - start
    after = resident()
    given = malloc.give_back()
    gone = after - resident()
    again = malloc.give_back()  # the holes are there, their pages are not
    step()
    anew = malloc.give_back()
    return {"faults": new, "held": held - before, "left": after - before, "given": given, "gone": gone,
            "again": [again, anew]}


for how in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        print(json.dumps([how, told(how)]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
HOW = ("keep_freed", "free_at_once", "as it is")


@pytest.fixture(scope="module")
def told():
    """What each way does, in a fork of a process that has done nothing but import."""
    command = [sys.executable, "-c", PROCESS.replace("STEPS", str(STEPS)), *HOW]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return dict(map(json.loads, result.stdout.splitlines()))


glibc = pytest.mark.skipif(malloc._glibc("mallopt") is None, reason="the C library is not glibc")


@pytest.mark.slow("a process starts from nothing, and writes to half a million new pages")
@glibc
def test_a_process_that_keeps_what_it_frees_gets_few_new_pages_and_can_give_them_back(told):
    kept = told["keep_freed"]
    assert kept["faults"] < STEP_PAGES, "all steps get fewer new pages than one of them writes to"
    assert kept["held"] < STEP_BYTES, "the pages of the first steps serve the others"
    assert kept["given"] and kept["gone"] > STEP_BYTES * 0.9
    assert kept["again"] == [False, True], "holes without pages are not looked for again; those of another step are"


@glibc
def test_a_process_that_frees_at_once_holds_nothing_between_steps(told):
    tight = told["free_at_once"]
    assert tight["faults"] > STEPS * STEP_PAGES * 0.9
    assert tight["held"] > STEP_BYTES * 0.9 and tight["left"] < 4 * MIB
    assert (tight["given"], tight["again"]) == (False, [False, False]), "there is not enough to be worth it"


@glibc
def test_left_alone_large_blocks_come_from_the_system_each_time(told):
    assert told["as it is"]["faults"] > STEPS * STEP_PAGES / 2


def test_with_another_c_library_nothing_happens(monkeypatch):
    malloc._glibc.cache_clear()
    monkeypatch.setattr(malloc.ctypes, "CDLL", lambda name: object())
    try:
        assert malloc._glibc("mallopt") is None
        assert (malloc.keep_freed(), malloc.free_at_once(), malloc.give_back(0)) == (False, False, False)
    finally:
        malloc._glibc.cache_clear()
