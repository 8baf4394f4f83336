"""What every test may rely on; `tests/helpers/guards.py` says what none may leave behind, or cost."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: many tests run several processes on few cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks a server
os.environ.setdefault("WANDB_MODE", "offline")
os.environ["XDG_STATE_HOME"] = "/dev/null"  # no test leaves notes of its runs with the user, or finds some

import signal
import socket
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import hypothesis
import pytest
import torch

from raafl.lean_import import import_lightning, quick_imports
from tests.helpers.emulated_cuda import emulated_cuda  # noqa: F401
from tests.helpers.guards import (  # noqa: F401  fixtures and hooks, which pytest finds by name here
    leaves_nothing_behind,
    pytest_runtest_call,
    pytest_runtest_makereport,
    raafl_data,
    unnamed,
)

with quick_imports():  # what stays is looked through for garbage neither here nor in the processes that tests fork
    import_lightning()
    from tests.helpers.cached_models import cache_inputs

    cache_inputs()

hypothesis.settings.register_profile("raafl", deadline=None)  # by the wall clock, which goes on while others compute
hypothesis.settings.load_profile("raafl")

# A shell ignores SIGINT for what it starts with &, nohup SIGHUP; tests send both.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

PROCESSES = (
    *("benchmarks", "chaos", "conformance", "distributed", "launch", "loggers"),
    *(f"commands/test_{name}" for name in ("bad_options", "cli", "completion", "fit_local")),
    *("docs/test_site", "report/test_browser", "test_ends", "test_federation_scripts", "test_wheel"),
    *(f"runtime/{name}" for name in ("test_exchange", "executors/test_executors", "local/test_supervisor")),
    *(f"runtime/{name}" for name in ("lifecycle/test_signals", "lifecycle/test_checkpointer")),
    *(f"runtime/server/test_{name}" for name in ("session", "session_hello")),
    *(f"transport/test_{name}" for name in ("hostile", "gloo", "nccl", "torchrun")),
    *(f"transport/tcp/test_{name}" for name in ("callers", "listener", "strangers", "connection")),
)
"""Folders and files whose tests are marked ``processes``: they start some, and may run beside one other test."""
NEEDS_GPU = "needs a GPU"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Neither are the modules of tests, and the tests themselves."""
    with quick_imports():
        return (yield)


@cache
def _starts_processes(path: Path) -> bool:
    place = path.relative_to(Path(__file__).parent).with_suffix("")
    return any(place.is_relative_to(some) for some in PROCESSES)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts processes, and what needs a GPU where there is none; files with slow tests come first."""
    without_gpu = pytest.mark.skip(reason=NEEDS_GPU) if not torch.cuda.is_available() else None
    for item in items:
        if without_gpu is not None and item.get_closest_marker("gpu"):
            item.add_marker(without_gpu)
        if _starts_processes(item.path):
            item.add_marker("processes")
        if unnamed(list(item.iter_markers("slow"))):
            raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.slow says why, in a string")
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)  # a long test that starts last leaves a core idle


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how much was not seen for want of a GPU."""
    skipped = [report for report in terminalreporter.getreports("skipped") if NEEDS_GPU in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests marked gpu were skipped: torch sees no GPU here")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m alone...``, ``long...`` or ``waits...`` import no file that has no such mark: most of that run would be imports."""
    wanted = config.option.markexpr.partition(" ")[0]
    if wanted in ("alone", "long", "waits") and collection_path.suffix == ".py":
        return f"mark.{wanted}" not in collection_path.read_text(encoding="utf-8") or None
    return None


@pytest.fixture
def free_port() -> Iterator[int]:
    """A TCP port where nobody listens; where the code under test can take port 0, give it that instead.

    It stays bound while the test lasts, so that no other process is given it. Who sets SO_REUSEADDR, as raafl and c10d do,
    may listen there.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
