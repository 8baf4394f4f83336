"""What every test may rely on; `tests/helpers/guards.py` says what none may leave behind, or cost."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: many tests run several processes on few cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks a server
os.environ.setdefault("WANDB_MODE", "offline")
os.environ["XDG_STATE_HOME"] = "/dev/null"  # no test leaves notes of its runs with the user, or finds some

import inspect
import signal
import socket
from collections.abc import Generator, Iterator

import pytest

from raafl.lean_import import import_lightning, quick_imports
from raafl.log import console
from tests.helpers.guards import (  # noqa: F401  fixtures and hooks, which pytest finds by name here
    leaves_nothing_behind,
    pytest_runtest_call,
    pytest_runtest_makereport,
    raafl_data,
    unnamed,
)
from tests.helpers.long_cases import mark_long_cases

# A shell ignores SIGINT for what it starts with &, nohup SIGHUP; tests send both.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Lightning's loading of a checkpoint and torchrun's rendezvous ask who called them; the lines of source that inspect finds for
# each caller, through all modules that are imported, are read by nobody.
inspect.stack.__defaults__ = (0,)
os.fsync = lambda descriptor: None  # no test takes the power away; some thousand files would wait for the disk

NEEDS_GPU = "needs a GPU"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Import what tests use and choose how many examples Hypothesis tries; xdist's controller runs no test and needs neither."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return
    with quick_imports():  # what stays is looked through for garbage neither here nor in the processes that tests fork
        import_lightning()
        from tests.helpers.cached_models import cache_inputs

        cache_inputs()
        config.pluginmanager.import_plugin("tests.helpers.emulated_cuda")
    import hypothesis

    # No deadlines: they are of the wall clock, which goes on while others compute.
    hypothesis.settings.register_profile("quick", deadline=None, max_examples=20)
    hypothesis.settings.register_profile("thorough", deadline=None, max_examples=500)
    hypothesis.settings.load_profile(config.option.hypothesis_profile or "quick")


@pytest.fixture(scope="session", autouse=True)
def on_the_console() -> Iterator[None]:
    """Print what is logged, as the command line does."""
    with console():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave the modules of tests, and the tests themselves, out of garbage collections."""
    with quick_imports():
        return (yield)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects what is long
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU where there is none; run files with slow tests first."""
    import torch

    mark_long_cases(items)
    without_gpu = pytest.mark.skip(reason=NEEDS_GPU) if not torch.cuda.is_available() else None
    for item in items:
        if without_gpu is not None and item.get_closest_marker("gpu"):
            item.add_marker(without_gpu)
        if unnamed(list(item.iter_markers("slow"))):
            raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.slow says why, in a string")
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)  # a long test that starts last leaves a core idle


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how much was not seen for want of a GPU."""
    skipped = [report for report in terminalreporter.getreports("skipped") if NEEDS_GPU in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests marked gpu were skipped: torch sees no GPU here")


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
