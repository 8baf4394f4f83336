"""Run an experiment on the ranks that torchrun started: rank 0 is the server, each other rank is a client."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from raafl.config.experiment import Experiment
from raafl.core.hooks import RunHooks
from raafl.devices.gpus import Place
from raafl.errors import GpuLost, RunFailed
from raafl.runtime.client.setup import ClientSetup
from raafl.runtime.lifecycle import resume
from raafl.runtime.server.host import host
from raafl.transport import TRANSPORTS, ConnectOptions, PeerLost, PeerTimeout, Refused, Transport

_log = logging.getLogger(__name__)


def fit(
    experiment: Experiment, config_yaml: str = "", observer: RunHooks | None = None, starting: RunHooks | None = None
) -> tuple[dict[str, Any], Path] | None:
    """Run an experiment under torchrun; return the summary and the run folder on rank 0, and None on a client.

    Args:
        experiment: settings of the run.
        config_yaml: config of the run as text, to be stored in the run folder.
        observer: observer called during the run; None = none.
        starting: observer that ends the run if a client's process ends before the client has joined; None = none.
    """
    # check first, so that errors come before the other processes wait for this one
    if "WORLD_SIZE" not in os.environ or os.environ.get("RANK", "0") == "0":
        experiment = resume.after_restart(experiment)
        experiment.check()
    join_s = experiment.waits.join_s
    transport = TRANSPORTS["ranks"](
        ConnectOptions(experiment.clients, join_s, join_s, nccl=experiment.transport == "nccl")
    )
    if transport.client == 0:
        return host(
            experiment,
            config_yaml,
            transport,
            max_failures=0,
            observer=observer,
            starting=starting,
            note=resume.leave_note,
        )
    take_part(experiment, transport)
    return None


def take_part(experiment: Experiment, transport: Transport) -> None:
    """Work as a client until the server ends the run; if the connection breaks, the client does not connect again.

    Raises:
        RunFailed: the server refused the client, or the connection was lost.
    """
    place = Place.here(experiment.server_device, experiment.fabric.device)
    setup = ClientSetup.make(experiment, transport.client, place)
    client = setup.info.id
    for note in setup.notes:
        _log.info(f"client {client}: {note}", extra={"prefix": "raafl, "})
    try:
        with transport.connect(setup.trainer.fabric.device) as pair:
            reason = setup.client(pair).run()
    except GpuLost as lost:  # after an exit code, torchrun would end the other processes
        _log.warning(f"{lost}; the others go on")
        return
    except (PeerLost, PeerTimeout, Refused) as error:
        reason = transport.let_go() or f"failed: the connection to the server broke: {error}"
    if reason.startswith(("refused", "failed")):
        raise RunFailed(f"client {client}: {reason}")
