"""`raafl serve`: a run whose clients are on their own machines and come and go.

The server listens at one TCP port; nobody is told anything before the shared secret is proven
(`raafl.runtime.transport.listener`). Of two clients with one id the newer takes part and the older is told so and ends:
after a broken network the older connection is the dead one.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raafl.commands.fit_local import NOTE
from raafl.commands.run import Run, coordinate, make_server
from raafl.compression.plan import CompressionPlan
from raafl.config.experiment import Experiment
from raafl.config.shared import for_clients, sections
from raafl.errors import BadInput
from raafl.runtime import resume
from raafl.runtime.inbox import Inbox
from raafl.runtime.session import Session, Terms
from raafl.runtime.setup import build
from raafl.runtime.transport import Kind, Message, Pair, Refused
from raafl.runtime.transport.keys import bind, check_run
from raafl.runtime.transport.listener import Listener, encrypts, parse_address
from raafl.runtime.transport.turns import Turns

if TYPE_CHECKING:
    from raafl.runfolder.record import RunRecord
    from raafl.runtime.distributed import Server
    from raafl.runtime.transport.handshake import Secret
    from raafl.submodel import Submodels

_GREET_S = 30.0  # for a connected client to greet; it may have to load its data first


def listener(address: str | socket.socket) -> str | socket.socket:
    """Return where to listen: ``HOST:PORT`` as it is, or for ``fd:N`` the listening socket inherited as descriptor N.

    Raises:
        BadInput: neither.
    """
    if isinstance(address, socket.socket):
        return address
    if not address.startswith("fd:"):
        parse_address(address)
        return address
    try:
        inherited = socket.socket(fileno=int(address[3:]))
        if not inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise OSError("it does not listen")
    except (ValueError, OSError) as error:
        raise BadInput(
            f"address is '{address}': {error}: give HOST:PORT, or fd:N for an inherited listening socket"
        ) from None
    return inherited


def serve(
    experiment: Experiment,
    config_yaml: str,
    address: str | socket.socket,
    secret: Secret,
    *,
    min_clients: int | None = None,
    encrypt: bool | None = None,
    progress_file: Any = None,
    inbox: Inbox | None = None,
) -> tuple[dict[str, Any], Path]:
    """Coordinate clients that come and go; return the summary and the run folder.

    Args:
        experiment: the run.
        config_yaml: its config, which a client without one is given.
        address: where to listen; see `listener`.
        secret: what clients prove before they are told anything.
        min_clients: how many must have joined before work starts, also after a restart; None = as many as the run to
            resume needed, or all.
        encrypt: encrypt all that is said after the handshake; None = unless only this machine can reach ``address``.
        progress_file: where progress is shown.
        inbox: where events pass through on their way to the coordinator.

    Raises:
        BadInput: the config, the address, the secret, or a folder that cannot be resumed.
    """
    experiment.check()
    if min_clients is not None and not 1 <= min_clients <= experiment.clients:
        raise BadInput(f"min_clients is {min_clients}: give 1 to {experiment.clients}, the run's number of clients")
    where = listener(address)
    encrypt = encrypts(where, encrypt)
    saved = resume.load(Path(experiment.resume), "distributed") if experiment.resume else None
    check_run(secret, saved.folder if saved is not None else None)
    parts = build(
        experiment, pace=experiment.emulate and experiment.devices is not None,
        min_clients=min_clients or _min_clients(saved) or experiment.clients, count_lost=False,
    )  # fmt: skip
    shares = [client.num_samples for client in parts.clients]
    lobby = _Lobby(
        experiment, Terms(for_clients(config_yaml), sections(config_yaml)), parts.submodels, inbox or Inbox(), shares
    )
    door = Listener(
        where, secret, lobby.admit, lobby.refused, encrypt=encrypt, timeout_s=experiment.waits.idle_s, turns=Turns()
    )
    try:
        run = Run(parts, config_yaml, "distributed", progress_file, saved)
        bind(secret, run.folder)
        lobby.record = run.record
        lobby.server = make_server(run, [], lobby.inbox, patience_s=experiment.waits.alone_s, bears=_bears())
        _leave_note(run.folder)
        door.start()
        run.progress.note(f"listening at {door.address}" + (", encrypted" if encrypt else ""))
        return coordinate(run, lobby.server, saved)
    finally:
        door.close()


def _min_clients(saved: resume.SavedRun | None) -> int | None:
    return None if saved is None else saved.section["coordinator"].get("min_clients")


class _Lobby:
    """Where callers that the door lets in become sessions of the server."""

    record: RunRecord
    server: Server

    def __init__(
        self, experiment: Experiment, terms: Terms, submodels: Submodels, inbox: Inbox, shares: list[int]
    ) -> None:
        self._shares = shares
        self._experiment, self._terms, self._submodels, self.inbox = experiment, terms, submodels, inbox
        self._waits = replace(experiment.waits, join_s=_GREET_S)

    def admit(self, pair: Pair, client: int, peer: str) -> None:
        """Start a session for a caller; raises `Refused` for one that is none of this run's clients."""
        if not 1 <= client <= self._experiment.clients:
            problem = f"client is {client}: this run has clients 1 to {self._experiment.clients}"
            pair.send(Message(Kind.STOP, meta={"reason": f"refused: {problem}"}))
            raise Refused("unknown-client", problem)

        def session(incarnation: int) -> Session:
            return Session(
                client, incarnation, lambda: pair, self._submodels, self.inbox, self._waits, self.record.moved,
                self._experiment.server_device, self._terms, CompressionPlan.on(self.server.coordinator),
                share=self._shares[client - 1],
            )  # fmt: skip

        self.server.enter(client, session)

    def refused(self, reason: str) -> None:
        """Count a caller that was turned away."""
        self.record.turned_away(reason)


def _bears() -> int | None:
    """Count the failures alike that a client's code is allowed: one where all clients are ours, and started again; else any."""
    return 1 if NOTE in os.environ else None


def _leave_note(folder: Path) -> None:
    """Tell the supervisor of `raafl fit --local`, if there is one, where the run folder is."""
    if NOTE in os.environ:
        Path(os.environ[NOTE]).write_text(str(folder.absolute()), encoding="utf-8")
