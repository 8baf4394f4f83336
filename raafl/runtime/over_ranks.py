"""Run an experiment on the ranks that torchrun started: with real clients, or on the virtual clock.

Of real clients rank 0 is the server, and each other rank is one; in a simulation rank 0 has the clock, and every rank trains.
"""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

from raafl.config.experiment import Experiment
from raafl.core.hooks import RunHooks
from raafl.devices.gpus import Place
from raafl.errors import BadInput, GpuLost, RunFailed
from raafl.local.evaluate import Evaluator
from raafl.local.numerics import set_numerics
from raafl.local.train import MAX_BUILT
from raafl.runtime.executors.rank_worker import work
from raafl.runtime.lifecycle import resume
from raafl.runtime.run import simulate
from raafl.runtime.setup import client_parts, evaluation_seed, load_data, within_process
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
        from raafl.runtime.server.host import host

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
    from raafl.runtime.client.setup import ClientSetup

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


def simulate_over_ranks(experiment: Experiment, config_yaml: str = "") -> tuple[dict[str, Any], Path] | None:
    """Simulate a run on the ranks that torchrun started; return summary and run folder on rank 0, None on the others."""
    num_ranks, wait_s = int(os.environ["WORLD_SIZE"]), experiment.waits.join_s
    if experiment.workers > 1:
        raise BadInput(
            f"workers is {experiment.workers}, but the run has {num_ranks} ranks that train already: give --workers 1"
        )
    if experiment.engine.name == "ray":
        raise BadInput(
            f"engine.name is 'ray', but the run has {num_ranks} ranks that train already: start it without torchrun"
        )
    if experiment.batch_clients == "fast":
        raise BadInput(
            f"batch_clients is fast, which is for one process, but the run has {num_ranks} ranks: start it without torchrun, or "
            "give auto"
        )
    transport = TRANSPORTS["ranks"](ConnectOptions(num_ranks - 1, wait_s, wait_s, nccl=experiment.transport == "nccl"))
    if transport.client == 0:
        with transport:
            return simulate(experiment, config_yaml, transport=transport)
    train(experiment, transport)
    return None


def train(experiment: Experiment, transport: Transport) -> None:
    """Train the tasks that rank 0 sends, until the run ends."""
    # all ranks get these signals, and rank 0 ends the run, and with it this process
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    set_numerics(experiment.threads, experiment.fabric)
    data = load_data(experiment)
    options, num_built = experiment.fabric.on(Place.here(None).gpu), min(MAX_BUILT, 2 * experiment.clients)
    submodels, trainer = client_parts(experiment, data, options, num_built)
    device, seed = trainer.fabric.device, evaluation_seed(experiment)
    try:
        with transport.connect(device) as pair:
            inner = within_process(experiment, trainer, data.client)
            work(pair, trainer, inner, lambda: Evaluator(submodels, data.test_batches, device, seed=seed))
    except GpuLost as lost:  # after an exit code, torchrun would end the others
        _log.warning(f"{lost}; the others go on")
    except (PeerLost, PeerTimeout, Refused) as error:
        raise RunFailed(f"rank 0 has ended or cannot be reached ({error}): see the output of rank 0") from None
