"""What every test may rely on, and what no test may leave behind."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: many tests run several processes on few cores

import contextlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

# Set by pytest, or by a library when it is imported or first used; they say nothing about the test.
LIBRARY_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "CUDA_MODULE_LOADING",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # set by Lightning
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
}


# A shell ignores SIGINT for what it starts with &, nohup SIGHUP; tests send both.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

ALONE = (
    *(
        "benchmarks",
        "chaos",
        "conformance",
        "distributed",
        "launch",
        "commands/test_cli",
        "test_ends",
        "test_federation_api",
        "commands/test_fit_local",
        "commands/test_supervise",
    ),
    *(f"runtime/test_{name}" for name in ("interrupt", "executors", "rendezvous", "saver", "session")),
    "runfolder/test_rows",
    "loggers",
    *(f"runtime/transport/test_{name}" for name in ("listener", "hostile", "pair", "tcp")),
)
"""Folders and files whose tests are marked ``alone``."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what must not run beside other tests."""
    for item in items:
        place = Path(item.path).relative_to(Path(__file__).parent).with_suffix("")
        if any(place.is_relative_to(alone) for alone in ALONE):
            item.add_marker("alone")


@pytest.fixture
def free_port() -> int:
    """A TCP port that was free a moment ago; where the code under test can take port 0, give it that instead."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture(scope="session")
def raafl_data() -> Path:
    """The folder with the prepared real data sets; the test is skipped where there is none."""
    folder = os.environ.get("RAAFL_DATA")
    if not folder:
        pytest.skip("RAAFL_DATA is not set: it names the folder with the real data sets")
    if not Path(folder).is_dir():
        pytest.fail(f"RAAFL_DATA names {folder!r}, which is not a folder")
    return Path(folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """With RAAFL_REQUIRE_DATA=1, a test that skips for want of data fails."""
    report = yield
    if os.environ.get("RAAFL_REQUIRE_DATA") == "1" and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if "RAAFL_DATA" in reason:
            report.outcome = "failed"
            report.longrepr = f"RAAFL_REQUIRE_DATA=1 forbids this skip: {reason}"
    return report


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaves a process, a thread or a process group, or a changed environment or working directory."""
    environment, folder = dict(os.environ), Path.cwd()
    threads = set(threading.enumerate())
    processes = {child.pid for child in psutil.Process().children()}
    yield
    left = [*_processes(processes), *_threads(threads), *_process_group(), *_environment(environment)]
    if Path.cwd() != folder:
        left.append(f"the working directory {Path.cwd()}")
        os.chdir(folder)
    if left:
        pytest.fail("the test left behind " + "; ".join(left), pytrace=False)


def _processes(before: set[int]) -> list[str]:
    """Descendants that still run, by their command; they are killed, so that the next test starts clean."""

    def running() -> list[psutil.Process]:
        new = []
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.pid not in before and child.status() != psutil.STATUS_ZOMBIE and not _is_helper(child):
                    new.append(child)
        return new

    names = []
    for child in _after_grace(running):
        with contextlib.suppress(psutil.NoSuchProcess):
            names.append(f"process {child.pid} ({' '.join(child.cmdline())[:120]})")
            child.kill()
    return names


def _is_helper(process: psutil.Process) -> bool:
    """multiprocessing keeps one tracker for the life of the interpreter."""
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
    """What still runs after `grace_s`; ends early when nothing does."""
    deadline = time.monotonic() + grace_s
    while (left := running()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
