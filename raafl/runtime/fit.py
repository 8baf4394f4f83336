"""Run an experiment on the ranks that torchrun started: rank 0 hosts, each other rank takes part as a client."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from raafl.config.experiment import Experiment
from raafl.core.hooks import RunHooks
from raafl.runtime.client.take_part import take_part
from raafl.runtime.lifecycle import resume
from raafl.runtime.server.host import host
from raafl.transport import (
    TRANSPORTS,
    ConnectOptions,
)


def fit(
    experiment: Experiment, config_yaml: str = "", observer: RunHooks | None = None
) -> tuple[dict[str, Any], Path] | None:
    """Run an experiment under torchrun; return summary and run folder on rank 0, None on a client.

    Args:
        experiment: the run.
        config_yaml: its config as text, for the run folder.
        observer: called during the run; None = nobody.
    """
    if "WORLD_SIZE" not in os.environ or os.environ.get("RANK", "0") == "0":  # before the others are kept waiting
        experiment = resume.after_restart(experiment)
        experiment.check()
    join_s = experiment.waits.join_s
    transport = TRANSPORTS["ranks"](
        ConnectOptions(experiment.clients, join_s, join_s, nccl=experiment.transport == "nccl")
    )
    if transport.client == 0:
        return host(experiment, config_yaml, transport, max_failures=0, observer=observer, note=resume.leave_note)
    take_part(experiment, transport)
    return None
