"""Fail a test that leaves processes, threads or variables behind, skips for lack of data, or exceeds its CPU budget."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

BUDGET_S = 5.0
"""CPU seconds, its child processes' included, that a test may take on an idle machine; one that takes more is marked `slow`."""
ALLOWANCE = 9.0
"""Beside busy neighbours, on slower cores, and without compiled caches the same work counts several times the CPU seconds."""
_SPENT = pytest.StashKey[float]()

# set by pytest, or by a library at import or first use: no fault of the test
LIBRARY_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "CUDA_MODULE_LOADING",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # set by Lightning
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
}


def cpu_s() -> float:
    """Return the CPU seconds of this process and of the children that it has waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def over_budget(spent_s: float, reasons: list[object]) -> str | None:
    """Return a complaint about a test that took ``spent_s`` CPU seconds; None if its budget or a `slow` mark allows it."""
    if spent_s <= BUDGET_S * ALLOWANCE or reasons:
        return None
    return (
        f"took {spent_s:.1f} s of CPU; a test may take {BUDGET_S:g}: make it smaller, mark it @pytest.mark.slow(reason), "
        "or mark it @pytest.mark.long, for `make test-long`"
    )


def unnamed(marks: list[pytest.Mark]) -> list[pytest.Mark]:
    """Return the tests whose mark `slow` gives no reason."""
    return [mark for mark in marks if not (len(mark.args) == 1 and isinstance(mark.args[0], str) and mark.args[0])]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Record the CPU time of a test."""
    before = cpu_s()
    try:
        return (yield)
    finally:
        item.stash[_SPENT] = cpu_s() - before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """With RAAFL_REQUIRE_DATA=1 fail a test that skips for lack of data, with RAAFL_TEST_BUDGET=1 one over its CPU budget."""
    report = yield
    if os.environ.get("RAAFL_REQUIRE_DATA") == "1" and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if "RAAFL_DATA" in reason:
            report.outcome = "failed"
            report.longrepr = f"RAAFL_REQUIRE_DATA=1 forbids this skip: {reason}"
    if call.when == "call" and report.passed and os.environ.get("RAAFL_TEST_BUDGET") == "1":
        reasons = [mark for name in ("slow", "long") for mark in item.iter_markers(name)]
        if complaint := over_budget(item.stash.get(_SPENT, 0.0), reasons):
            report.outcome, report.longrepr = "failed", f"{item.nodeid} {complaint}"
    return report


@pytest.fixture(scope="session")
def raafl_data() -> Path:
    """Return the folder of the prepared real data sets; skip the test where there is none."""
    folder = os.environ.get("RAAFL_DATA")
    if not folder:
        pytest.skip("RAAFL_DATA is not set: it names the folder with the real data sets")
    if not Path(folder).is_dir():
        pytest.fail(f"RAAFL_DATA names {folder!r}, which is not a folder")
    return Path(folder)


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaves a process, a thread or a process group, or a changed environment or working directory."""
    environment, folder = dict(os.environ), Path.cwd()
    threads = set(threading.enumerate())
    processes = _descendants()
    yield
    left = [*_processes(processes), *_threads(threads), *_process_group(), *_environment(environment)]
    if Path.cwd() != folder:
        left.append(f"the working directory {Path.cwd()}")
        os.chdir(folder)
    if left:
        pytest.fail("the test left behind " + "; ".join(left), pytrace=False)


def _processes(before: set[int]) -> list[str]:
    """Return the commands of descendants that still run, and kill them, so that the next test starts without."""

    def running() -> list[psutil.Process]:
        new = []
        for pid in sorted(_descendants() - before):
            with contextlib.suppress(psutil.NoSuchProcess):
                child = psutil.Process(pid)
                if child.status() != psutil.STATUS_ZOMBIE and not is_tracker(child):
                    new.append(child)
        return new

    names = []
    for child in _after_grace(running):
        with contextlib.suppress(psutil.NoSuchProcess):
            names.append(f"process {child.pid} ({' '.join(child.cmdline())[:120]})")
            child.kill()
    return names


def _descendants(pid: int | str = "self") -> set[int]:
    """Return the ids of all descendants from Linux's lists of children; psutil would read every process of the machine."""
    lists = [thread / "children" for thread in Path(f"/proc/{pid}/task").glob("*")]
    if pid == "self" and not any(path.exists() for path in lists):
        return {child.pid for child in psutil.Process().children(recursive=True)}
    found = set()
    for path in lists:
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            found |= {int(word) for word in path.read_text().split()}
    return found.union(*map(_descendants, found))


def is_tracker(process: psutil.Process) -> bool:
    """Check whether a process is multiprocessing's resource tracker, which lives as long as the interpreter."""
    return "multiprocessing.resource_tracker" in " ".join(process.cmdline())


def _threads(before: set[threading.Thread]) -> list[str]:
    def running() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]

    return [f"thread {thread.name}" for thread in _after_grace(running)]


def _process_group() -> list[str]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    distributed.destroy_process_group()
    return ["a torch.distributed process group"]


def _environment(before: dict[str, str]) -> list[str]:
    names = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
    changed = sorted(names - LIBRARY_VARIABLES)
    for name in changed:
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]
    return [f"the environment variable {name}" for name in changed]


def _after_grace(running: Callable[[], list], grace_s: float = 3.0) -> list:
    """Return what still runs after at most ``grace_s`` seconds; returns sooner if nothing does."""
    deadline = time.monotonic() + grace_s
    while (left := running()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
