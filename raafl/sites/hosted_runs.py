"""Keep the files of a server for many runs: a folder with a config, a log and a run folder for each run.

====================== ================================================================================================
file                   content
====================== ================================================================================================
``NAME.yaml``          config of the run, put there by the server's operator or by `raafl submit`
``NAME/``              its run folder
``NAME.log``           output of its processes
``.raafl/NAME/``       ``asked.json`` (who asked for what), ``ended.json`` (how it ended), ``socket`` (connections are passed
                       there), ``pid`` of the process that keeps the run, which holds a lock on the folder
====================== ================================================================================================

The process that offers the runs writes ``asked.json``, the one that keeps the run ``ended.json``. No torch here.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

from raafl.atomic_file import atomic_file
from raafl.config.remote_options import check_run_name
from raafl.errors import BadInput

State = Literal["submitted", "running", "completed", "stopped", "failed"]
STATES: Final = get_args(State)
MAX_CONFIG: Final = 200_000
"""Most characters of a config that is submitted."""
INTERRUPTED: Final = 130

_FOLDER: Final = ".raafl"
_LONGEST_PATH: Final = 100  # a Unix socket's path has at most 107 bytes
_LOCK_S: Final = 2.0  # seconds to wait for the lock, which another process takes briefly to look at it


@dataclass(frozen=True)
class Asked:
    """Request for a run: who submitted it and when, and whether it is to stop."""

    id: str  # random, so that clients can tell a new run from an earlier one of the same name
    since: float  # seconds since 1970
    by: str | None = None  # site that submitted the config; None = the config was put into the folder by hand
    min_clients: int | None = None  # number of clients with which it starts; None = all
    stop: bool = False  # whether it is to be stopped


@dataclass(frozen=True)
class HostedRun:
    """The files of one run; `name` is checked before."""

    folder: Path  # folder of all runs
    name: str

    @property
    def config(self) -> Path:
        """File with the run's config."""
        return self.folder / f"{self.name}.yaml"

    @property
    def run_folder(self) -> Path:
        """Folder into which the run is recorded."""
        return self.folder / self.name

    @property
    def log(self) -> Path:
        """File with the output of the run's processes."""
        return self.folder / f"{self.name}.log"

    @property
    def _own(self) -> Path:
        return self.folder / _FOLDER / self.name

    @property
    def asked(self) -> Asked | None:
        """Stored request for the run; None = there is none yet."""
        found = _read(self._own / "asked.json")
        return None if found is None else Asked(**found)

    def ask(self, asked: Asked) -> None:
        """Store the request for the run."""
        self._own.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(self._own / "asked.json", asdict(asked))

    def ask_first(self, by: str | None = None, min_clients: int | None = None) -> None:
        """Write down that a run is asked for that was not known before."""
        self.ask(Asked(secrets.token_hex(8), time.time(), by, min_clients))

    @property
    def exit_code(self) -> int | None:
        """Exit code with which the run has ended for good; None = it has not."""
        found = _read(self._own / "ended.json")
        code = None if found is None else found["code"]
        asked = self.asked
        # interrupted though nobody asked to stop it: the machine was shut down, so the run is to continue
        return None if code == INTERRUPTED and not (asked and asked.stop) else code

    def end(self, code: int) -> None:
        """Write down with which exit code the run has ended."""
        _write(self._own / "ended.json", {"code": code, "at": time.time()})

    @property
    def state(self) -> State:
        """How the run stands."""
        return "running" if self.is_kept else self.state_without_process

    @property
    def state_without_process(self) -> State:
        """How the run stands if no process runs it, from its files alone."""
        code, asked = self.exit_code, self.asked
        if code is None:
            return "stopped" if asked is not None and asked.stop else "submitted"
        return "completed" if code == 0 else "stopped" if code == INTERRUPTED else "failed"

    def stop(self) -> None:
        """Ask the run to stop: its server writes a checkpoint, tells its clients, and ends."""
        asked = self.asked
        assert asked is not None
        self.ask(replace(asked, stop=True))
        with suppress(OSError, ValueError):
            pid = int((self._own / "pid").read_text())
            if self.is_kept:  # else the run's process is gone, and its id may belong to another process by now
                os.kill(pid, signal.SIGINT)

    def resume(self) -> None:
        """Let a run that has stopped or failed continue from its last checkpoint."""
        asked = self.asked
        assert asked is not None
        self.ask(replace(asked, stop=False))
        (self._own / "ended.json").unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove what is stored about a run whose config and run folder are gone."""
        for name in ("ended.json", "asked.json"):  # the request last, since by it the rest is found again
            (self._own / name).unlink(missing_ok=True)

    @property
    def is_kept(self) -> bool:
        """Whether some process runs this run, even one that an earlier process of this server has started."""
        with suppress(OSError):
            descriptor = os.open(self._own, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(descriptor)
        return False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Hold the run's lock, for the process that keeps it.

        Raises:
            BadInput: another process keeps the run.
        """
        self._own.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(self._own, f"run '{self.name}' is kept by another process: wait until it ends, or stop the run"):
            (self._own / "pid").write_text(str(os.getpid()))
            yield

    @contextmanager
    def receiving(self) -> Iterator[socket.socket]:
        """Yield a socket to which `pass_on` passes connections; the run's server inherits it."""
        path = self._own / "socket"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made, _short(path) as name:
            path.unlink(missing_ok=True)
            made.bind(name)
            try:
                yield made
            finally:
                path.unlink(missing_ok=True)

    def pass_on(self, connection: socket.socket) -> bool:
        """Pass a connection to the run's process, or to the next one that is started; return False if there is no process.

        The caller still closes its own descriptor, without shutting the connection down.

        Raises:
            BlockingIOError: too many connections wait there already.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, _short(self._own / "socket") as name:
            sender.setblocking(False)
            try:
                sender.connect(name)
                socket.send_fds(sender, [b"\0"], [connection.fileno()])
            except BlockingIOError:
                raise
            except OSError:
                return False
            return True

    def last_lines(self, num: int) -> list[str]:
        """Return the last lines of the run's log."""
        with suppress(OSError), self.log.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - (64 << 10), 0))
            return file.read().decode(errors="replace").splitlines()[-num:]
        return []


