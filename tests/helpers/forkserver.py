"""Fork `python -m raafl ...` and scripts from a process that has imported everything, instead of starting them anew.

`start` is called in a process of the test's own, before it has threads: `forked_command.command(..., before=forkserver.start)`.
It forks one process that only forks, so that no thread or lock of a later caller is copied. The processes become children of
the caller, as those of `subprocess` are: the process between them exits, and Linux gives its child to the caller (a subreaper).
For shell scripts, `stand_ins` writes executables `raafl` and `torchrun` that ask for such processes.
That a command starts from nothing, too, is tested once for each: test_cli.py, test_torchrun.py, launch/test_scripts.py.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import inspect
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch._dynamo  # noqa: F401  the first optimiser does

from raafl.commands.cli import main
from tests.helpers import cached_models

STARTED = "RAAFL_TEST_STARTED"
"""Environment variable: a folder in which each process notes its command line."""

_PDEATHSIG, _SUBREAPER = 1, 36
_LARGEST = 1 << 17


@dataclass(frozen=True)
class Started:
    """A process in place of `python -m raafl ...` or `python SCRIPT.py ...`; ``argv`` begins with `raafl` or the script."""

    process: psutil.Process
    argv: tuple[str, ...]
    rank: str | None
    """Under torchrun."""


def started(folder: Path, *words: str) -> list[Started]:
    """Return the running processes whose command lines contain ``words`` in a row, the oldest first."""
    found = []
    for note in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns):
        with suppress(psutil.NoSuchProcess):
            one = json.loads(note.read_text())
            process, argv = psutil.Process(int(note.stem)), tuple(one["argv"])
            has = any(argv[i : i + len(words)] == words for i in range(len(argv)))
            if has and process.status() != psutil.STATUS_ZOMBIE:
                found.append(Started(process, argv, one["rank"]))
    return found


def start() -> None:
    """Fork each `python -m raafl ...` and `python SCRIPT.py ...` that `subprocess` starts from now on, in any thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_SUBREAPER, 1, 0, 0, 0) == 0
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asker = os.getpid()
    if os.fork() == 0:
        ours.close()
        _serve(theirs, asker, libc)
    theirs.close()
    usual, lock = subprocess.Popen._execute_child, threading.Lock()  # type: ignore[attr-defined]
    signature = inspect.signature(usual)

    def execute(self: Any, *args: Any, **more: Any) -> None:
        asked = signature.bind(self, *args, **more).arguments
        argv = _argv(asked["args"])
        if argv is None:
            usual(self, *args, **more)
            return
        ends = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
        passed = list(asked["pass_fds"])
        request = {
            "argv": argv,
            "cwd": str(asked["cwd"] or os.getcwd()),
            "env": dict(asked["env"] or os.environ),
            "passed": passed,
            "session": asked["start_new_session"],
        }
        with lock:
            fds = [number if end == -1 else end for number, end in enumerate(ends)]
            socket.send_fds(ours, [json.dumps(request).encode()], fds + passed)
            self.pid = int(ours.recv(64))
        self._child_created = True
        self._close_pipe_fds(
            *(asked[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]


# client that a shell script runs as `raafl` or `torchrun`: another process does the work, with its files, folder and
# environment
_STAND_IN = """
import json, os, signal, socket, sys

with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({address!r})
    asked = {{"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ), "passed": [], "session": False}}
    socket.send_fds(server, [json.dumps(asked).encode()], [0, 1, 2])
    pid = int(server.recv(64))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    code = int(server.recv(64))
sys.exit(code if code >= 0 else 128 - code)
"""


@contextmanager
def stand_ins(folder: Path) -> Iterator[None]:
    """Write executables `raafl` and `torchrun` for shell scripts to ``folder``; what they start is killed at the end."""
    cached_models.warm_up()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # Linux chooses an abstract name
        listener.listen(16)
        (folder / "stand_in.py").write_text(_STAND_IN.format(address=listener.getsockname()))
        for name in ("raafl", "torchrun"):
            (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} -SE {folder}/stand_in.py {name} "$@"\n')
            (folder / name).chmod(0o755)
        server = os.fork()
        if server == 0:
            _stand_in(listener)
        try:
            yield
        finally:
            os.kill(server, signal.SIGTERM)
            os.waitpid(server, 0)


def _stand_in(listener: socket.socket) -> None:
    """Serve until SIGTERM: for each caller fork a process, which forks another to do the work and reports its end."""
    gc.freeze()
    libc = ctypes.CDLL(None)
    libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    attendants = []
    try:
        while True:
            caller, _ = listener.accept()
            attendant = os.fork()
            if attendant == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                listener.close()
                libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                data, fds, _, _ = socket.recv_fds(caller, _LARGEST, 3)
                worker = os.fork()
                if worker == 0:
                    caller.close()
                    with cached_models.reuse_findings():
                        _be(json.loads(data), fds, libc)
                for fd in fds:
                    os.close(fd)
                caller.send(str(worker).encode())
                caller.send(str(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])).encode())
                os._exit(0)
            attendants.append(attendant)
            caller.close()
    finally:
        for attendant in attendants:
            os.kill(attendant, signal.SIGKILL)
            os.waitpid(attendant, 0)
        os._exit(0)


