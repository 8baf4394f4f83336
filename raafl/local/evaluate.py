"""Measuring the global model on the server's test data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from raafl.errors import BadInput
from raafl.local.buffers import Buffers
from raafl.local.metrics import measure, overrides
from raafl.local.record import Recorder
from raafl.submodel import FULL, FlatTensors, Submodels


class Evaluator:
    """Runs the module's own ``validation_step`` over the test batches with given values."""

    def __init__(
        self,
        submodels: Submodels,
        batches: Callable[[], Iterable[Any]],
        device: torch.device | str = "cpu",
        prepare: Callable[[FlatTensors], None] = lambda values: None,
    ) -> None:
        """Build the full module once.

        ``batches`` is called for each evaluation, ``prepare`` before it, on the evaluator's own copy of the values,
        which it may change.

        Raises:
            BadInput: the module has no ``validation_step``.
        """
        shrunk = submodels.shrink(FULL, device=device)
        self.module, self._present = shrunk.module, shrunk.present
        self._buffers = Buffers(self.module, self._present)
        self._batches, self._device, self._prepare = batches, torch.device(device), prepare
        self._recorder = Recorder()
        self._recorder.attach(self.module)
        if not overrides(self.module, "validation_step"):
            raise BadInput(
                f"{type(self.module).__name__} has no validation_step: define one that logs or returns its metrics, so "
                "that the global model can be measured"
            )

    @torch.no_grad()
    def fill(self, values: FlatTensors) -> None:
        """Give the module these values, and the buffers that it was made with; until then its memory holds anything."""
        self._buffers.restore()
        self._present.copy_(values)

    def __call__(self, values: FlatTensors) -> dict[str, float]:
        """Return the metrics that ``validation_step`` logs or returns, over all samples; see `raafl.local.metrics.measure`."""
        self.fill(values)
        with torch.no_grad():
            self._prepare(self._present)
        return measure(self.module, self._recorder, self._batches(), self._device)