def configs(folder: Path) -> list[HostedRun]:
    """Return the runs whose configs lie in a folder, in the order in which they were asked for, new ones last."""
    runs = []
    for file in folder.glob("*.yaml"):
        with suppress(BadInput):
            runs.append(HostedRun(folder, check_run_name(file.stem)))
    since = {run.name: asked.since if (asked := run.asked) else float("inf") for run in runs}
    return sorted(runs, key=lambda run: (since[run.name], run.name))


def removed(folder: Path, known: Collection[str]) -> list[HostedRun]:
    """Return the runs, of names not in ``known``, that were asked for, but have neither config, run folder nor process."""
    stored = [HostedRun(folder, path.name) for path in (folder / _FOLDER).glob("*") if path.name not in known]
    return [
        run
        for run in stored
        if run.asked is not None and not (run.config.exists() or run.run_folder.exists() or run.is_kept)
    ]


@contextmanager
def locked(folder: Path, problem: str) -> Iterator[None]:
    """Hold a lock on a folder, which ends with the process; raise `BadInput` with ``problem`` if another process has it."""
    descriptor, until = os.open(folder, os.O_RDONLY | os.O_DIRECTORY), time.monotonic() + _LOCK_S
    try:
        while not _lock(descriptor):
            if time.monotonic() > until:
                raise BadInput(problem)
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a path to ``path`` that is short enough for a Unix socket: through /proc/self/fd if it is too long itself."""
    plain = str(path.absolute())
    if len(os.fsencode(plain)) <= _LONGEST_PATH:
        yield plain
        return
    descriptor = -1
    with suppress(FileNotFoundError):
        descriptor = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def state_folder_of(folder: Path) -> Path:
    """Make the folder of a server's own files in a folder of runs, and return it."""
    own = folder / _FOLDER
    own.mkdir(parents=True, exist_ok=True, mode=0o700)
    return own


def _read(path: Path) -> Any:
    with suppress(FileNotFoundError, NotADirectoryError):
        return json.loads(path.read_text())
    return None


def _write(path: Path, content: Any) -> None:
    with atomic_file(path) as file:
        file.write(json.dumps(content).encode())
