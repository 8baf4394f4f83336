"""Run a command in a process forked from the test's: signals and exit code are real, and nothing is imported again."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from raafl.commands.cli import main
from tests.helpers import cached_models

DEADLINE_S = 100.0


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """Wait until ``condition`` returns something true, and return that."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} has not come within {DEADLINE_S:g} s"
        time.sleep(0.01)
    return found


@dataclass
class Command:
    """A running `raafl` command."""

    process: Any
    folder: Path
    """Where its output goes: `out` and `err`."""

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def send(self, number: signal.Signals) -> None:
        """Send a signal, and wait until the process has taken it: a second one sent before would merge with it."""
        os.kill(self.process.pid, number)
        if number in (signal.SIGKILL, signal.SIGSTOP):
            return
        wait_for(lambda: not pending(self.process.pid, number), f"the taking of {number.name}")

    def send_all(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the command, as a terminal or a cluster does."""
        os.killpg(self.process.pid, number)
        wait_for(lambda: not pending(self.process.pid, number), f"the taking of {number.name}")

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, deadline_s: float = DEADLINE_S) -> int:
        """Wait until the command has ended; return its exit code."""
        self.process.join(timeout=deadline_s)
        assert self.process.exitcode is not None, f"it has not ended within {deadline_s:g} s:\n{self.err}"
        return int(self.process.exitcode)


def pending(pid: int, number: signal.Signals) -> bool:
    """Check whether a signal is pending for a process; False where the system does not tell."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("ShdPnd:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _run(
    entry: Callable[[list[str]], int | None],
    argv: list[str],
    folder: Path,
    environment: dict[str, str],
    before: Callable[[], None] | None,
) -> None:
    os.setsid()
    gc.freeze()  # objects of the parent are left out of garbage collection
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(environment)
    code = 99
    try:
        with cached_models.reuse_findings():  # also for processes that are forked from this one
            if before is not None:
                before()
            code = entry(argv) or 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 98
        if isinstance(error.code, str):  # print the message, as Python does for sys.exit
            print(error.code, file=sys.stderr)
            code = 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)


@contextmanager
def command(
    folder: Path,
    *argv: str,
    before: Callable[[], None] | None = None,
    entry: Callable[[list[str]], int | None] = main,
    **environment: str,
) -> Iterator[Command]:
    """Run `raafl ARGV` in a process group of its own, which is killed when the block ends.

    `folder`: working directory, and folder of the output. `before`: called first in the new process. `entry`: function
    to call in place of the command line's main function. `environment`: variables to set.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cached_models.warm_up()
    process = mp.get_context("fork").Process(target=_run, args=(entry, list(argv), folder, environment, before))
    process.start()
    try:
        yield Command(process, folder)
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()
        process.close()


def in_fork(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function`` in a forked process and return its result; what it changes in the process is gone afterwards."""
    context = mp.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def work() -> None:
        gc.freeze()
        theirs.send(function(*args))

    process = context.Process(target=work)
    process.start()
    theirs.close()
    try:
        return ours.recv()  # EOFError: the function has failed, and its traceback is on standard error
    finally:
        process.join()
        process.close()
        ours.close()
