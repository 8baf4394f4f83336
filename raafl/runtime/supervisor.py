"""Start a server and its clients as processes on this machine, restart them if they fail, and end them (`raafl fit --local N`).

The server and every client are processes of their own, each in a session of its own: a Ctrl-C in the terminal reaches the
supervisor alone, which passes it on to the server, and the server lets the clients go. No torch and no threads here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final, Self

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STAYS: Final = (2, 130)  # exit codes for bad input and interrupts, after which a restart would not help
_SHOWN_LINES: Final = 20  # lines of a client's log that are shown when it is given up
_TICK_S: Final = 0.5
_PR_SET_PDEATHSIG: Final = 1
_libc: Final = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Limits and delays for restarting processes."""

    max_restarts: int = 100  # number of restarts, of all processes together, after which none is restarted
    first_s: float = 1.0  # seconds before the first restart of a process, doubled for each further one
    longest_s: float = 30.0  # longest wait before a restart in seconds, at which the doubling stops
    # seconds after which a running process counts as healthy, so that its next restart waits for ``first_s`` again
    sound_s: float = 60.0
    leave_s: float = 10.0  # seconds in which clients may end by themselves after the server has ended
    # seconds between SIGTERM and SIGKILL of a process, and between a second Ctrl-C and SIGKILL of the server
    stop_s: float = 10.0


@dataclass(slots=True)
class Child:
    """A server or client as a child process, with all of its restarts."""

    name: str  # name in messages
    command: Callable[[], Sequence[str]]  # function that returns the command line of the next start
    environment: Mapping[str, str]  # environment variables of the process
    log: Path | None = None  # file for the output; None = the supervisor's own output
    fds: tuple[int, ...] = ()  # file descriptors to inherit
    dies_with_parent: bool = True  # whether the kernel kills the process when the supervisor dies
    process: subprocess.Popen[bytes] | None = None  # present or last process
    due_s: float | None = 0.0  # time of the next start on the monotonic clock; None = none is planned
    settled: bool = False  # whether the end of the process was handled, by a planned restart or by giving it up
    num_starts: int = 0  # number of times that the process was started
    _wait_s: float = 0.0
    _started_s: float = 0.0

    def start(self) -> None:
        """Start the process."""
        output = self.log.open("ab") if self.log is not None else None
        with output or contextlib.nullcontext():
            self.process = subprocess.Popen(
                list(self.command()),
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output is not None else None,
                pass_fds=self.fds,
                start_new_session=True,
                preexec_fn=_die_with(os.getpid()) if self.dies_with_parent else None,
            )
        self._started_s, self.due_s, self.settled = time.monotonic(), None, False
        self.num_starts += 1

    def exit_code(self) -> int | None:
        """Return the exit code of the process: minus the signal's number if killed, None while it runs or waits to start."""
        if self.process is None or self.due_s is not None:
            return None
        if self.process.returncode is None and _has_ended(self.process.pid):
            # kill what the process has started: its group id is not reused until the process is reaped
            self.send(signal.SIGKILL)
        return self.process.poll()

    def start_again(self, policy: RestartPolicy) -> float:
        """Plan a restart of the process; return the seconds until then."""
        now = time.monotonic()
        sound = now - self._started_s >= policy.sound_s
        self._wait_s = policy.first_s if sound or not self._wait_s else min(2 * self._wait_s, policy.longest_s)
        self.due_s = now + self._wait_s
        return self._wait_s

    def send(self, number: int, *, group: bool = True) -> None:
        """Send a signal to the process; with ``group``, also to processes that it has started."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if group else os.kill)(self.process.pid, number)

    def last_words(self, num_lines: int = _SHOWN_LINES) -> list[str]:
        """Return the last lines in the log file of the process, without empty lines."""
        if self.log is None or not self.log.is_file():
            return []
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line for line in lines if line.strip()][-num_lines:]


def _has_ended(pid: int) -> bool:
    """Check whether a child process has ended, without reaping it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _die_with(parent: int) -> Callable[[], None]:
    """Return a function that a child calls at its start, so that the kernel kills it when its parent dies."""

    def ask() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent has died before the kernel was told
            os._exit(1)

    return ask


class Signals:
    """Context in which signals are recorded for `wait`; at its end the previous handlers are restored. Main thread only."""

    def __enter__(self) -> Self:
        self._came: list[int] = []
        self._ours, self._theirs = socket.socketpair()
        for end in (self._ours, self._theirs):
            end.setblocking(False)
        self._fd = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        self._before: dict[int, Any] = {}
        for number in (*_ENDING, signal.SIGTSTP, signal.SIGCHLD):
            # if nohup has set SIGHUP to be ignored, that stays so
            if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        signal.set_wakeup_fd(self._fd)
        self._ours.close()
        self._theirs.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._came.append(number)

    def wait(self, timeout_s: float) -> list[int]:
        """Wait up to ``timeout_s`` seconds for a signal; return all signals since the last call, without SIGCHLD."""
        if not self._came:
            select.select([self._ours], [], [], max(timeout_s, 0.0))
        with contextlib.suppress(BlockingIOError):
            while self._ours.recv(512):
                pass
        came, self._came = self._came, []
        return came


