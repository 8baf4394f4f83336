"""Provide the trigger and mean of methods that run in rounds, as FedAvg, or per arrival, as FedAsync."""

from __future__ import annotations

from raafl.core.algorithm import Trigger
from raafl.parts.merge.mean import Mean
from raafl.parts.merge.staleness import Staleness
from raafl.parts.trigger import AllReported, EachArrival


def averaging(alpha: float | None, by_samples: bool) -> tuple[Trigger, Mean]:
    """Return the trigger (which decides when to merge) and the mean for synchronous rounds or asynchronous arrivals.

    `alpha`: weight of each arriving update, reduced by its staleness; None = synchronous rounds.
    """
    if alpha is None:
        return AllReported(), Mean(by_samples=by_samples)
    return EachArrival(), Mean(alpha, Staleness("polynomial"), by_samples)
