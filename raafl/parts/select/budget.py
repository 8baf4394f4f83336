"""Find the largest submodel within a budget, by predicted cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from raafl.devices.profiles import Profile
from raafl.devices.times import time_on
from raafl.errors import BadInput, positive
from raafl.parts.select.units import Axes, size_of
from raafl.submodel import Cost, Spec

_INF = math.inf


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits on the cost of a task; a task must meet all of them. Infinite = no limit."""

    memory_bytes: float = _INF  # largest peak memory of a task in bytes (`Cost.peak_bytes`)
    flops: float = _INF  # largest number of training FLOPs of a task
    wire_bytes: float = _INF  # largest number of bytes that a task transfers, download and upload together
    seconds: float = _INF  # longest predicted time of a task on ``profile``: download, computation and upload
    params: float = _INF  # largest number of parameters in the submodel
    profile: Profile = field(default_factory=Profile)  # profile of the client's device, needed for ``seconds``
    samples: int = 1  # number of samples on which a task trains, needed for ``flops`` and ``seconds``
    tested: float = 0.0  # number of test samples on which the client then evaluates, needed for ``seconds``

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "flops", "wire_bytes", "seconds", "params", "samples"):
            positive(name, getattr(self, name))

    def needs(self, cost: Cost) -> dict[str, float]:
        """Return the amounts (bytes, FLOPs, seconds) that a task with this cost needs, by the name of their limit."""
        return {
            "memory_bytes": cost.peak_bytes,
            "flops": cost.flops_per_sample * self.samples,
            "wire_bytes": cost.down_bytes + cost.up_bytes,
            "seconds": time_on(self.profile, cost, self.samples, self.tested).total_s,
            "params": cost.params,
        }

    def over(self, cost: Cost) -> dict[str, float]:
        """Return the amounts that exceed their limit, by the limit's name; empty if a task with this cost fits the budget."""
        return {name: need for name, need in self.needs(cost).items() if need > getattr(self, name)}


def steps(axes: Axes) -> list[float]:
    """Return all rates (shares of the width) at which the size of a submodel changes, ascending, up to 1."""
    return sorted({number / size for size in set(map(size_of, axes.values())) for number in range(1, size + 1)} | {1.0})


def largest_rate(
    spec_of_rate: Callable[[float], Spec],
    cost_of: Callable[[Spec], Cost],
    budget: Budget,
    *,
    rates: Sequence[float],
    who: str = "the client",
) -> float:
    """Return the largest of ``rates`` whose submodel fits the budget, found by bisection.

    Raises:
        BadInput: not even the smallest rate fits the budget; the message lists each exceeded limit and what is needed.
    """
    if not budget.over(cost_of(spec_of_rate(rates[-1]))):
        return rates[-1]
    over = budget.over(cost_of(spec_of_rate(rates[0])))
    if over:
        limits = ", ".join(f"{name} is {getattr(budget, name):.4g}" for name in over)
        needs = ", ".join(f"{name} {need:.4g}" for name, need in over.items())
        raise BadInput(
            f"{who}: {limits}, too little for any submodel (the smallest, {spec_of_rate(rates[0])}, needs {needs}): "
            f"raise {' and '.join(over)}, use a smaller batch or model, or leave the client out"
        )
    fits, exceeds = 0, len(rates) - 1
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        if budget.over(cost_of(spec_of_rate(rates[middle]))):
            exceeds = middle
        else:
            fits = middle
    return rates[fits]
