"""Coordinate clients on other machines, which come and go (`raafl serve`).

The server listens on one TCP port; it tells nobody anything before the shared secret is proven (`raafl.transport.tcp.listener`).
Of two clients with one id the newer takes part and the older is told and ends: after a broken network the older connection
is the dead one.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raafl.commands.fit_local import NOTE
from raafl.config.experiment import Experiment
from raafl.config.shared import for_clients, sections
from raafl.errors import BadInput, parse_address
from raafl.runtime.server.host import host
from raafl.runtime.server.inbox import Inbox
from raafl.runtime.server.session import Terms
from raafl.transport import TRANSPORTS, ConnectOptions
from raafl.transport.tcp.secret_files import bind, check_run

if TYPE_CHECKING:
    from raafl.transport.tcp.handshake import Secret


def listener(address: str | socket.socket) -> str | socket.socket:
    """Return the address to listen on: ``HOST:PORT``, or for ``fd:N`` the inherited listening socket with descriptor N.

    Raises:
        BadInput: it is neither.
    """
    if isinstance(address, socket.socket):
        return address
    if not address.startswith("fd:"):
        parse_address(address)
        return address
    try:
        inherited = socket.socket(fileno=int(address[3:]))
        if not inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise OSError("the socket does not listen")
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
        inbox: where events pass through on their way to the coordinator.

    Raises:
        BadInput: the config, the address, the secret, or a folder that cannot be resumed.
    """
    experiment.check()
    if min_clients is not None and not 1 <= min_clients <= experiment.clients:
        raise BadInput(f"min_clients is {min_clients}: give 1 to {experiment.clients}, the run's number of clients")
    idle_s = experiment.waits.idle_s
    meeting = ConnectOptions(
        experiment.clients, piece_s=idle_s, address=listener(address), secret=secret, encrypt=encrypt
    )
    check_run(secret, Path(experiment.resume) if experiment.resume else None)

    def note(folder: Path) -> None:
        bind(secret, folder)
        if NOTE in os.environ:  # for the supervisor of `raafl fit --local`
            Path(os.environ[NOTE]).write_text(str(folder.absolute()), encoding="utf-8")

    # failures alike of a client's code: one where all are ours, and started again
    max_failures = 1 if NOTE in os.environ else None
    return host(
        experiment, config_yaml, TRANSPORTS["tcp"](meeting), inbox=inbox, max_failures=max_failures, min_clients=min_clients,
        terms=Terms(for_clients(config_yaml), sections(config_yaml), experiment.guard.own_data), note=note,
    )  # fmt: skip