def script(argv: list[str]) -> int:
    """Run `python SCRIPT.py ...` in this process; an ``entry`` for `tests.helpers.forked_command.command`."""
    sys.argv = argv
    return _run(argv)


def torchrun(argv: list[str]) -> int:
    """Run `torchrun ARGV` in this process; an ``entry`` for `tests.helpers.forked_command.command`."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run

    try:
        with tempfile.TemporaryDirectory(prefix="torchrun-") as logs:  # by itself it leaves a folder
            run(["--log-dir", logs, *argv])
    except ChildFailedError as failed:
        print(failed, file=sys.stderr)
        return 1
    return 0


def _argv(args: Any) -> list[str] | None:
    """Return the arguments from `raafl` or `SCRIPT.py` on of a command that starts one of these; None for any other command."""
    words = [] if isinstance(args, str | bytes | os.PathLike) else [os.fspath(word) for word in args]
    if words[:1] != [sys.executable]:
        return None
    words = [word for word in words[1:2] if word != "-u"] + words[2:]
    if words[:2] == ["-m", "raafl"]:
        return words[1:]
    return words if words[:1] and words[0].endswith(".py") else None


def _serve(theirs: socket.socket, asker: int, libc: Any) -> None:
    """Fork a process for each request, until the process that sends requests has ended."""
    libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # sent to the whole process group; this process ends with the one that asks
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()
    try:
        while True:
            data, fds, _, _ = socket.recv_fds(theirs, _LARGEST, 16)
            if not data or os.getppid() != asker:
                break
            middle = os.fork()
            if middle == 0:
                if os.fork() == 0:
                    # wait until the kernel has made the asker its parent, which could not wait for it before
                    while os.getppid() != asker:
                        time.sleep(0.0005)
                    theirs.send(str(os.getpid()).encode())
                    _be(json.loads(data), fds, libc)
                os._exit(0)
            os.waitpid(middle, 0)
            for fd in fds:
                os.close(fd)
    finally:
        os._exit(0)


def _be(request: dict[str, Any], fds: list[int], libc: Any) -> None:
    """Become the requested process: take its files, environment, session and signals, then run the command."""
    code = 99
    try:
        _take(fds, [0, 1, 2, *request["passed"]])
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        if request["session"]:
            os.setsid()
        # it ends with the process that asked, as all that raafl itself starts
        libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        if folder := os.environ.get(STARTED):
            note = {"argv": request["argv"], "rank": os.environ.get("RANK")}
            (Path(folder) / f"{os.getpid()}.new").write_text(json.dumps(note))
            os.rename(f"{folder}/{os.getpid()}.new", f"{folder}/{os.getpid()}.json")
        sys.argv = request["argv"]
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False, buffering=1)
        code = _run(request["argv"])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 98
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _run(argv: list[str]) -> int:
    if argv[0] == "raafl":
        return main(argv[1:])
    if argv[0] == "torchrun":
        start()
        return torchrun(argv[1:])
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    runpy.run_path(argv[0], run_name="__main__")
    return 0


def _take(fds: list[int], numbers: list[int]) -> None:
    """Give the received files their numbers, and close all others, also those of log handlers."""
    # pytest's handlers write to files by number, and after closing them a file of the run could get such a number
    logging.getLogger().handlers.clear()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 512) for fd in fds]
    for fd, number in zip(high, numbers, strict=True):
        os.dup2(fd, number, inheritable=True)
    last = 2
    for number in sorted(numbers[3:]):
        os.closerange(last + 1, number)
        last = number
    os.closerange(last + 1, 4096)
