"""The run's own setting of what clients do; importing it costs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Amount(Protocol):
    """How much a task trains: the fields of a `raafl.core.types.Work` that say so."""

    @property
    def num_epochs(self) -> int | None:
        """Local epochs; None = the run's own setting."""

    @property
    def num_steps(self) -> int | None:
        """Local steps; None = the run's own setting."""


@dataclass(frozen=True, slots=True)
class Training:
    """How much every client trains unless its assignment says otherwise: the run's own setting.

    Attributes:
        num_epochs: local epochs E over the client's data.
        num_steps: local steps T instead of epochs.
        batch_size: None = the datamodule's.
    """

    num_epochs: int | None = 1
    num_steps: int | None = None
    batch_size: int | None = None

    def samples(self, work: Amount, num_samples: int, batch_size: int) -> int:
        """Count the samples that ``work`` processes on a client with ``num_samples``."""
        steps = work.num_steps if work.num_steps is not None else self.num_steps
        if steps is not None and work.num_epochs is None:
            return steps * min(batch_size, num_samples)
        epochs = work.num_epochs if work.num_epochs is not None else self.num_epochs
        return (epochs or 1) * num_samples
