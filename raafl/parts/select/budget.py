"""The largest submodel within a budget, found by the cost model."""

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
    """What a task may cost; all that is given must be kept.

    Attributes:
        memory_bytes: what the tensors of the client's task may take: see `Cost.peak_bytes`.
        flops: training FLOPs of a task.
        wire_bytes: bytes of a task, down and up.
        seconds: predicted time of a task on ``profile``: download, compute, upload.
        params: parameters present.
        profile: of the client, for ``seconds``.
        samples: that a task trains on, for ``flops`` and ``seconds``.
        tested: on which the client then measures what it has trained, for ``seconds``.
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
        """Name a task's needs, by the name of each limit."""
        return {
            "memory_bytes": cost.peak_bytes,
            "flops": cost.flops_per_sample * self.samples,
            "wire_bytes": cost.down_bytes + cost.up_bytes,
            "seconds": time_on(self.profile, cost, self.samples, self.tested).total_s,
            "params": cost.params,
        }

    def over(self, cost: Cost) -> dict[str, float]:
        """Name the needs beyond each limit that is not kept; none where the task fits."""
        return {name: need for name, need in self.needs(cost).items() if need > getattr(self, name)}


def steps(axes: Axes) -> list[float]:
    """Return, in increasing order, every rate at which another unit of some axis is kept; the last is 1."""
    return sorted({number / size for size in set(map(size_of, axes.values())) for number in range(1, size + 1)} | {1.0})


def largest_rate(
    spec_of_rate: Callable[[float], Spec],
    cost_of: Callable[[Spec], Cost],
    budget: Budget,
    *,
    rates: Sequence[float],
    who: str = "the client",
) -> float:
    """Return the largest of ``rates`` whose spec keeps the budget, by bisection; what is returned has been checked.

    A larger rate gives a submodel that costs no less, ``rates`` are increasing, such as `steps` of the axes; ``who`` is
    named where nothing fits.

    Raises:
        BadInput: not even the smallest keeps the budget; names who, each limit that it breaks, and what it needs.
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
