"""Run a server for clients on other machines, which may come and go (`raafl serve`).

The server listens on one TCP port; it tells nobody anything before a certificate is proven (`raafl.transport.tcp.listener`).
Of two clients with one id the newer takes part and the older is told and ends: after a broken network the older connection
is the dead one.
"""

from __future__ import annotations

import os
import socket
from argparse import Namespace
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raafl.commands.fit_local import NOTE
from raafl.config.experiment import Experiment
from raafl.config.shared import for_clients, sections
from raafl.core.hooks import RunHooks
from raafl.errors import BadInput, parse_address
from raafl.runfolder.seals import Signer
from raafl.runtime.server.host import OfSites, host
from raafl.runtime.server.link import Inbox
from raafl.runtime.server.session_protocol import Terms
from raafl.transport import ConnectOptions
from raafl.transport.tcp.credentials import Credentials
from raafl.transport.tcp.handover import inherited_socket
from raafl.transport.tcp.transport import TcpTransport

if TYPE_CHECKING:
    from raafl.sites.server import Sites


def listener(address: str | socket.socket) -> str | socket.socket:
    """Parse the address to listen on: ``HOST:PORT`` stays as it is; ``fd:N`` gives the inherited socket with file descriptor N.

    Raises:
        BadInput: ``address`` has another form.
    """
    if isinstance(address, socket.socket):
        return address
    if not address.startswith("fd:"):
        parse_address(address)
        return address
    try:
        return inherited_socket(int(address[3:]))
    except (ValueError, OSError) as error:
        raise BadInput(
            f"address is '{address}': {error}: give HOST:PORT, or fd:N for an inherited listening socket"
        ) from None


def submitted_config(file: Path, *, trusted: bool) -> str:
    """Read a config that somebody else has submitted to a server for many runs, and check it.

    `trusted`: whether it may name any class; it never says where results go.

    Raises:
        BadInput: it says where results go, or names classes that are not part of raafl, or is no config.
    """
    from raafl.config.trust import of_text
    from raafl.sites.certificates import read

    return of_text(read(file).decode(errors="replace"), f"run '{file.stem}'", trusted=trusted)


def allow_list(own: Namespace, credentials: Credentials) -> Sites | None:
    """Read which client ids each site (organization with a TLS certificate) may use; None if a token replaces certificates.

    Raises:
        BadInput: the list is missing or invalid.
    """
    if not credentials.certified:
        return None
    from raafl.sites.certificates import Revocations
    from raafl.sites.credentials import TlsFiles
    from raafl.sites.server import Sites

    assert isinstance(credentials, TlsFiles)
    folder = Path(own.certs)
    sites = Path(own.sites) if own.sites is not None else folder / "sites.yaml"
    revoked = credentials.crl or folder / "revoked.crl"
    return Sites(sites, Revocations(revoked, credentials.ca).read, (revoked, credentials.ca))


def serve(
    experiment: Experiment,
    config_yaml: str,
    address: str | socket.socket,
    credentials: Credentials,
    *,
    sites: Sites | None = None,
    min_clients: int | None = None,
    inbox: Inbox | None = None,
    observer: RunHooks | None = None,
) -> tuple[dict[str, Any], Path]:
    """Run a server for clients that come and go; return the summary and the run folder.

    `sites`: list of sites and the client ids that each may use; None = any client id.
    `min_clients`: number of clients that must have joined before the run starts or restarts; None = as many as a
    resumed run had needed, or all.
    `inbox`: queue for events of the clients; None = a new one.
    `observer`: observer called during the run; None = none.

    Raises:
        BadInput: the config, the address or the credentials are invalid, or the folder cannot be resumed.
    """
    experiment.check()
    if min_clients is not None and not 1 <= min_clients <= experiment.clients:
        raise BadInput(f"min_clients is {min_clients}: give 1 to {experiment.clients}, the run's number of clients")
    idle_s = experiment.waits.idle_s
    meeting = ConnectOptions(
        experiment.clients,
        piece_s=idle_s,
        address=listener(address),
        credentials=credentials,
        authorize=(lambda peer: None) if sites is None else sites.authorize,
    )

    signer = Signer.choose(credentials.key)
    terms = Terms(
        for_clients(config_yaml),
        sections(config_yaml),
        experiment.guard.own_data,
        signer=signer,
        max_below=experiment.guard.max_below or 0,
    )

    sessions: OfSites | None = None
    if credentials.certified:
        from raafl.sites.server import site_sessions

        sessions = site_sessions if sites is None else partial(site_sessions, rules=sites.rules)

    def note(folder: Path) -> None:
        if NOTE in os.environ:  # set by `raafl fit --local`, whose supervisor restarts the server with the run folder
            Path(os.environ[NOTE]).write_text(str(folder.absolute()), encoding="utf-8")

    # number of equal failures of one client that ends the run: 1 under `fit --local`, which restarts its own clients
    max_failures = 1 if NOTE in os.environ else None
    transport = TcpTransport(meeting)
    with nullcontext() if sites is None else sites.watch(transport.recheck):
        return host(
            experiment,
            config_yaml,
            transport,
            inbox=inbox,
            max_failures=max_failures,
            min_clients=min_clients,
            terms=terms,
            note=note,
            sessions=sessions,
            observer=observer,
        )
