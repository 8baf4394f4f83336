"""Make a site's gate in front of a model with one weight and ten samples."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import torch
import yaml
from torch.utils.data import TensorDataset

from raafl.core.algorithm import Algorithm, Training
from raafl.core.types import Assignment, Update
from raafl.data.federated import ClientData
from raafl.local.train import LocalTrainer
from raafl.sites.gate import SiteGate
from raafl.sites.policy import SitePolicy
from raafl.submodel import FULL, FlatTensors, Submodels
from tests.helpers.single_task import Slope

DIGESTS = {"model": "0" * 16, "data": "d" * 16, "algorithm": "a" * 16}
CONFIG = {
    "model": {"class_path": "model_zoo.MLP", "init_args": {"in_features": 64}},
    "data": {"class_path": "raafl.data.Digits"},
    "algorithm": {"class_path": "raafl.fed_avg"},
}
NOON = datetime(2026, 11, 26, 12)  # a Thursday


class Clock:
    """Clock that only advances when somebody sleeps."""

    def __init__(self, at: datetime = NOON) -> None:
        self.at, self.slept = at, 0.0

    def now(self) -> datetime:
        """Return the time."""
        return self.at

    def sleep(self, seconds: float) -> None:
        """Advance the clock."""
        self.slept += seconds
        self.at = datetime.fromtimestamp(self.at.timestamp() + seconds)


def site_gate(
    algorithm: Algorithm,
    clock: Clock | None = None,
    module: Any = None,
    say: Callable[[str], None] = lambda text: None,
    **policy: Any,
) -> SiteGate:
    """Return the gate of a client with ten samples in batches of two, after its checks of a run.

    `clock`: the site's clock; None = one that stands at noon. `module`: the model; None = one weight. `say`: called
    with lines for the site's user. `policy`: fields of the site's policy.
    """
    clock = clock or Clock()
    gate = SiteGate(SitePolicy(**policy), say, clock.now, clock.sleep)
    submodels = Submodels(module or Slope(), (torch.ones(1, 1), torch.zeros(1, 1)))
    trainer = LocalTrainer(submodels, algorithm.local, algorithm.merge.sends, Training(num_steps=3, num_epochs=None))
    data = ClientData(TensorDataset(torch.ones(10, 1), torch.ones(10, 1)), torch.arange(10), batch_size=2)
    gate.check_config(yaml.safe_dump(CONFIG), DIGESTS)
    gate.check_parts(submodels, trainer, data, DIGESTS)
    return gate


def task(**fields: Any) -> Assignment:
    """Return an assignment of the whole model."""
    values = {"id": 1, "client": 1, "incarnation": 0, "task": 0, "version": 0, "spec": FULL, "region": 0}
    return Assignment(**{**values, "num_epochs": None, "num_steps": None, "seed": 5, "assigned_s": 0.0, **fields})


def answer(value: float = 1.0, num_steps: int = 3, **fields: Any) -> Update:
    """Return an update for `task`; ``fields``: fields of the update that differ."""
    tensors = FlatTensors.from_named({"line.weight": torch.full((1, 1), value)})
    return Update(1, 1, 0, tensors, 10, num_steps, **fields)
