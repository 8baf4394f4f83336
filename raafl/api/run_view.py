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
    """An update that was merged.

    Attributes:
        client: 1..N.
        version: of the global model that it is part of.
        staleness: versions that were made while the client trained.
        spec: the submodel, in words.
        num_samples: that the client trains on.
        num_steps: optimiser steps it took.
        train_s: seconds from the assignment to the arrival.
        bytes_down: sent to the client.
        bytes_up: sent back.
        metrics: what the client measured: loss, what training_step logs, test/... on its own test part.
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
    """A run as callbacks see it.

    Attributes:
        experiment: its settings; not to be changed.
        version: of the global model; in `on_evaluate` the one that was measured, which may be an earlier one in a
            wall-clock run.
        time_s: seconds since the run began, on its own clock (virtual or real); in `on_evaluate` of that version.
        metrics: of the last evaluation, callbacks' own included.
        resumed: whether the run goes on with an earlier one.
        should_stop: whether somebody has asked for its end.
    """

    def __init__(self, run: Run, unwrap: Callable[[nn.Module], nn.Module], ask: Callable[[str], None]) -> None:
        """Show ``run``; ``unwrap`` makes of raafl's module the one that was given, ``ask`` takes a reason to end."""
        self._run, self._unwrap, self._ask = run, unwrap, ask
        self.experiment: Experiment = run.parts.experiment
        self.version, self.time_s = run.parts.coordinator.state.version, 0.0
        self.metrics: dict[str, float] = {}
        self.resumed = self.should_stop = False

    @property
    def folder(self) -> Path:
        """The run's folder; there is none before the first evaluation is recorded."""
        return self._run.folder

    @property
    def num_updates(self) -> int:
        """Updates merged so far."""
        return self._run.parts.coordinator.merged

    @property
    def num_clients(self) -> int:
        """Clients that are there now."""
        return len(self._run.parts.coordinator.roster.clients)

    def module(self) -> nn.Module:
        """Return a copy of the model, in eval mode, with the values of the global model as it is now."""
        return self._unwrap(current(self._run, anew=True)).eval()

    def stop(self, reason: str = "asked to") -> None:
        """End the run when the event at hand has been seen to; ``reason`` is in its summary as ``stopped: REASON``."""
        self._ask(reason)

    def note(self, text: str) -> None:
        """Say something to the user: a line of its own in the run's progress view."""
        self._run.progress.note(text)


def current(run: Run, *, anew: bool) -> nn.Module:
    """Return a copy of a run's module with the global values; ``anew`` collects its static statistics, if it has any."""
    parts = run.parts
    module = copy_structure(parts.module, {})
    for part in module.modules():
        if "_trainer" in vars(part):  # of a LightningModule, which is the user's from now on
            part.__dict__["_trainer"] = None
    with run.statistics.filled(parts.coordinator.state.values, anew=anew):
        parts.submodels.load_(module, parts.coordinator.state.values)
    return module