@dataclass
class Supervisor:
    """Supervisor of a server and its clients on this machine; it runs until the server has ended.

    A server that was killed by a signal is started again after a wait, as is a client that was killed or failed. If the
    server ends by itself, the run ends. A client that reports bad input is not started again. Its message is shown only
    once the run has begun: earlier the server reports the same error, since both read the same config.

    A client that ends by itself before it has joined, while the run cannot start without it, ends the run.

    ``begun`` returns whether the server has begun its run, ``joined`` which clients have joined it so far, and ``needed``
    is the number of clients with which it starts. ``listener`` is the server's socket; it is closed once the server has
    ended, so that no client waits for another server.
    """

    server: Child
    clients: dict[int, Child]
    policy: RestartPolicy
    say: Callable[[str], None]
    begun: Callable[[], bool] = lambda: True
    joined: Callable[[], Collection[int]] = tuple
    needed: int = 0
    listener: socket.socket | None = None
    num_restarts: int = field(default=0, init=False)
    _asked: int = field(default=0, init=False)  # number of signals by which the user asked for the end
    _kill_at: float | None = field(default=None, init=False)
    _away: set[int] = field(default_factory=set, init=False)  # clients that are not restarted any more
    _is_over: bool = field(default=False, init=False)  # whether too few clients are left

    def run(self) -> int:
        """Run until the server has ended.

        Returns:
            The server's exit code; 1 if it was killed too often or all clients are lost; 130 if the user ended the run.
        """
        with Signals() as signals:
            try:
                code: int | None = None
                while code is None:
                    self.start_due()
                    self._heed(signals.wait(self._patience_s()))
                    self._see_clients()
                    code = self._see_server()
                return code
            finally:
                self._end(signals)

    def _everyone(self) -> list[Child]:
        return [self.server, *self.clients.values()]

    def start_due(self) -> None:
        """Start each process whose time to start has come."""
        for child in self._everyone():
            if child.due_s is not None and child.due_s <= time.monotonic():
                child.start()

    def _patience_s(self) -> float:
        due = [child.due_s for child in self._everyone() if child.due_s is not None]
        return min([_TICK_S, *(at_s - time.monotonic() for at_s in due)])

    # ---- the user's signals ----

    def _heed(self, numbers: list[int]) -> None:
        """Forward the user's signals to the server; kill it at the third, or ``stop_s`` seconds after the second."""
        for number in numbers:
            if number == signal.SIGTSTP:
                self._pause()
                continue
            self._asked += 1
            self.server.send(signal.SIGTERM if number == signal.SIGHUP else number, group=False)
            if self._asked > 1:
                self._kill_at = time.monotonic() + (self.policy.stop_s if self._asked == 2 else 0.0)
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self.server.send(signal.SIGKILL)

    def _pause(self) -> None:
        """Suspend this process and its children (Ctrl-Z), and let the children continue when this process does."""
        for child in self._everyone():
            child.send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for child in self._everyone():
            child.send(signal.SIGCONT)

    # ---- processes that have ended ----

    def _see_server(self) -> int | None:
        """Return the run's exit code once the server has ended for good, else None; restart a server that died."""
        code, over = self.server.exit_code(), self._asked > 0 or self._is_over
        if code is None:
            return (130 if self._asked else 1) if over and self.server.due_s is not None else None
        if code >= 0:
            return 1 if code == 130 and self._is_over and not self._asked else code
        if over:
            return 130 if self._asked else 1
        if not self._may_restart():
            self.say(f"the server {exit_in_words(code)} and is not started again after {self.num_restarts} restarts")
            return 1
        wait_s = self.server.start_again(self.policy)
        self.say(
            f"the server {exit_in_words(code)}; it is started again in {wait_s:g} s, from its last checkpoint if there is one"
        )
        # start clients again that have ended because this server did
        for number, child in self.clients.items():
            if number not in self._away and child.exit_code() == 0:
                child.due_s = self.server.due_s
        return None

    def _see_clients(self) -> None:
        if self._asked or self.server.exit_code() is not None:
            return  # the clients end with the run, so none is restarted
        for number, child in self.clients.items():
            code = child.exit_code()
            if code is not None and not child.settled and (code not in _STAYS or self.begun()):
                child.settled = True
                if code != 0:
                    self._mend(number, child, code)

    def _mend(self, number: int, child: Child, code: int) -> None:
        is_awaited = code >= 0 and self._is_awaited(number)
        if code not in _STAYS and not is_awaited and self._may_restart():
            wait_s = child.start_again(self.policy)
            self.say(f"{child.name} {exit_in_words(code, child.last_words(1))}; it is started again in {wait_s:g} s")
            return
        self._away.add(number)
        why = "" if code in _STAYS or is_awaited else f" after {self.num_restarts} restarts in all"
        self.say(f"{child.name} {exit_in_words(code)} and is not started again{why}. The end of its output:")
        self.say("\n".join(f"  {line}" for line in child.last_words()) or "  (nothing)")
        is_left_alone = len(self._away) == len(self.clients)
        if (is_left_alone or is_awaited) and not self._is_over:
            self._is_over = True
            why = "every client is lost" if is_left_alone else f"the run cannot start without {child.name}"
            self.say(f"{why}: {'the run' if is_left_alone else 'it'} ends")
            self.server.send(signal.SIGTERM, group=False)
            self._kill_at = time.monotonic() + self.policy.stop_s

    def _is_awaited(self, number: int) -> bool:
        """Check whether the run cannot start without client ``number``, which has not joined."""
        if self.server.num_starts > 1:  # an earlier process of the server may have started the run
            return False
        joined = self.joined()
        others = len(self.clients) - len(self._away | {number})
        return number not in joined and max(len(joined), others) < self.needed

    def _may_restart(self) -> bool:
        """Count a restart and return True, or return False if no more are allowed."""
        if self.num_restarts >= self.policy.max_restarts:
            return False
        self.num_restarts += 1
        return True

    # ---- the end ----

    def _end(self, signals: Signals) -> None:
        """Wait for the clients to leave, then end those that remain, and return when all have ended."""
        for child in self._everyone():
            child.due_s = None
        if self.listener is not None:
            self.listener.close()
        code = self.server.exit_code()
        # clients of a server that ended before its run began would only look for it
        leaving = code is not None and code >= 0 and self.begun()
        steps = [(0, self.policy.leave_s if leaving else 0.0), (int(signal.SIGTERM), self.policy.stop_s)]
        for number, wait_s in steps:  # signal 0 only waits
            for child in self._left():
                child.send(number, group=False)
            deadline = time.monotonic() + wait_s
            while self._left() and (rest_s := deadline - time.monotonic()) > 0:
                if set(signals.wait(min(rest_s, _TICK_S))) - {signal.SIGTSTP}:  # the user has sent another signal
                    deadline = 0.0
        for child in self._left():
            child.send(signal.SIGKILL)
        while self._left():
            signals.wait(_TICK_S)

    def _left(self) -> list[Child]:
        return [child for child in self._everyone() if child.process is not None and child.exit_code() is None]


