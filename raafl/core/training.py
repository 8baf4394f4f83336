"""The run's own setting of what clients do, and on how many samples they measure it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raafl.core.types import ClientInfo, Work


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

    def samples(self, work: Work, num_samples: int, batch_size: int) -> int:
        """Count the samples that ``work`` processes on a client with ``num_samples``."""
        steps = work.num_steps if work.num_steps is not None else self.num_steps
        if steps is not None and work.num_epochs is None:
            return steps * min(batch_size, num_samples)
        epochs = work.num_epochs if work.num_epochs is not None else self.num_epochs
        return (epochs or 1) * num_samples


@dataclass(frozen=True, slots=True)
class OwnTests:
    """On how many samples clients measure what they have trained.

    Attributes:
        sizes: of the test part of client i's share of the run's data; none where it is not named.
        share: of the test part of data that only a client has, whose size it does not say.
    """

    sizes: Mapping[int, int] = field(default_factory=dict)
    share: float = 0.0

    def of(self, client: ClientInfo) -> float:
        """Return the number of samples, of a client's own data as many as go with those that it trains on."""
        if client.own_data:
            return client.num_samples * self.share / (1.0 - self.share)
        return float(self.sizes.get(client.id, 0))
