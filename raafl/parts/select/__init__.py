"""Choose a submodel from axes, a rate or a budget, the state and a seed, with pure functions called selectors.

| function | units that each axis keeps | method |
| --- | --- | --- |
| `leading` | the first | HeteroFL |
| `rolling` | a window that moves on each round | FedRolex |
| `at_random` | drawn anew in each round | Federated Dropout |
| `magnitude` | those with the largest weights | structured pruning |
| `shared_fragments` | consecutive ranges by ratio, at least one unit each | Fed-RAA |

The first four take ``(axes, rate, *, state, seed, round)`` and return a spec; `shared_fragments` returns one spec for each
fragment. `largest_rate` finds the largest rate within a budget.

>>> from raafl.submodel import Axis, Member
>>> hidden = {"hidden": Axis("hidden", 10, (Member("fc1.weight", 0), Member("fc2.weight", 1)))}
>>> str(leading(hidden, width_of(0.25)))
'hidden[0:5]'
>>> str(rolling(hidden, 0.3, round=2))
'hidden[2:5]'
"""

from __future__ import annotations

import math
from collections.abc import Callable

from raafl.errors import fraction
from raafl.parts.select.budget import Budget, largest_rate, steps
from raafl.parts.select.coverage import RegionCoverage, mask_level, of_regions
from raafl.parts.select.importance import magnitude, unit_scores
from raafl.parts.select.units import (
    Axes,
    Rate,
    at_random,
    axes_of,
    count,
    counts,
    leading,
    rolling,
    shared_fragments,
    size_of,
    spec_of,
)
from raafl.submodel import Spec

SELECTORS: dict[str, Callable[..., Spec]] = {
    "leading": leading,
    "rolling": rolling,
    "random": at_random,
    "magnitude": magnitude,
}
"""Selectors that need only a client's rate and the global model, by their name in a config."""


def width_of(rate: float) -> float:
    """Return the width (share of each layer's units) at which a model keeps about ``rate`` of its parameters: sqrt(rate).

    A weight matrix that shrinks in both dimensions then keeps ``rate`` of its elements, as in HeteroFL, where width 1/2
    means 1/4 of the parameters. One that shrinks in one dimension, such as the first and last layer's, keeps more. If
    width and depth share the rate, each gets its square root (Co-S2P: ``r_w = r_d = sqrt(r)``).

    Raises:
        BadInput: the rate is not in (0, 1].
    """
    fraction("rate", rate)
    return math.sqrt(rate)


__all__ = [
    "SELECTORS",
    "Axes",
    "Budget",
    "Rate",
    "RegionCoverage",
    "at_random",
    "axes_of",
    "count",
    "counts",
    "largest_rate",
    "leading",
    "magnitude",
    "mask_level",
    "of_regions",
    "rolling",
    "shared_fragments",
    "size_of",
    "spec_of",
    "steps",
    "unit_scores",
    "width_of",
]
