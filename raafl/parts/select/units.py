"""Choose units of each axis: leading, rolling, at random, by ratio, and the largest rate within a budget. Pure functions.

A rate is the kept share of an axis: ``ceil(rate * size)`` of its units, at least one. A unit is a neuron, a channel, a head, a
key-value group or a block.

| function | units that each axis keeps | method |
| --- | --- | --- |
| `leading` | the first | HeteroFL |
| `rolling` | a window that moves on each round | FedRolex |
| `at_random` | drawn anew in each round | Federated Dropout |
| `magnitude` (`raafl.parts.select.rate_select`) | those with the largest weights | structured pruning |
| `shared_fragments` | consecutive ranges by ratio, at least one unit each | Fed-RAA |

The first four take ``(axes, rate, *, state, seed, round)`` and return a spec; `shared_fragments` returns one spec for each
fragment.

>>> from raafl.submodel import Axis, Member
>>> hidden = {"hidden": Axis("hidden", 10, (Member("fc1.weight", 0), Member("fc2.weight", 1)))}
>>> str(leading(hidden, width_of(0.25)))
'hidden[0:5]'
>>> str(rolling(hidden, 0.3, round=2))
'hidden[2:5]'
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from raafl.core.select import time_on
from raafl.core.types import derive_seed
from raafl.devices.profiles import Profile
from raafl.errors import BadInput, fraction, nearest, positive
from raafl.submodel import Axis, Cost, Spec, SpecError, Stack

Axes = Mapping[str, Axis | Stack]
"""Axes of width and stacks of blocks, which are axes of depth, by name."""

Rate = float | Mapping[str, float]
"""Kept share of every axis, or a mapping from its name; an axis that is not named stays whole."""


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


def size_of(axis: Axis | Stack) -> int:
    """Return the number of units (such as neurons) of an axis, or of blocks of a stack."""
    return axis.size if isinstance(axis, Axis) else len(axis)


def count(size: int, rate: float) -> int:
    """Return the number of units that a rate keeps out of ``size``: ``ceil(rate * size)``, at least 1 (HeteroFL, section 3.1).

    Raises:
        BadInput: the rate is not in (0, 1].
    """
    fraction("rate", rate)
    # rounding puts 0.1 * 30 slightly above 3
    return max(1, math.ceil(rate * size - 1e-9 * size))


def counts(axes: Axes, rate: Rate) -> dict[str, int]:
    """Return the number of units that a rate keeps on each axis that shrinks.

    Raises:
        BadInput: a rate is not in (0, 1], or is given for an axis that does not exist.
    """
    if isinstance(rate, Mapping):
        for name in rate:
            if name not in axes:
                raise BadInput(f"rate has '{name}', which is no axis of this model: {nearest(name, axes)}")
        rates = dict(rate)
    else:
        rates = dict.fromkeys(axes, rate)
    numbers = {name: count(size_of(axes[name]), share) for name, share in rates.items()}
    return {name: number for name, number in numbers.items() if number < size_of(axes[name])}


def spec_of(axes: Axes, kept: Mapping[str, Iterable[int]]) -> Spec:
    """Return the submodel that keeps the given units; axes that are not named stay whole.

    Raises:
        SpecError: an axis does not exist, would keep no unit, or does not have a given unit.
    """
    width: dict[str, list[int] | range] = {}
    depth: dict[str, list[int] | range] = {}
    for name, indices in kept.items():
        if name not in axes:
            raise SpecError(f"kept has '{name}', which is no axis of this model: {nearest(name, axes)}")
        size = size_of(axes[name])
        chosen = indices if isinstance(indices, range) and indices.step == 1 else sorted(indices)
        if len(chosen) and chosen[-1] >= size:
            raise SpecError(f"kept has {chosen[-1]} of '{name}', which has {size} units: give indices below that")
        if len(chosen) != size or list(chosen) != list(range(size)):
            (width if isinstance(axes[name], Axis) else depth)[name] = chosen
    return Spec.select(width, blocks=depth)


# ---- submodels of one client ----


def leading(axes: Axes, rate: Rate, *, state: object = None, seed: int = 0, round: int = 0) -> Spec:
    """Select the first units of every axis, so that small submodels are contained in larger ones (HeteroFL, section 3.1).

    Args:
        axes: axes of the model (dimensions that can be cut), by name.
        rate: share of each axis's units to keep.
        state: ignored by this selector.
        seed: ignored by this selector.
        round: ignored by this selector.
    """
    return spec_of(axes, {name: range(number) for name, number in counts(axes, rate).items()})


def rolling(axes: Axes, rate: Rate, *, state: object = None, seed: int = 0, round: int = 0) -> Spec:
    """Select a window of units that moves on by one in each round (FedRolex, Alam et al. 2022, section 3.2).

    On an axis with K units the window starts at unit ``round mod K`` and wraps around, so that within K rounds each
    unit is trained equally often. (The paper rounds the window's size down; this rounds up, as every selector does.)

    Args:
        axes: axes of the model (dimensions that can be cut), by name.
        rate: share of each axis's units to keep.
        state: ignored by this selector.
        seed: ignored by this selector.
        round: number of the round.
    """
    windows = {}
    for name, number in counts(axes, rate).items():
        size = size_of(axes[name])
        windows[name] = [(round + i) % size for i in range(number)]
    return spec_of(axes, windows)


def at_random(axes: Axes, rate: Rate, *, state: object = None, seed: int = 0, round: int = 0) -> Spec:
    """Select random units, drawn anew in each round (Federated Dropout, Caldas et al. 2018).

    Args:
        axes: axes of the model (dimensions that can be cut), by name.
        rate: share of each axis's units to keep.
        state: ignored by this selector.
        seed: seed of the draws.
        round: number of the round.
    """
    draws = {}
    for name, number in counts(axes, rate).items():
        draws[name] = random.Random(derive_seed(seed, round, name)).sample(range(size_of(axes[name])), number)
    return spec_of(axes, draws)


# ---- disjoint submodels of all clients ----


def shared_fragments(axes: Axes, ratios: Sequence[float]) -> tuple[Spec, ...]:
    """Cut every axis into consecutive ranges by ``ratios``; return one submodel per range, with at least one unit of every axis.

    If an axis has enough units, the ranges are disjoint; a range that would be empty takes a unit from its neighbour.
    Otherwise (two heads, three fragments) each fragment has one unit, and neighbours share it. Every unit is in some
    fragment.

    Raises:
        BadInput: a ratio is not above 0.
    """
    bounds = _bounds(ratios)
    parts: list[dict[str, range]] = [{} for _ in ratios]
    for name in axes:
        size = size_of(axes[name])
        ranges = _filled_ranges(bounds, size) if size >= len(ratios) else _shared_units(bounds, size)
        for part, units in zip(parts, ranges, strict=True):
            part[name] = units
    return tuple(spec_of(axes, part) for part in parts)


def _filled_ranges(bounds: Sequence[float], size: int) -> list[range]:
    num, cuts = len(bounds) - 1, [0]
    for j in range(1, num + 1):
        cuts.append(min(max(round(bounds[j] * size), cuts[-1] + 1), size - (num - j)))
    return [range(start, stop) for start, stop in pairwise(cuts)]


def _shared_units(bounds: Sequence[float], size: int) -> list[range]:
    """Return the unit near the middle of each fragment's share, for more fragments than units; each unit is in some fragment."""
    num, units = len(bounds) - 1, [0]
    for j in range(1, num):
        middle = int((bounds[j] + bounds[j + 1]) / 2 * size)
        units.append(min(max(middle, units[-1], size - num + j), units[-1] + 1, size - 1))
    return [range(unit, unit + 1) for unit in units]


def _bounds(ratios: Sequence[float]) -> list[float]:
    """Divide [0, 1] in proportion to ``ratios``; return the start of each share, and the end of the last."""
    for ratio in ratios:
        positive("a ratio in fragments", ratio)
    total = math.fsum(ratios)
    bounds = [min(bound / total, 1.0) for bound in accumulate(ratios, initial=0.0)]
    bounds[-1] = 1.0  # exact, so that rounding does not lose the last unit
    return bounds


_INF = math.inf


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits on the cost of a task; a task must meet all of them. Infinite = no limit."""

    memory_bytes: float = _INF  # largest peak memory of a task in bytes (`Cost.peak_bytes`)
    flops: float = _INF  # largest number of training FLOPs of a task
    wire_bytes: float = _INF  # largest number of bytes that a task transfers, down and up together
    seconds: float = _INF  # longest predicted duration of a task on ``profile``: download, computation and upload
    params: float = _INF  # largest number of parameters in the submodel
    profile: Profile = field(default_factory=Profile)  # the client's device, needed for ``seconds``
    samples: int = 1  # number of samples on which a task trains, needed for ``flops`` and ``seconds``
    tested: float = 0.0  # number of test samples on which the client evaluates afterwards, needed for ``seconds``

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
