"""Running statistics of batch norm in any merge: variances of several clients become that of all their samples."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from raafl.core.algorithm import Algorithm
from raafl.core.state import GlobalState
from raafl.core.types import Update
from raafl.parts.merge.wrapped import Wrapped
from raafl.submodel import Spec, Submodels
from raafl.submodel.batch_norm import Pooling


def pooled(algorithm: Algorithm, submodels: Submodels) -> Algorithm:
    """Return ``algorithm`` with running statistics merged exactly; as it is where the model has none to merge."""
    pooling = Pooling.of(submodels.module, submodels.batch_norm)
    return algorithm if pooling is None else replace(algorithm, merge=Pooled(algorithm.merge, pooling))


@dataclass(frozen=True)
class Pooled(Wrapped):
    """Merges running means and second moments, from which variances follow; goes around all other wrappers.

    Clients send second moments in the place of variances (`raafl.local.train`); the state has them whenever the inner merge
    looks at it. So after a weighted mean, ``var = sum_n w_n (var_n + (mean_n - mean)^2) / sum_n w_n``.

    Where a merge takes deltas, clients send their statistics as they are all the same, and what the inner merge gets is
    their difference from the *server's*. A delta of statistics is not a step in a direction: several against one old version,
    folded in one after the other, would go past where the statistics of all of them lie, with variances below 0. So here
    FedBuff is a mix ``theta <- theta + (1/K) sum_i s(staleness_i) (theta_i - theta)``; in a round of FedOpt, whose deltas are all
    against the server's values, the two are the same. Server learning rates and moments do not act on them.
    """

    pooling: Pooling = field(repr=False)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Pass the update on; where deltas are wanted its statistics become differences, in its own storage."""
        self.pooling.to_moments_(update.tensors, half=True)
        with self.pooling.merging(state.values):
            if self.sends == "delta":
                mine = self.pooling.statistics_in(update.tensors)
                current = self.pooling.statistics_in(state.submodels.plan(spec).gather(state.values))
                for tensors, others in zip(mine, current, strict=True):
                    for tensor, other in zip(tensors, others, strict=True):
                        tensor.sub_(other)
            super().receive(state, update, spec, staleness)

    def apply(self, state: GlobalState) -> None:
        """Fold in what was received."""
        with self.pooling.merging(state.values):
            super().apply(state)

    def __str__(self) -> str:
        return f"{self.inner}, running variances pooled"
