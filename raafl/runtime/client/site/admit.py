"""Build a client for a run that its site's policy allows."""

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
    """Return the gate of a site's policy; None where there is none, or another process of this client has it.

    Of several processes of a client the first alone talks to the server, and asks the others for nothing that it refuses.

    Args:
        file: of the policy; None = everything is allowed.
        say: shows a line to the site's user.
        looks: the client does not join: neither is anybody asked, nor does it wait for the site's hours.

    Raises:
        BadInput: the policy, or what the site has kept, is wrong.
    """
    policy = None if file is None else load_policy(file)
    if policy is not None and looks:
        policy = replace(policy, consent=None, hours=None, bytes_per_day=None)
    return None if policy is None or os.environ.get("RANK", "0") != "0" else SiteGate(policy, say)


def admit(
    gate: SiteGate | None, experiment: Experiment, config_yaml: str, build: Callable[[], ClientSetup]
) -> ClientSetup:
    """Return a client's parts behind its site's gate, which is asked before anything large is made.

    Args:
        gate: of the site; None = all passes.
        experiment: the run.
        config_yaml: its config as text.
        build: makes the client's parts.

    Raises:
        PolicyRefusal: the site does not allow the run.
    """
    if gate is None:
        return build()
    digests = sections(config_yaml)
    gate.check_config(config_yaml, digests)
    if gate.policy.max_parameters is not None:
        with skeleton():  # without values: how many there would be is what is asked
            model = user_model(experiment)
        gate.check_size(sum(parameter.numel() for parameter in model.parameters()))
    setup = build()
    gate.check_parts(setup.submodels, setup.trainer, setup.data, digests)
    return replace(setup, gate=gate)
