"""Run a server and N clients on this machine by one command, without torchrun (`raafl fit --local N`).

It starts `raafl serve` on a loopback socket and N times `raafl join`, with a token made for this run, and leaves the rest to
`raafl.runtime.supervisor`. It imports no torch: the server reports errors of the config.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from raafl.config.argv import names_section, values, whole_number, without
from raafl.errors import BadInput
from raafl.runfolder.schema import JOURNAL
from raafl.runtime.supervisor import Child, RestartPolicy, Supervisor

NOTE: Final = "RAAFL_FOLDER_NOTE"
"""Environment variable with the file into which `raafl.commands.serve` writes the path of its run folder."""

TOKEN: Final = "RAAFL_LOCAL_TOKEN"
"""Environment variable with the token by which the processes of a run authenticate; see `credentials.TOKEN_VARIABLE`."""

_TORCHRUN: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TAKEN: Final = (
    "address",
    "client",
    "certs",
    "tls_ca",
    "tls_cert",
    "tls_key",
)  # options of serve and join that `fit --local` sets itself
_SERVER_ONLY: Final = (
    "--output",
    "--resume",
    "--progress",
    "--name",
    "--monitor",
    "--monitor_clients",
    "--monitor_stall_s",
)
_RAAFL: Final = (sys.executable, "-m", "raafl")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _LocalOptions:
    """Options of `raafl fit --local`: the number of clients, the policy of restarts, and the options of server and clients."""

    clients: int
    policy: RestartPolicy
    options: tuple[str, ...]


def fit_local(argv: Sequence[str]) -> int:
    """Train with a server and N clients, which are processes of this machine (`raafl fit --local N`); return the exit code.

    Raises:
        BadInput: `--local`, `--max_restarts` or `--clients` is wrong, or torchrun started this process.
    """
    asked = read(argv)
    with tempfile.TemporaryDirectory(prefix="raafl-") as scratch, _loopback() as listener:
        note, logs = Path(scratch) / "folder", Path(scratch) / "logs"
        logs.mkdir()
        environment = child_environment(os.environ, secrets.token_hex(32))
        port = listener.getsockname()[1]
        server = ServerCommand(asked.options, listener, note)
        supervisor = Supervisor(
            Child("the server", server.command, {**environment, NOTE: str(note)}, fds=(listener.fileno(),)),
            {
                number: Child(
                    f"client {number}",
                    partial(client_command, asked.options, port, number),
                    {
                        **environment,
                        "LOCAL_RANK": str(number),  # chooses the client's GPU, as under torchrun
                        # lets each process reckon with its part of the machine's memory
                        "LOCAL_WORLD_SIZE": str(asked.clients + 1),
                    },
                    logs / f"client-{number}.log",
                )
                for number in range(1, asked.clients + 1)
            },
            asked.policy,
            _log.warning,
            begun=note.is_file,
            joined=lambda: clients_joined(server.folder()),
            needed=_count(asked.options, "--min_clients", least=1) or asked.clients,
            listener=listener,
        )
        try:
            return supervisor.run()
        finally:
            _keep(logs, server.folder())


@contextlib.contextmanager
def _loopback() -> Iterator[socket.socket]:
    """Yield a listening socket on a free port of 127.0.0.1."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        yield listener


class ServerCommand:
    """Builder of the command line that starts the server of a run, or restarts it after a crash."""

    def __init__(
        self,
        options: Sequence[str],
        listener: socket.socket,
        note: Path | None = None,
        *,
        folder: Path | None = None,
        # 1: a restarted server must not wait for clients that have ended meanwhile
        resumed: Sequence[str] = ("--min_clients", "1"),
    ) -> None:
        """Prepare the command of a server that accepts clients at ``listener``, and resumes its run folder if restarted.

        `note`: file to which the server writes the path of its run folder; None = it is ``folder``. `resumed`: further
        options of a server that resumes.
        """
        self._options, self._note, self._folder, self._resumed = tuple(options), note, folder, tuple(resumed)
        self._address = ("--address", f"fd:{listener.fileno()}")

    def folder(self) -> Path | None:
        """Return the run folder; None if the server has not created it yet."""
        if self._note is None:
            return self._folder if self._folder is not None and self._folder.is_dir() else None
        path = self._note.read_text(encoding="utf-8") if self._note.is_file() else ""
        return Path(path.strip()) if path.strip() else None

    def command(self) -> list[str]:
        """Return the command that starts the server; after a crash, it resumes the run from the last checkpoint."""
        folder = self.folder()
        if folder is not None and any((folder / "checkpoints").glob("version-*.ckpt")):
            options = [*without(self._options, "--config", "--submitted", "--resume", "--output")]
            options += ["--resume", str(folder)]
            own = values(self._options, "--config") or not values(self._options, "--resume")
            if own and not values(self._options, "--submitted") and "--trust_config" not in options:
                # the config in the folder was written from one that the user trusts
                options.append("--trust_config")
            return [*_RAAFL, "serve", *options, *self._resumed, *self._address]
        # without a checkpoint nothing can be resumed: move the folder away, and start again under its name
        if folder is not None and folder.is_dir():
            number = 1
            while (aside := folder.with_name(f"{folder.name}-attempt-{number}")).exists():
                number += 1
            folder.rename(aside)
            if self._note is not None:
                self._note.unlink()
        return [*_RAAFL, "serve", *self._options, *self._address]


