"""Give callbacks read access to a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raafl.local.preparation.modes import in_eval_mode
from raafl.submodel.cut.copying import copy_structure

if TYPE_CHECKING:
    from torch import nn

    from raafl.config.experiment import Experiment
    from raafl.runtime.run import Run


@dataclass(frozen=True, slots=True)
class MergedUpdate:
    """An update that was merged, as described to callbacks."""

    client: int  # id of the client, 1 to N
    version: int  # version of the global model that was made with the update
    staleness: int  # number of versions made between the task's start and its merge
    spec: str  # description of the submodel that was trained
    num_samples: int  # number of training samples of the client
    num_steps: int  # number of optimizer steps of the task
    train_s: float  # seconds from the task's assignment to the update's arrival
    bytes_down: int  # number of bytes sent to the client
    bytes_up: int  # number of bytes received from the client
    # metrics from the client: loss, values logged by training_step, and test/... measured on its own test data
    metrics: Mapping[str, float]


class RunView:
    """A run, as presented to callbacks.

    `experiment`: settings of the run; do not change them.
    `version`: version of the global model; in `on_evaluate` that of the evaluated model, which may be an earlier one.
    `time_s`: seconds since the run began, virtual or real; in `on_evaluate` the time of the evaluated version.
    `metrics`: metrics of the last evaluation, with those that callbacks added.
    `resumed`: whether the run continues an earlier one.
    `should_stop`: whether somebody has requested the end of the run.
    """

    def __init__(self, run: Run, unwrap: Callable[[nn.Module], nn.Module], ask: Callable[[str], None]) -> None:
        """Wrap ``run``; ``unwrap`` returns the user's module from raafl's, ``ask`` requests the end with a reason."""
        self._run, self._unwrap, self._ask = run, unwrap, ask
        self.experiment: Experiment = run.parts.experiment
        self.version, self.time_s = run.parts.coordinator.state.version, 0.0
        self.metrics: dict[str, float] = {}
        self.resumed = self.should_stop = False

    @property
    def folder(self) -> Path:
        """Folder of the run; None until the first evaluation is recorded."""
        return self._run.folder

    @property
    def num_updates(self) -> int:
        """Number of updates merged so far."""
        return self._run.parts.coordinator.merged

    @property
    def num_clients(self) -> int:
        """Number of connected clients."""
        return len(self._run.parts.coordinator.roster.clients)

    def module(self) -> nn.Module:
        """Return a copy of the model with the present global values, in eval mode."""
        return in_eval_mode(self._unwrap(current_module(self._run, anew=True)))

    def stop(self, reason: str = "asked to") -> None:
        """End the run early, after the present event, and record ``reason`` in its summary."""
        self._ask(reason)

    def note(self, text: str) -> None:
        """Print a line of text in the display of the run's progress."""
        self._run.progress.note(text)


def current_module(run: Run, *, anew: bool) -> nn.Module:
    """Return a copy of a run's module with the present values of the global model."""
    parts = run.parts
    module = copy_structure(parts.module, {})
    for part in module.modules():
        if "_trainer" in vars(part):  # of a LightningModule, which is the user's from now on
            part.__dict__["_trainer"] = None
    with run.statistics.filled(parts.coordinator.state.values, anew=anew):
        parts.submodels.load_(module, parts.coordinator.state.values)
    return module
