"""Build a client for a run, if the policy of its site allows the run; describe the run to a site that only looks at it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import yaml

from raafl.config.experiment import Experiment
from raafl.config.shared import sections
from raafl.local.client_group import num_processes
from raafl.runtime.client.setup import ClientSetup
from raafl.runtime.protocol import DRY_RUN
from raafl.runtime.setup import user_model
from raafl.sanitize import sanitize_text
from raafl.sites.gate import PolicyRefusal, SiteGate, model_digest
from raafl.sites.policy import load_policy
from raafl.submodel import skeleton
from raafl.units import quantity, size


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
    # a stray RANK in the environment of a single process must not switch its policy off
    is_follower = num_processes() > 1 and os.environ["RANK"] != "0"
    return None if policy is None or is_follower else SiteGate(policy, say)


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
        with skeleton():  # parameters without storage: only their number is needed
            model = user_model(experiment)
        gate.check_size(sum(parameter.numel() for parameter in model.parameters()))
    setup = build()
    gate.check_parts(setup.submodels, setup.trainer, setup.data, digests)
    return replace(setup, gate=gate)


class DryRun(PolicyRefusal):
    """Raised at the end of a dry run, in which a client looks at a run without joining it."""

    server_reason = DRY_RUN

    def __init__(self) -> None:
        super().__init__("this run: it only looks")


def look(make: Callable[[], ClientSetup], config_yaml: str, say: Callable[[str], None]) -> NoReturn:
    """Print what a client would do in a run, or why its site refuses the run; then raise `DryRun`."""
    for line in _sections(config_yaml):
        say(line)
    try:
        for line in offer(make(), config_yaml):
            say(line)
    except PolicyRefusal as refusal:
        say(str(refusal))
    raise DryRun


def _sections(config_yaml: str) -> list[str]:
    """Describe a config's model, data and algorithm sections for a site's owner, one line each, without importing their classes."""
    config, digests = yaml.safe_load(config_yaml) or {}, sections(config_yaml)
    lines = [f"model: {_section(config.get('model'))}"]
    return lines + [f"{kind}: {_section(config.get(kind))}, digest {digests[kind]}" for kind in ("data", "algorithm")]


def offer(setup: ClientSetup, config_yaml: str) -> list[str]:
    """Describe a run's tasks at this client, and the data that it would send, one line each."""
    trainer, submodels, data, experiment = setup.trainer, setup.submodels, setup.data, setup.experiment
    batch = trainer.training.batch_size or data.batch_size or 1
    epochs, steps = trainer.training.num_epochs, trainer.training.num_steps
    length = quantity(epochs or 1, "epoch") if steps is None else f"{steps} {'batch' if steps == 1 else 'batches'}"
    compress, local = experiment.compress, trainer.local
    lines = [
        f"the model has {sum(submodels.parameters.values()):,} parameters, digest {model_digest(submodels, sections(config_yaml))}",
        f"a task: {length} of {batch}, unless the server says otherwise, on {quantity(data.num_samples, 'sample')}",
        f"it comes with at most {size(trainer.payload.layout().num_bytes)} (compressed: {compress.down})",
        f"its answer has at most {size(trainer.payload.layout(way='trained').num_bytes)} (compressed: {compress.up}), what the "
        f"module logs, and the number of samples and steps",
        f"on joining, the server learns the number of samples and the device: {sanitize_text(setup.info.profile.name)}",
    ]
    if local.exchange(submodels) is not None:
        lines.append("during a task activations are sent to the server, and gradients come back")
    if data.test is not None:
        lines.append(
            f"the trained model is measured on {quantity(data.test.num_samples, 'sample')} of the client's, and the means are sent"
        )
    return lines


def _section(section: Any) -> str:
    """Format a config section as one line: its class_path and init_args."""
    if not isinstance(section, dict):
        return sanitize_text(section)
    arguments = ", ".join(f"{name}={value}" for name, value in (section.get("init_args") or {}).items())
    return sanitize_text(f"{section.get('class_path')}({arguments})", 500)
