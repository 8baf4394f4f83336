"""Run the server of an experiment: from its config to a finished run folder, over any transport."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from raafl.compression.plan import CompressionPlan
from raafl.config.experiment import Experiment
from raafl.core.algorithm import Trigger
from raafl.core.hooks import HookList, RunHooks
from raafl.errors import BadInput
from raafl.parts.trigger import AllReported
from raafl.runtime.extensions import extensions_of
from raafl.runtime.lifecycle.service_manager import ServiceManager
from raafl.runtime.protocol import Reason
from raafl.runtime.run import NO_SERVER_ABOVE, Run, opened
from raafl.runtime.server.link import Inbox
from raafl.runtime.server.session import Session, ThreadSession
from raafl.runtime.server.session_loop import LoopSession
from raafl.runtime.server.session_protocol import SessionExtension, SessionProtocol, SessionSetup, Terms
from raafl.runtime.server.wall_clock import Server
from raafl.runtime.setup import build
from raafl.submodel.tensor_files import PayloadRoom
from raafl.transport import (
    Admit,
    Connection,
    Kind,
    Message,
    Refused,
    Transport,
)
from raafl.transport.tcp.connection import TcpConnection
from raafl.transport.tcp.loop import SocketLoop
from raafl.units import duration

OfSites = Callable[[Run], AbstractContextManager[Callable[[SessionProtocol], SessionExtension]]]
"""Opens, for a run whose clients belong to others, what makes the extension of each session with one of them."""

_AT_ONCE_S = 0.01
_GREET_S = 30.0  # seconds until a client's HELLO; more for one that first asks for the config
_OBJECTS_A_CLIENT = 10  # objects made beyond those freed, for each client, after which garbage is collected


def host(
    experiment: Experiment,
    config_yaml: str,
    transport: Transport,
    *,
    inbox: Inbox | None = None,
    max_failures: int | None = 0,
    terms: Terms | None = None,
    min_clients: int | None = None,
    sessions: OfSites | None = None,
    note: Callable[[Path], None] = lambda folder: None,
    observer: RunHooks | None = None,
    starting: RunHooks | None = None,
) -> tuple[dict[str, Any], Path]:
    """Run the server for the clients that a transport connects; return the summary and the run folder.

    `inbox`: queue through which events pass; None = a new one.
    `max_failures`: number of equal failures of clients' code after which the run ends, see `Server`; None = failures
    never end the run.
    `terms`: settings on which clients must agree with the server; None = no such settings.
    `sessions`: opens what sessions with clients of other sites have in addition; None = nothing.
    `min_clients`: number of clients with which the run starts; None = all, or for a resumed run as many as it began
    with.
    `observer`: observer called during the run; None = none.
    `starting`: further observer, which may end the run while clients start; None = none.
    """
    inbox = inbox or Inbox()
    if experiment.subfederation.is_on and observer is None:
        raise BadInput(NO_SERVER_ABOVE)
    if (size := experiment.subfederations.size) is not None:
        raise BadInput(
            f"subfederations.size is {size}, but clients are real here: leave it out, and let each subfederation join by "
            "`raafl join --subfederation FILE`"
        )
    with (
        transport,
        _seldom_collecting(experiment.clients),
        # opened after the port is bound, since binding fails if the port is in use
        opened(experiment, "distributed") as saved,
        ExitStack() as stack,
    ):
        if transport.comes_and_goes:
            before = None if saved is None else saved.section["coordinator"]["min_clients"]
            min_clients = _at_start(experiment, min_clients or before or experiment.clients, is_new=saved is None)
        parts = build(
            experiment,
            pace=experiment.emulate and experiment.devices is not None,
            min_clients=min_clients,
            count_lost=not transport.comes_and_goes,
        )
        signer = None if terms is None else terms.signer
        run = Run(parts, config_yaml, "distributed", saved, observer, signer, lambda: inbox.num_waiting)
        stack.callback(run.close)
        if max_failures is None:
            _serve_others(run)
        note(run.folder)
        service = ServiceManager.here()
        server = Server(
            parts.coordinator,
            inbox,
            run.record,
            run.evaluator,
            waits=experiment.waits,
            hooks=HookList(run.hooks, service, starting or RunHooks()),
            progress=run.progress,
            announce=transport.announce,
            max_failures=max_failures,
            patience_s=experiment.waits.alone_s if transport.comes_and_goes else None,
            storage=_storage(experiment, run.folder) if transport.comes_and_goes else None,
        )
        setup = _session_setup(run, server, terms)
        if sessions is not None:
            setup = replace(setup, extensions=[*setup.extensions, stack.enter_context(sessions(run))])
        stack.callback(server.close)  # first of all, since its sessions use the others
        transport.listen(
            _admit(run, server, setup, transport.loop), run.record.turned_away, parts.coordinator.state.values.device
        )
        _note_transport(run, transport)
        if saved is not None:
            saved.restore_clock(server.restore)
        run.start()
        service.ready(f"{experiment.name}: listening at {transport.address}; run folder {run.folder}")
        reason = server.run()
        service.stopping()
        return run.finish(reason, server.now, server.error), run.folder


def _at_start(experiment: Experiment, wanted: int, *, is_new: bool) -> int:
    """Return the number of clients with which a run starts: ``wanted``, or as many as a sum of masked updates needs.

    Raises `BadInput` if the second are more and the run is new; one that a supervisor restarts wants one client.
    """
    if not experiment.secure_aggregation.is_on:
        return wanted
    from raafl.parts.protect.secure.merge import smallest_group

    least = smallest_group(experiment.secure_aggregation)
    if is_new and wanted < least:
        raise BadInput(
            f"min_clients is {wanted}, but secure_aggregation sums the updates of {least} clients or more: give {least} to "
            f"{experiment.clients}"
        )
    return max(wanted, least)


@contextmanager
def _seldom_collecting(num_clients: int) -> Iterator[None]:
    """Collect garbage the less often the more clients there are, within the ``with`` block.

    Python collects after 700 objects more than were freed. Each update of ten thousand clients leaves objects that live until
    the client's next one, so that Python would scan the objects of all sessions again and again.
    """
    youngest, *older = gc.get_threshold()
    gc.set_threshold(max(youngest, _OBJECTS_A_CLIENT * num_clients) if youngest else 0, *older)  # 0 = collection is off
    try:
        yield
    finally:
        gc.set_threshold(youngest, *older)


def _serve_others(run: Run) -> None:
    """Prepare the output of a server for clients on other machines: time stamps, and a note on what may delay merges."""
    run.progress.stamped = True
    if (line := waits_note(run.parts.experiment, run.parts.coordinator.algorithm.trigger)) is not None:
        run.progress.note(line)


def waits_note(experiment: Experiment, trigger: Trigger) -> str | None:
    """Return a line about a merge that a single silent client holds up, and what ends the wait; None if none does."""
    if not trigger.waits_for_all:
        return None
    earlier = "set rounds.deadline, such as 10 (times the median time)" if isinstance(trigger, AllReported) else ""
    return (
        "a client that takes a task and never answers holds up each merge for waits.task_s, "
        f"{duration(experiment.waits.task_s)}: {earlier or 'lower it, or the share of clients that must report'}"
    )


def _note_transport(run: Run, transport: Transport) -> None:
    """Show the server's address, and the extensions' notes on a transport without certificates."""
    if transport.address:
        run.progress.note(f"listening at {transport.address}")
    for one in extensions_of(run.parts.coordinator, "loop"):
        for line in one.notes(certified=transport.certified):
            run.progress.note(line)


def _storage(experiment: Experiment, folder: Path) -> PayloadRoom:
    """Return the allocator of payloads, which puts large ones into files of the run folder."""
    most_bytes = experiment.payload_memory_bytes
    # without it (macOS) a full disk would kill the server when it writes to a mapped file
    if most_bytes is None or not hasattr(os, "posix_fallocate"):
        return PayloadRoom()
    return PayloadRoom(str(folder), most_bytes, experiment.payload_memory_total_bytes)


def _session_setup(run: Run, server: Server, terms: Terms | None) -> SessionSetup:
    coordinator, waits = run.parts.coordinator, run.parts.experiment.waits
    return SessionSetup(
        run.parts.submodels,
        waits if terms is None else replace(waits, join_s=_GREET_S),
        run.record.moved,
        coordinator.state.values.device,
        replace(terms or Terms(), storage=server.storage),
        CompressionPlan.on(coordinator),
        coordinator.algorithm.local,
        extensions_of(coordinator, "session"),
    )


def _admit(run: Run, server: Server, setup: SessionSetup, loop: SocketLoop | None) -> Admit:
    """Return the function that starts a session for each admitted client, on the thread of ``loop`` or (None) its own."""
    clients, num_clients = run.parts.clients, run.parts.experiment.clients

    def admit(client: int, peer: str, connect: Callable[[], Connection]) -> None:
        if not 1 <= client <= num_clients:
            problem = f"client is {client}: this run has clients 1 to {num_clients}"
            # the message fits into the socket's buffer, so that this thread does not wait for the client
            connect().send(Message(Kind.STOP, meta=Reason(f"refused: {problem}").to_meta()), _AT_ONCE_S)
            raise Refused("unknown-client", problem)
        known = clients[client - 1]

        def make(incarnation: int) -> Session:
            if loop is None:
                return ThreadSession(client, incarnation, connect, setup, server.inbox, known)
            pair = connect()
            assert isinstance(pair, TcpConnection)
            return LoopSession(loop, client, incarnation, pair, setup, server.inbox, known)

        try:
            server.enter(client, make)
        except Refused as refused:
            # the run is over, which a client that comes back would not learn later
            if refused.reason == "stopped" and refused.detail:
                connect().send(Message(Kind.STOP, meta=Reason(refused.detail).to_meta()), _AT_ONCE_S)
            raise

    return admit
