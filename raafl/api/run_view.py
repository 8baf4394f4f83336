"""Present a run to callbacks, read only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raafl.submodel.cut.copying import copy_structure

if TYPE_CHECKING:
    from torch import nn

    from raafl.config.experiment import Experiment
    from raafl.runtime.run import Run


@dataclass(frozen=True, slots=True)
class MergedUpdate:
    """A merged update, as callbacks see it.

    Attributes:
        client: id of the client, 1 to N.
        version: version of the global model that contains the update.
        staleness: number of versions made while the client trained.
        spec: submodel of the update, in words.
        num_samples: number of samples that the client trains on.
        num_steps: number of optimizer steps that the task took.
        train_s: seconds from assignment to arrival.
        bytes_down: number of bytes sent to the client.
        bytes_up: number of bytes sent back.
        metrics: metrics from the client: loss, what training_step logs, and test/... from its own test part.
    """

    client: int
    version: int
    staleness: int
    spec: str
    num_samples: int
    num_steps: int
    train_s: float
    bytes_down: int
    bytes_up: int
    metrics: Mapping[str, float]


class RunView:
    """A run, as callbacks see it.

    Attributes:
        experiment: settings of the run; do not change them.
        version: version of the global model; in `on_evaluate` the evaluated one, which may be earlier in a wall-clock
            run.
        time_s: seconds since the run began, virtual or real; in `on_evaluate` those of the evaluated version.
        metrics: metrics of the last evaluation, callbacks' own included.
        resumed: whether the run continues an earlier one.
        should_stop: whether the run's end has been requested.
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
        """Folder of the run; None before the first evaluation is recorded."""
        return self._run.folder

    @property
    def num_updates(self) -> int:
        """Number of merged updates."""
        return self._run.parts.coordinator.merged

    @property
    def num_clients(self) -> int:
        """Number of connected clients."""
        return len(self._run.parts.coordinator.roster.clients)

    def module(self) -> nn.Module:
        """Return a copy of the model, in eval mode, with the present values of the global model."""
        return self._unwrap(current(self._run, anew=True)).eval()

    def stop(self, reason: str = "asked to") -> None:
        """End the run after the present event; its summary says ``stopped: REASON``."""
        self._ask(reason)

    def note(self, text: str) -> None:
        """Print a line in the run's progress view."""
        self._run.progress.note(text)


def current(run: Run, *, anew: bool) -> nn.Module:
    """Return a copy of a run's module with the present global values.

    Args:
        run: run whose model is copied.
        anew: whether to collect static batch-norm statistics afresh, if the model has any.
    """
    parts = run.parts
    module = copy_structure(parts.module, {})
    for part in module.modules():
        if "_trainer" in vars(part):  # of a LightningModule, which is the user's from now on
            part.__dict__["_trainer"] = None
    with run.statistics.filled(parts.coordinator.state.values, anew=anew):
        parts.submodels.load_(module, parts.coordinator.state.values)
    return module
