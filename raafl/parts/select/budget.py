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
    """Limits on the cost of a task, all of which must be met; infinite = no limit.

    Attributes:
        memory_bytes: largest number of bytes of the client's tensors (`Cost.peak_bytes`).
        flops: largest number of training FLOPs of a task.
        wire_bytes: largest number of bytes of a task, download and upload together.
        seconds: largest predicted time of a task on ``profile``: download, computation, upload.
        params: largest number of parameters present.
        profile: device profile of the client, needed for ``seconds``.
        samples: number of samples on which a task trains, needed for ``flops`` and ``seconds``.
        tested: number of samples on which the client then evaluates, needed for ``seconds``.
    """

    memory_bytes: float = _INF
    flops: float = _INF
    wire_bytes: float = _INF
    seconds: float = _INF
    params: float = _INF
    profile: Profile = field(default_factory=Profile)
    samples: int = 1
    tested: float = 0.0

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "flops", "wire_bytes", "seconds", "params", "samples"):
            positive(name, getattr(self, name))

    def needs(self, cost: Cost) -> dict[str, float]:
        """Return a task's needs, each by the name of the limit that it is compared with."""
        return {
            "memory_bytes": cost.peak_bytes,
            "flops": cost.flops_per_sample * self.samples,
            "wire_bytes": cost.down_bytes + cost.up_bytes,
            "seconds": time_on(self.profile, cost, self.samples, self.tested).total_s,
            "params": cost.params,
        }

    def over(self, cost: Cost) -> dict[str, float]:
        """Return the needs that exceed their limits, by the limit's name; empty if the task is within the budget."""
        return {name: need for name, need in self.needs(cost).items() if need > getattr(self, name)}


def steps(axes: Axes) -> list[float]:
    """Return every rate at which some axis keeps one more unit, ascending; the last is 1."""
    return sorted({number / size for size in set(map(size_of, axes.values())) for number in range(1, size + 1)} | {1.0})


def largest_rate(
    spec_of_rate: Callable[[float], Spec],
    cost_of: Callable[[Spec], Cost],
    budget: Budget,
    *,
    rates: Sequence[float],
    who: str = "the client",
) -> float:
    """Return the largest of ``rates`` whose spec is within the budget, by bisection; the result has been checked.

    Args:
        spec_of_rate: function that returns the spec of a rate.
        cost_of: function that predicts the cost of a spec; a larger rate must not cost less.
        budget: limits that the spec must meet.
        rates: rates to choose from, ascending, such as `steps` of the axes.
        who: subject of the error message, such as "client 3".

    Raises:
        BadInput: not even the smallest rate is within the budget; the message has each exceeded limit with the need.
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
