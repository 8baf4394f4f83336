"""Run clients that join over TCP and leave; each is a process, and the server runs in the test's own process."""

from __future__ import annotations

import gc
import json
import multiprocessing as mp
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from raafl.commands.serve import serve
from raafl.config.experiment import Experiment
from raafl.errors import BadInput, Replaced, RunFailed
from raafl.runtime import identity
from raafl.runtime.client.join import join
from raafl.runtime.client.setup import ClientSetup
from raafl.runtime.server.link import Inbox
from raafl.sites.admit import DryRun, admit, look
from raafl.sites.credentials import TlsFiles
from raafl.sites.gate import SiteGate
from raafl.sites.receipts import receipts_kept
from raafl.transport.tcp.credentials import LocalToken
from tests.helpers import cached_models, real_ranks
from tests.helpers.certificates import federation
from tests.helpers.small_runs import Finished

HOST = "127.0.0.1"
SERVER, SITE = federation().server, federation().site()


@dataclass
class Joiner:
    """Process that becomes a client when `begin` is called.

    `said`: its standard error, once it has ended.
    """

    client: int
    process: Any
    tell: Connection
    said: Path

    def begin(self) -> None:
        """Let the process join as a client."""
        self.tell.send(None)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.process.pid, number)

    def exit_code(self, timeout_s: float = 40.0) -> int | None:
        """Return the exit code; None = it still runs."""
        self.process.join(timeout_s)
        return self.process.exitcode

    def words(self) -> str:
        """Return the output so far."""
        return self.said.read_text() if self.said.exists() else ""


def _be_client(
    experiment: Experiment,
    client: int,
    address: str,
    credentials: TlsFiles | LocalToken,
    told: Connection,
    said: Path,
    options: dict[str, Any],
) -> None:
    real_ranks.RANK = client
    # threads of earlier stores do not exist in this process, and to collect such a store would wait for its thread
    # forever
    gc.freeze()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        told.recv()
    except EOFError:
        os._exit(9)
    sys.stderr = said.open("w", buffering=1)
    own = options.pop("own", None)
    identity.PROTOCOL = options.pop("protocol", identity.PROTOCOL)
    identity.__version__ = options.pop("raafl", identity.__version__)
    address = options.pop("address", address)
    config_yaml, keep_inputs = options.pop("config_yaml", ""), options.pop("keep_inputs", None)
    policy, looks = options.pop("policy", None), options.pop("looks", False)
    code = 0
    mine = experiment if own is None else own

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    def make(_: str | None) -> ClientSetup:
        site = ClientSetup.build(mine, config_yaml, client, own_data=own is not None)
        if keep_inputs is not None:
            stack.enter_context(receipts_kept(site, keep_inputs, say))
        return site

    try:
        gate = None if policy is None else SiteGate(policy, say)

        def make_site(text: str | None) -> ClientSetup:
            admitted = partial(admit, gate, mine, config_yaml, partial(make, text))
            return look(admitted, config_yaml, say) if looks else admitted()

        with ExitStack() as stack:
            if gate is not None:
                stack.enter_context(gate.logs_kept())
            join(
                address,
                client,
                credentials,
                make_site,
                needs_config=options.pop("needs_config", False),
                gate=gate,
                alone_s=options.pop("alone_s", 60.0),
                say=say,
                **options,
            )
    except DryRun:
        pass
    except (RunFailed, BadInput) as error:
        print(error, file=sys.stderr)
        code = 3 if isinstance(error, Replaced) else 1
    sys.stderr.flush()
    os._exit(code)


def _be_server(
    experiment: Experiment, version: str, config_yaml: str, address: str, told: Connection, said: Path
) -> None:
    gc.freeze()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        told.recv()
    except EOFError:
        os._exit(9)
    sys.stderr = said.open("w", buffering=1)
    identity.__version__ = version
    try:
        serve(experiment, config_yaml, address, SERVER)
    except (RunFailed, BadInput) as error:
        print(error, file=sys.stderr)
        os._exit(1)
    os._exit(0)


class Remote:
    """Listening socket, and processes that may join there; all are forked at once, before this process has threads."""

    def __init__(
        self,
        experiment: Experiment,
        config_yaml: str,
        folder: Path,
        clients: Sequence[int | tuple[int, dict[str, Any]]],
        servers: Sequence[Experiment | tuple[Experiment, str]] = (),
        port: int | None = None,
    ) -> None:
        self.experiment, self.config_yaml = experiment, config_yaml
        self.listener = socket.socket()
        if port is None:
            self.listener.bind((HOST, 0))
            self.listener.listen(64)
        self.address = f"{HOST}:{port or self.listener.getsockname()[1]}"
        self.joiners: list[Joiner] = []
        self.servers: list[Joiner] = []
        context = mp.get_context("fork")
        for number, server in enumerate(servers):
            run, version = server if isinstance(server, tuple) else (server, identity.__version__)
            told, tell = context.Pipe(duplex=False)
            said = folder / f"server-{number}.txt"
            process = context.Process(
                target=_be_server, args=(run, version, config_yaml, self.address, told, said), daemon=True
            )
            process.start()
            told.close()
            self.servers.append(Joiner(0, process, tell, said))
        for number, entry in enumerate(clients):
            client, options = entry if isinstance(entry, tuple) else (entry, {})
            told, tell = context.Pipe(duplex=False)
            said = folder / f"joiner-{number}.txt"
            options = {"config_yaml": config_yaml, **options}
            credentials = options.pop("credentials", SITE)
            process = context.Process(
                target=_be_client,
                args=(experiment, client, self.address, credentials, told, said, options),
                daemon=True,
            )
            process.start()
            told.close()
            self.joiners.append(Joiner(client, process, tell, said))

    def serve(self, inbox: Inbox | None = None, **options: Any) -> Finished:
        """Run the server to the end of the run."""
        listener = options.pop("listener", None) or socket.socket(fileno=os.dup(self.listener.fileno()))
        config_yaml = options.pop("config_yaml", self.config_yaml)
        experiment = options.pop("experiment", self.experiment)
        return Finished(*serve(experiment, config_yaml, listener, SERVER, inbox=inbox, **options))

    def finished(self, folder: Path) -> Finished:
        """Return a server's summary and run folder."""
        return Finished(json.loads((folder / "summary.json").read_text()), folder)

    def close(self) -> None:
        """Kill all processes that still run."""
        self.listener.close()
        for joiner in self.joiners + self.servers:
            with suppress(ValueError):
                joiner.process.kill()
                joiner.process.join(timeout=5)
                joiner.process.close()
            joiner.tell.close()


@contextmanager
def remote(
    experiment: Experiment,
    config_yaml: str,
    folder: Path,
    clients: Sequence[int | tuple[int, dict[str, Any]]],
    held_back: Sequence[int] = (),
    servers: Sequence[Experiment | tuple[Experiment, str]] = (),
    port: int | None = None,
) -> Iterator[Remote]:
    """Run a server and clients that join it; all are killed when the block ends.

    `clients`: ids, or pairs of an id and its options. `held_back`: indices in ``clients`` of those that join only when
    `Joiner.begin` is called. `servers`: experiments of servers to fork beside the clients, each perhaps with a version
    of raafl. `port`: port of the server; None = any free one.
    """
    with cached_models.reuse_findings():
        started = Remote(experiment, config_yaml, folder, clients, servers, port)
        try:
            for place, joiner in enumerate(started.joiners):
                if place not in held_back:
                    joiner.begin()
            yield started
        finally:
            started.close()
