"""Build a client for a run, if the policy of its site allows the run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from raafl.config.experiment import Experiment
from raafl.config.shared import sections
from raafl.config.site_policy import load_policy
from raafl.runtime.client.setup import ClientSetup
from raafl.runtime.client.site.gate import SiteGate
from raafl.runtime.setup import user_model
from raafl.submodel import skeleton


def open_gate(file: str | None, say: Callable[[str], None], *, looks: bool = False) -> SiteGate | None:
    """Return the gate that checks tasks against the policy of the site; None if there is no policy.

    If a client has several processes, only the first has a gate, since only it talks to the server.

    `file`: path of the policy; None = no policy.

    Raises:
        BadInput: the policy, or the site's stored state, is invalid.
    """
    policy = None if file is None else load_policy(file)
    if policy is not None and looks:
        policy = replace(policy, consent=None, hours=None, bytes_per_day=None)
    return None if policy is None or os.environ.get("RANK", "0") != "0" else SiteGate(policy, say)


def admit(
    gate: SiteGate | None, experiment: Experiment, config_yaml: str, build: Callable[[], ClientSetup]
) -> ClientSetup:
    """Build a client, unless the policy of its site refuses the run, and attach the gate that checks its tasks.

    The config is checked before the model is built, and the model and the data are checked afterwards.

    `gate`: gate of the site; None = no policy.

    Raises:
        PolicyRefusal: the site does not allow the run.
    """
    if gate is None:
        return build()
    digests = sections(config_yaml)
    gate.check_config(config_yaml, digests)
    if gate.policy.max_parameters is not None:
        with skeleton():  # built without values, since this only asks how many there would be
            model = user_model(experiment)
        gate.check_size(sum(parameter.numel() for parameter in model.parameters()))
    setup = build()
    gate.check_parts(setup.submodels, setup.trainer, setup.data, digests)
    return replace(setup, gate=gate)
