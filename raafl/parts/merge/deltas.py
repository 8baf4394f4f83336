"""Merge the mean of the clients' changes, as FedBuff does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from raafl.core.algorithm import Merge
from raafl.core.state import GlobalState
from raafl.core.types import Update
from raafl.errors import positive
from raafl.parts.merge.mean import Accumulator, Staleness, SumMemory, shares_of, trained_pieces
from raafl.submodel import Spec
from raafl.submodel.flat import chunks


@dataclass
class DeltasMemory(SumMemory):
    """Running sum of the changes (deltas) that wait in FedBuff's buffer."""

    key = "deltas"


@dataclass(frozen=True)
class Deltas(Merge):
    """FedBuff's merge: adds the mean of K clients' changes to the model (Nguyen et al. 2022, Algorithm 1).

    ``theta <- theta + eta_g * (1/K) sum_i s(staleness_i) Delta_i``. Delta_i is a client's trained values minus the
    values that it received, so it refers to the version from which the client started. K is the number of updates that
    trained an element; for whole models this is the buffer's size. A smaller buffer at the end of the run is divided by
    its own size. Running statistics get the mean without eta_g.

    Attributes:
        server_lr: server learning rate eta_g.
        staleness: function s by which late updates count less, by default 1/sqrt(1 + staleness).
        sends: content of an update: trained values, or their change ("delta").
        by_samples: whether clients are weighted by |D_n|; False = equally, as in the paper.
    """

    server_lr: float = 1.0
    staleness: Staleness = field(default_factory=lambda: Staleness("polynomial", a=0.5))
    sends: Literal["values", "delta"] = "delta"
    by_samples: bool = False
    merges_means: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive("server_lr", self.server_lr)

    def weigh(self, update: Update, staleness: int) -> tuple[float, float]:
        """Return an update's weight in the mean, and the factor on its change: server learning rate times staleness factor."""
        weight = float(update.num_samples) if self.by_samples else update.num_updates
        return weight, self.server_lr * self.staleness(staleness)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Add the update's change, times its weight and staleness factor, to the sum."""
        shares = shares_of(update, spec, lambda one: self.weigh(one, staleness)[0])
        accumulator = Accumulator(state, state.memory.of(DeltasMemory))
        accumulator.add_shares(update.tensors, spec, shares, self.staleness(staleness))

    def apply(self, state: GlobalState) -> None:
        """Move the model by the mean change in the buffer."""
        sums = Accumulator(state, state.memory.of(DeltasMemory))
        if sums.common is not None:  # where no update covers an element the sum is 0
            for is_parameter, (theta, total) in trained_pieces(state, sums.total):
                theta.add_(total, alpha=(self.server_lr if is_parameter else 1.0) / sums.weight)
        else:
            for is_parameter, flats in trained_pieces(state, sums.total, sums.cover()):
                for old, total, count in chunks(*flats):
                    # where no update covers an element, 0 / tiny = 0 is added, which leaves its bits as they are
                    tiny = torch.finfo(old.dtype).tiny
                    old.addcdiv_(total, count.clamp_min_(tiny), value=self.server_lr if is_parameter else 1.0)
        sums.clear()

    def __str__(self) -> str:
        stale = str(self.staleness)
        weighted = ", by samples" if self.by_samples else ""
        return f"mean of deltas{' x ' + stale if stale else ''}{weighted}, server lr {self.server_lr:g}"
