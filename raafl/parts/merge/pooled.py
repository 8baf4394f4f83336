"""Pool batch norm's running statistics in any merge: variances of several clients become the variance of all their samples."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

from raafl.core.algorithm import Algorithm
from raafl.core.state import GlobalState
from raafl.core.types import Update
from raafl.parts.merge.wrapped import Wrapped
from raafl.submodel import Spec, Submodels
from raafl.submodel.batch_norm import Pooling


def pooled(algorithm: Algorithm, submodels: Submodels) -> Algorithm:
    """Return ``algorithm`` with running statistics merged exactly; unchanged if the model has none to merge."""
    pooling = Pooling.of(submodels.module, submodels.batch_norm)
    return algorithm if pooling is None else replace(algorithm, merge=Pooled(algorithm.merge, pooling))


@dataclass(frozen=True)
class Pooled(Wrapped):
    """Merge wrapper that merges running means and second moments, and computes variances from them.

    It is the outermost wrapper except for `WideMerge` and `Bounded`. Clients send second moments in place of variances
    (`raafl.local.train`), and the inner merge sees second moments in the state, too. So after a weighted mean,
    ``var = sum_n w_n (var_n + (mean_n - mean)^2) / sum_n w_n``.

    If the inner merge takes deltas, clients still send their statistics as values, and the inner merge receives their
    difference from the *server's*. A delta of statistics is not the direction of a step: several deltas against one old
    version, applied one after another, would overshoot all of them, down to variances below 0. So for statistics FedBuff is a
    mix ``theta <- theta + (1/K) sum_i s(staleness_i) (theta_i - theta)``; in a round of FedOpt, whose deltas all refer to the
    server's values, both are the same. Server learning rates and moments do not act on statistics.

    Attributes:
        pooling: the model's running statistics that are merged.
    """

    pooling: Pooling = field(repr=False)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Convert the update's statistics, in place, to what the inner merge takes, and pass the update to it.

        They become differences from the server's statistics if the inner merge takes deltas, and stay values otherwise.
        """
        self.pooling.to_moments_(update.tensors, half=True)
        with self.pooling.merging(state.values):
            if self.sends == "delta":
                received = self.pooling.statistics_in(update.tensors)
                current = self.pooling.statistics_in(state.submodels.plan(spec).gather(state.values))
                pairs = (zip(*both, strict=True) for both in zip(received, current, strict=True))
                for tensor, other in itertools.chain.from_iterable(pairs):
                    tensor.sub_(other)
            super().receive(state, update, spec, staleness)

    def apply(self, state: GlobalState) -> None:
        """Apply the inner merge, then convert second moments to variances."""
        with self.pooling.merging(state.values):
            super().apply(state)

    def __str__(self) -> str:
        return f"{self.inner}, running variances pooled"