def clients_joined(folder: Path | None) -> set[int]:
    """Return the clients that have joined a run so far, by the journal in its folder; none if there is no folder."""
    journal = None if folder is None else folder / JOURNAL
    if journal is None or not journal.is_file():
        return set()
    with journal.open(encoding="utf-8", errors="replace") as lines:
        rows = [json.loads(line) for line in lines if '"joined"' in line and line.endswith("}\n")]
    return {row["client"] for row in rows if row["event"] == "joined"}


def client_command(options: Sequence[str], port: int, number: int) -> list[str]:
    """Return the command that starts a client."""
    mine = [option for option in without(options, *_SERVER_ONLY) if option != "--json"]
    if (resumed := values(options, "--resume")) and not values(options, "--config"):
        mine += ["--resume", resumed[-1]]
    if names_section(mine, "--data"):  # --data names the data of the whole run, of which this client takes its share
        mine += ["--share_of_data", "true"]
    where = ["--address", f"127.0.0.1:{port}", "--client", str(number)]
    # one user owns all processes, so nobody has to prove anything by receipts
    return [*_RAAFL, "join", *mine, *where, "--receipts", "false"]


def child_environment(environment: Mapping[str, str], token: str) -> dict[str, str]:
    """Return the environment variables for the server and the clients that `raafl fit --local` starts.

    OMP_NUM_THREADS is 1 unless set, and variables of torchrun are left out.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if name not in _TORCHRUN and not name.startswith("TORCHELASTIC_")
    }
    return {"OMP_NUM_THREADS": "1", **kept, TOKEN: token}


def read(argv: Sequence[str]) -> _LocalOptions:
    """Parse the options of `raafl fit --local`.

    Raises:
        BadInput: an option is wrong; see `fit_local`.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise BadInput(
            "--local starts the run's processes itself, but torchrun has started this one: leave out --local or torchrun"
        )
    for name in _TAKEN:
        if values(argv, f"--{name}"):
            raise BadInput(
                f"--{name} cannot be set with fit --local, which chooses it: leave it out, or use `raafl serve` and "
                "`raafl join`"
            )
    num_clients = _count(argv, "--local", least=1)
    if num_clients is None:
        raise BadInput("--local needs a number of clients, for example --local 4")
    explicit = _count(argv, "--clients", least=1)
    if explicit not in (None, num_clients):
        raise BadInput(f"--clients is {explicit}, but --local {num_clients} starts {num_clients}: leave out --clients")
    policy = RestartPolicy()
    if (most := _count(argv, "--max_restarts", least=0)) is not None:
        policy = replace(policy, max_restarts=most)
    options = without(argv, "--local", "--max_restarts", "--clients")
    return _LocalOptions(num_clients, policy, (*options, "--clients", str(num_clients)))


def _count(argv: Sequence[str], option: str, *, least: int) -> int | None:
    given = values(argv, option)
    return whole_number(option, given[-1], least) if given else None


def _keep(logs: Path, folder: Path | None) -> None:
    """Move the clients' non-empty logs into the run folder, if there is one."""
    written = [file for file in sorted(logs.iterdir()) if file.stat().st_size]
    if folder is not None and folder.is_dir() and written:
        kept = folder / "logs"
        kept.mkdir(exist_ok=True)
        for file in written:
            with (kept / file.name).open("ab") as target:
                target.write(file.read_bytes())
