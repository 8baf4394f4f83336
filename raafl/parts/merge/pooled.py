"""Pool the running means and variances of batch norm over all clients' samples."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import ClassVar

from raafl.core.state import GlobalState
from raafl.core.types import Update
from raafl.parts.merge.wrapped import Wrapped
from raafl.submodel import Spec
from raafl.submodel.batch_norm import Pooling


@dataclass(frozen=True)
class Pooled(Wrapped):
    """Wrapper of a merge that pools batch norm's running means and variances over all clients' samples.

    The mean of the clients' variances is not the variance of all their samples. So clients send second moments instead,
    the wrapped merge averages these, and variances are computed from the result: ``var = sum_n w_n (var_n + (mean_n -
    mean)^2) / sum_n w_n``. In a chain of wrappers only `WideMerge` and `Bounded` are outside this one.

    If the wrapped merge takes changes (deltas), clients still send statistics as values, and the server subtracts its
    current statistics. Changes relative to old versions would overshoot when several are applied one after another, down
    to negative variances. Learning rates and moments of the server do not affect statistics.

    Attributes:
        pooling: the model's running statistics, with the conversion between variances and second moments.
    """

    merges_means: ClassVar[bool] = True

    pooling: Pooling = field(repr=False)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Convert the update's statistics, in place, to the form that the wrapped merge takes, and pass the update on.

        For a merge of changes they become differences from the server's statistics; otherwise they stay values.
        """
        self.pooling.to_moments_(update.tensors, half=True)
        with self.pooling.merging(state.values):
            if self.sends == "delta":
                received = self.pooling.statistics_in(update.tensors)
                current = self.pooling.statistics_in(state.submodels.plan(spec).gather(state.values))
                pairs = (zip(*both, strict=True) for both in zip(received, current, strict=True))
                for tensor, other in itertools.chain.from_iterable(pairs):
                    tensor.sub_(other)
            self.inner.receive(state, update, spec, staleness)

    def apply(self, state: GlobalState) -> None:
        """Apply the wrapped merge, then compute variances from the merged second moments."""
        with self.pooling.merging(state.values):
            self.inner.apply(state)

    def __str__(self) -> str:
        return f"{self.inner}, running variances pooled"
