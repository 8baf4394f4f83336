"""Take all runs of a server for many that this site's policy allows (`raafl join --any`).

Each run gets a client of its own, a process that runs `raafl join --run NAME` with the same options, and has its own memory. What
of the machine a client may use is divided among ``--at_once``, and another is started only while as much memory is free as the
largest client so far has taken.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from raafl.commands.join import credentials
from raafl.config.argv import without
from raafl.errors import RunFailed
from raafl.lean_import import quick_imports
from raafl.runtime.supervisor import Child, RestartPolicy, Signals, exit_in_words

_ASK_S: Final = 5.0  # seconds between two requests for the server's list of runs
_TICK_S: Final = 0.5
_ALONE_S: Final = 600.0  # seconds without an answer after which the command gives up; as `Timeouts.alone_s`
_TRIES: Final = 2  # number of failures of a run's client after which the run is given up
_MARGIN: Final = 1.1
_FOR_GOOD: Final = (0, 2, 3, 130)  # exit codes after which a restarted client would only end in the same way
_log = logging.getLogger(__name__)


def join_any(own: Namespace, argv: Sequence[str]) -> int:
    """Train for all runs of a server until a signal, or until there was no run for ``--idle_s``; return the exit code.

    Raises:
        BadInput: a certificate is of no use.
        RunFailed: no server answered for 600 s, or it refuses this site.
    """
    with quick_imports():
        from raafl.sites.run_server import Question, ask

    login = credentials(own, server=False).client_login()

    def runs() -> list[dict[str, Any]]:
        found = ask(own.address, Question("list"), login, proxy=own.proxy).runs
        return [row for row in found if row["state"] == "running"]

    options = [option for option in without(argv, "--at_once", "--idle_s", "--run") if option != "--any"]
    return Clients(own, options, runs).work()


@dataclass
class _Client:
    """Client process of one run, with its restarts, GPU slot and largest memory."""

    run: str
    child: Child
    slot: int
    num_failed: int = 0
    largest_bytes: int = 0


@dataclass
class Clients:
    """The clients of the runs that this process takes.

    `own`, `options`: options of `raafl join`. `runs`: asks for the runs that go on.
    """

    own: Namespace
    options: Sequence[str]
    runs: Callable[[], list[dict[str, Any]]]
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    free_bytes: Callable[[], float] = lambda: free_memory()
    _clients: dict[str, _Client] = field(default_factory=dict, init=False)  # by the run's id
    _over: set[str] = field(default_factory=set, init=False)  # ids of the runs whose client is not started again
    _offered: list[dict[str, Any]] = field(default_factory=list, init=False)
    _largest_bytes: int = field(default=0, init=False)
    # times on the monotonic clock of the latest request, the latest answer, and the latest moment with a client
    _asked_s: float = field(default=float("-inf"), init=False)
    _answered_s: float = field(default=0.0, init=False)
    _busy_s: float = field(default=0.0, init=False)

    def work(self) -> int:
        """Start clients for runs until a signal, or until there was no run for ``--idle_s``; return the exit code."""
        self._answered_s = self._busy_s = time.monotonic()
        with Signals() as signals:
            try:
                return self._attend(signals)
            finally:
                self._end(signals)

    def _attend(self, signals: Signals) -> int:
        while self._may_continue():
            if set(signals.wait(_TICK_S)) - {signal.SIGTSTP}:
                return 130
            self._handle_ended()
            self._ask()
            self._start()
        return 0

    def _may_continue(self) -> bool:
        """Check whether to continue: a client works, or a run may still come; raise `RunFailed` if no server answers."""
        now = time.monotonic()
        if self._clients:
            self._busy_s = now
            return True
        if now - self._answered_s > _ALONE_S:
            raise RunFailed(
                f"no server for many runs answered at {self.own.address} for {_ALONE_S:g} s: check the address"
            )
        if self.own.idle_s is None or now - self._busy_s <= self.own.idle_s:
            return True
        self._say(f"there was no run to take for {self.own.idle_s} s")
        return False

    def _ask(self) -> None:
        """Ask the server for its list of runs, unless it was asked less than five seconds ago."""
        from raafl.transport import PeerLost, PeerTimeout

        if time.monotonic() - self._asked_s < _ASK_S:
            return
        try:
            self._offered = self.runs()
            self._answered_s = time.monotonic()
        except (PeerLost, PeerTimeout, OSError) as error:
            self._say(f"the server at {self.own.address} does not answer ({error}); clients at work go on")
        self._asked_s = time.monotonic()

    def _handle_ended(self) -> None:
        """Handle clients whose process has ended, and restart those that are due."""
        for run_id, client in list(self._clients.items()):
            child = client.child
            client.largest_bytes = max(client.largest_bytes, most_memory(child))
            self._largest_bytes = max(self._largest_bytes, client.largest_bytes)
            if child.due_s is not None and child.due_s <= time.monotonic():
                child.start()
            code = child.exit_code()
            if code is None:
                continue
            client.num_failed += code > 0
            if code in _FOR_GOOD or client.num_failed >= _TRIES:
                how = "has ended" if code == 0 else f"is left: its client {exit_in_words(code)}"
                self._say(f"run '{client.run}' {how}")
                self._over.add(run_id)
                del self._clients[run_id]
                continue
            wait_s = child.start_again(self.policy)
            self._say(f"the client of run '{client.run}' {exit_in_words(code)}; it is started again in {wait_s:g} s")

    def _start(self) -> None:
        """Start a client for the next run on the server's list, if one is left and memory suffices."""
        if len(self._clients) >= self.own.at_once:
            return
        row = next(
            (row for row in self._offered if row["id"] not in self._over and row["id"] not in self._clients), None
        )
        # the newest client may not have allocated its memory yet, so as much as the largest client's must be free
        if row is None or (self._clients and self.free_bytes() < _MARGIN * self._largest_bytes):
            return
        slot = min(set(range(self.own.at_once)) - {client.slot for client in self._clients.values()})
        command = [sys.executable, "-m", "raafl", "join", *self.options, "--run", row["run"]]
        environment = dict(os.environ)
        if self.own.at_once > 1:
            # tells the process how many share the machine's memory, and which GPU to use
            environment |= {"LOCAL_WORLD_SIZE": str(self.own.at_once), "LOCAL_RANK": str(slot)}
        child = Child(f"the client of run '{row['run']}'", lambda: command, environment)
        child.start()
        self._clients[row["id"]] = _Client(row["run"], child, slot)
        self._say(f"takes run '{row['run']}'")

    def _end(self, signals: Signals) -> None:
        children = [client.child for client in self._clients.values()]
        for number in (signal.SIGINT, signal.SIGKILL):
            for child in children:
                child.due_s = None
                child.send(number, group=number == signal.SIGKILL)
            until = time.monotonic() + self.policy.stop_s
            while time.monotonic() < until and any(child.exit_code() is None for child in children):
                signals.wait(0.1)

    def _say(self, text: str) -> None:
        _log.info(f"client {self.own.client}: {text}", extra={"prefix": "raafl, ", "private": True})


def most_memory(child: Child) -> int:
    """Return the most bytes of memory that a running process has taken so far; 0 if that is not known."""
    if child.process is None or child.process.returncode is not None:
        return 0
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{child.process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):  # the line is missing once the process has ended
                return 1024 * int(line.split()[1])
    return 0


def free_memory() -> float:
    """Return the bytes of memory that another client may take; infinite if that is not known."""
    from raafl.devices.measure import free_on_machine

    with contextlib.suppress(OSError):
        return free_on_machine()
    return float("inf")