def exit_in_words(code: int, words: Sequence[str] = ()) -> str:
    """Describe how a process ended: "was killed by SIGKILL", or "failed: " and the last line that it printed."""
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    said = f": {words[-1].removeprefix('raafl: ')}" if words else ""
    return f"ended with exit code {code}{said}"


_END_S, _FAILED_S = 20.0, 3.0
"""Seconds that the other ranks get to end after rank 0 has ended, and after it has failed."""


@contextlib.contextmanager
def local_ranks(
    command: Sequence[str],
    num_ranks: int,
    *,
    environment: Mapping[str, str] | None = None,
    stdout: IO[bytes] | int | None = None,
    stderr: IO[bytes] | int | None = None,
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the other ranks for the duration of a ``with`` block, and yield their processes; they end soon after the block.

    In the block this process has torchrun's variables of rank 0.

    `stdout`: file for their output, as for `subprocess.Popen`; None = this process's own.
    """
    store, meeting = _meeting(num_ranks)
    before = {name: os.environ.get(name) for name in (*meeting, "RANK", "LOCAL_RANK")}
    ranks: list[subprocess.Popen[bytes]] = []
    patience_s = _FAILED_S
    try:
        for rank in range(1, num_ranks):
            # hide torch's warning when the store closes, by which waiting ranks learn of the run's end
            quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
            own = {**quiet, **os.environ, **meeting, **(environment or {}), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(command, stdout=stdout, stderr=stderr, env=own))
        os.environ.update(meeting, RANK="0", LOCAL_RANK="0")
        yield ranks
        patience_s = _END_S
    except SystemExit as ended:
        patience_s = _FAILED_S if ended.code else _END_S
        raise
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        del store  # closes the store, by which waiting ranks learn of the run's end
        _end(ranks, time.monotonic() + patience_s)


def _meeting(num_ranks: int) -> tuple[object, dict[str, str]]:
    """Open a key-value store for ranks on this machine; return it with the environment variables for the ranks."""
    from torch import distributed

    dist: Any = distributed  # untyped: most of torch.distributed has no annotations
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1", port, num_ranks, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    return store, {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _end(ranks: Sequence[subprocess.Popen[bytes]], deadline_s: float) -> None:
    try:
        for process in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline_s - time.monotonic(), 0.0))
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait()
