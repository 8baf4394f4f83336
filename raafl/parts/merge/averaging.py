"""The mean of FedAvg's rounds, or of FedAsync's arrivals, for methods that work either way."""

from __future__ import annotations

from raafl.core.algorithm import Trigger
from raafl.parts.merge.mean import Mean
from raafl.parts.merge.staleness import Staleness
from raafl.parts.trigger import AllReported, EachArrival


def averaging(alpha: float | None, by_samples: bool) -> tuple[Trigger, Mean]:
    """Make the trigger and the mean: rounds, or each arrival mixed in with weight ``alpha``, less the staler it is."""
    if alpha is None:
        return AllReported(), Mean(by_samples=by_samples)
    return EachArrival(), Mean(alpha, Staleness("polynomial"), by_samples)
