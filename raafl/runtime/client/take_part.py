"""Work as one client of a run under torchrun, until told to stop."""

from __future__ import annotations

import logging

from raafl.config.experiment import Experiment
from raafl.devices.gpus import Place
from raafl.errors import GpuLost, RunFailed
from raafl.runtime.client.setup import ClientSetup
from raafl.transport import (
    PeerLost,
    PeerTimeout,
    Refused,
    Transport,
)

_log = logging.getLogger(__name__)


def take_part(experiment: Experiment, transport: Transport) -> None:
    """Work as the client of this transport until dismissed; it connects once.

    Raises:
        RunFailed: the server refused the client, or is gone.
    """
    place = Place.here(experiment.server_device, experiment.fabric.device)
    setup = ClientSetup.make(experiment, transport.client, place)
    client = setup.info.id
    for note in setup.notes:
        _log.info(f"client {client}: {note}", extra={"prefix": "raafl, "})
    try:
        with transport.connect(setup.trainer.fabric.device) as pair:
            reason = setup.client(pair).run()
    except GpuLost as lost:  # no exit code that tells it: torchrun would end the others
        _log.warning(f"{lost}; the others go on")
        return
    except (PeerLost, PeerTimeout, Refused) as error:
        reason = transport.let_go() or f"failed: the server is gone: {error}"
    if reason.startswith(("refused", "failed")):
        raise RunFailed(f"client {client}: {reason}")
