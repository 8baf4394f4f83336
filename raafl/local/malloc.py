"""Tune glibc's malloc for memory that a client's process frees between steps.

By default glibc returns large blocks to the system as soon as they are free, and each step gets them anew, page by page, each page
cleared by the kernel first: a tenth to a half of the time of a step with large tables. It also leaves holes between smaller blocks,
which have been seen to take half as much again as the tensors of a task. So a process does better with one of two extremes: keep
everything while the task runs, or, where memory is short, as little as possible.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from functools import cache
from pathlib import Path
from typing import Any

# parameters of mallopt, from <malloc.h>
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8
_NEVER, _ANY = -1, 65536
_LARGE_BYTES = 64 * 2**10
WORTH_BYTES = 64 * 2**20
"""Smallest amount of free memory for which returning pages to the system is worth its time."""


def keep_freed() -> bool:
    """Make the C library keep freed memory in one heap, for faster reuse; return whether it supports that.

    Call this before any thread allocates memory, since a thread that already has its own heap continues to use it.
    """
    # other heaps than the main one are limited to 64 MiB each, and always return larger blocks to the system
    return _set(_ARENA_MAX, 1) and _set(_MMAP_MAX, 0) and _set(_TRIM_THRESHOLD, _NEVER)


def free_at_once() -> bool:
    """Make the C library return larger blocks to the system as soon as they are freed; return whether it supports that."""
    return _set(_MMAP_MAX, _ANY) and _set(_MMAP_THRESHOLD, _LARGE_BYTES) and _set(_TRIM_THRESHOLD, _LARGE_BYTES)


def give_back(worth_bytes: int = WORTH_BYTES) -> bool:
    """Return unused memory to the system if it may be more than ``worth_bytes``; return whether any was returned."""
    global _slack_left
    trim = _glibc("malloc_trim")
    if trim is None:
        return False
    free_bytes, slack_bytes = _free_bytes()
    # malloc_trim walks the whole heap, so it is called only if pages were freed since the last call
    if free_bytes <= worth_bytes or (worth_bytes and slack_bytes - _slack_left <= worth_bytes):
        return False
    given = bool(trim(0))
    _slack_left = _free_bytes()[1]
    return given


_slack_left = -math.inf
"""Free memory that was left when pages were last returned to the system."""

_USAGE = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)


class _Usage(ctypes.Structure):
    """Result of glibc's `mallinfo2`: ``struct mallinfo2`` of <malloc.h>."""

    _fields_ = [(name, ctypes.c_size_t) for name in _USAGE]


def _free_bytes() -> tuple[float, float]:
    """Return the unused bytes of the heap, and the resident bytes that no allocated block uses; infinite if unknown."""
    told = _glibc("mallinfo2")
    if told is None:  # glibc before 2.33
        return math.inf, math.inf
    usage = told()
    resident, of_files = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return int(usage.fordblks), (resident - of_files) * mmap.PAGESIZE - int(usage.uordblks) - int(usage.hblkhd)


def _set(parameter: int, value: int) -> bool:
    mallopt = _glibc("mallopt")
    return mallopt is not None and bool(mallopt(parameter, value))


@cache
def _glibc(name: str) -> Any:
    """Return a function of glibc; None if the C library is not glibc, or too old to have that function."""
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  other libraries have a `mallopt`, too
        function = getattr(library, name)
    except (OSError, AttributeError):
        return None
    function.restype = _Usage if name == "mallinfo2" else ctypes.c_int
    return function
