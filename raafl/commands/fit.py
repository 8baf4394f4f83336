"""`raafl fit`: a run on real ranks; and the server's end of any run on the wall clock, whatever transport brings its clients."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from raafl.commands.run import Run
from raafl.compression.plan import CompressionPlan
from raafl.config.experiment import Experiment
from raafl.core.hooks import Watcher
from raafl.devices.gpus import Place
from raafl.errors import GpuLost, RunFailed
from raafl.runtime import resume
from raafl.runtime.client_setup import ClientSetup
from raafl.runtime.distributed import Server
from raafl.runtime.inbox import Inbox
from raafl.runtime.session import Session, Terms
from raafl.runtime.setup import build
from raafl.transport import (
    TRANSPORTS,
    Admit,
    Kind,
    Meeting,
    Message,
    Pair,
    PeerLost,
    PeerTimeout,
    Refused,
    Transport,
)
from raafl.watch.progress import Progress

_GREET_S = 30.0  # for a client that has called to greet; it may have to load its data first


def fit(
    experiment: Experiment, config_yaml: str = "", watcher: Watcher | None = None
) -> tuple[dict[str, Any], Path] | None:
    """Run on real ranks under torchrun; rank 0 returns the summary and the run folder, a client None."""
    if "WORLD_SIZE" not in os.environ or os.environ.get("RANK", "0") == "0":  # before the others are kept waiting
        experiment = resume.after_restart(experiment)
        experiment.check()
    join_s = experiment.waits.join_s
    transport = TRANSPORTS["ranks"](Meeting(experiment.clients, join_s, join_s, nccl=experiment.transport == "nccl"))
    if transport.client == 0:
        return host(experiment, config_yaml, transport, bears=0, watcher=watcher, note=resume.leave_note)
    take_part(experiment, transport)
    return None


def host(
    experiment: Experiment, config_yaml: str, transport: Transport, *,
    inbox: Inbox | None = None, bears: int | None = 0, terms: Terms | None = None, min_clients: int | None = None,
    note: Callable[[Path], None] = lambda folder: None, watcher: Watcher | None = None,
) -> tuple[dict[str, Any], Path]:  # fmt: skip
    """Coordinate the clients that a transport brings; return the summary and the run folder.

    ``transport`` is this end of it, not entered yet; events pass through ``inbox``; ``bears`` is how many failures
    alike of a client's code end no run (see `Server`); ``min_clients`` None = all that are to be there, or as many as
    the run to resume began with; ``note`` is told the run folder before any client is let in, and may raise `BadInput`.
    """
    with transport:
        saved = resume.load(Path(experiment.resume), "distributed") if experiment.resume else None
        if transport.comes_and_goes:
            before = None if saved is None else saved.section["coordinator"].get("min_clients")
            min_clients = min_clients or before or experiment.clients
        parts = build(
            experiment, pace=experiment.emulate and experiment.devices is not None, min_clients=min_clients,
            count_lost=not transport.comes_and_goes,
        )  # fmt: skip
        run = Run(parts, config_yaml, "distributed", saved, watcher)
        run.progress.stamped = bears is None  # clients of others come and go: the server's output is a log
        note(run.folder)
        server = Server(
            parts.coordinator, inbox or Inbox(), run.record, run.evaluator, waits=experiment.waits, hooks=run.hooks,
            progress=run.progress, announce=transport.announce, bears=bears,
            patience_s=experiment.waits.alone_s if transport.comes_and_goes else None,
        )  # fmt: skip
        transport.listen(_admit(run, server, terms), run.record.turned_away, parts.coordinator.state.values.device)
        if transport.address:
            run.progress.note(f"listening at {transport.address}")
        try:
            if saved is not None:
                with resume.restoring(saved):
                    server.restore(saved.section["clock"])
            run.start()
            reason = server.run()
            return run.finish(reason, server.now, server.error), run.folder
        finally:
            server.close()
            run.close()


def _admit(run: Run, server: Server, terms: Terms | None) -> Admit:
    """Make what gives each client that a transport lets in a session of the server."""
    parts, plan = run.parts, CompressionPlan.on(run.parts.coordinator)
    experiment, waits = parts.experiment, parts.experiment.waits
    waits = waits if terms is None else replace(waits, join_s=_GREET_S)

    def admit(client: int, peer: str, connect: Callable[[], Pair]) -> None:
        if not 1 <= client <= experiment.clients:
            problem = f"client is {client}: this run has clients 1 to {experiment.clients}"
            connect().send(Message(Kind.STOP, meta={"reason": f"refused: {problem}"}))
            raise Refused("unknown-client", problem)
        known = parts.clients[client - 1]
        server.enter(client, lambda incarnation: Session(
            client, incarnation, connect, parts.submodels, server.inbox, waits, run.record.moved,
            parts.coordinator.state.values.device, terms, plan, known, parts.coordinator.algorithm.local,
        ))  # fmt: skip

    return admit


def take_part(experiment: Experiment, transport: Transport) -> None:
    """Work as the client whose end of the transport this is, until told to stop; it connects once."""
    place = Place.here(experiment.server_device, experiment.fabric.device)
    setup = ClientSetup.make(experiment, transport.client, place)
    client = setup.info.id
    for note in setup.notes:
        Progress("plain", sys.stderr).note(f"raafl, client {client}: {note}")
    try:
        with transport.connect(setup.trainer.fabric.device) as pair:
            reason = setup.client(pair).run()
    except GpuLost as lost:  # no exit code that tells it: torchrun would end the others
        Progress("plain", sys.stderr).note(f"raafl: {lost}; the others go on")
        return
    except (PeerLost, PeerTimeout, Refused) as error:
        reason = transport.let_go() or f"failed: the server is gone: {error}"
    if reason.startswith(("refused", "failed")):
        raise RunFailed(f"client {client}: {reason}")
