"""Which units of each axis: leading, rolling, at random, by ratio. Pure functions.

A rate is the share of an axis that is kept: ``ceil(rate * size)`` of its units, at least one, whatever a unit is (a
neuron, a channel, a head, a key-value group, a block).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from raafl.core.types import derive_seed
from raafl.errors import BadInput, fraction, nearest, positive
from raafl.submodel import Axis, Spec, SpecError, Stack

if TYPE_CHECKING:
    from raafl.submodel import Submodels

Axes = Mapping[str, Axis | Stack]
"""What may be cut, by name: axes of width, and stacks of blocks, which are one more axis."""

Rate = float | Mapping[str, float]
"""Share kept of every axis, or of each by name; an axis that is not named is kept whole."""


def axes_of(submodels: Submodels) -> dict[str, Axis | Stack]:
    """Return all that may be cut of a model: its axes and its stacks of blocks.

    Raises:
        BadInput: a stack has the name of an axis.
    """
    for name in submodels.stacks:
        if name in submodels.axes:
            raise BadInput(f"'{name}' is an axis and a stack of blocks: give one of them another name")
    return {**submodels.axes, **submodels.stacks}


def size_of(axis: Axis | Stack) -> int:
    """Return the number of units of an axis, or of blocks of a stack."""
    return axis.size if isinstance(axis, Axis) else len(axis)


def count(size: int, rate: float) -> int:
    """Count the units of ``size`` that a rate keeps: ``ceil(rate * size)``, at least 1 (HeteroFL, section 3.1).

    Raises:
        BadInput: a rate that is not in (0, 1].
    """
    fraction("rate", rate)
    # 0.1 * 30 is a little more than 3
    return max(1, math.ceil(rate * size - 1e-9 * size))


def counts(axes: Axes, rate: Rate) -> dict[str, int]:
    """Count the units that are kept of each axis that shrinks.

    Raises:
        BadInput: a rate out of (0, 1], or for an axis that is not there.
    """
    if isinstance(rate, Mapping):
        for name in rate:
            if name not in axes:
                raise BadInput(f"rate names the axis '{name}'; {nearest(name, axes)}")
        rates = dict(rate)
    else:
        rates = dict.fromkeys(axes, rate)
    kept = {name: count(size_of(axes[name]), share) for name, share in rates.items()}
    return {name: number for name, number in kept.items() if number < size_of(axes[name])}


def spec_of(axes: Axes, kept: Mapping[str, Iterable[int]]) -> Spec:
    """Return the spec that keeps these units; an axis that is not named is kept whole.

    Raises:
        SpecError: an axis that is not there, no unit of one, or a unit that it does not have.
    """
    width: dict[str, list[int] | range] = {}
    depth: dict[str, list[int] | range] = {}
    for name, indices in kept.items():
        if name not in axes:
            raise SpecError(f"kept names the axis '{name}'; {nearest(name, axes)}")
        size = size_of(axes[name])
        chosen = indices if isinstance(indices, range) and indices.step == 1 else sorted(indices)
        if len(chosen) and chosen[-1] >= size:
            raise SpecError(f"kept has {chosen[-1]} of '{name}', which has {size} units: give indices below that")
        if len(chosen) != size or list(chosen) != list(range(size)):
            (width if isinstance(axes[name], Axis) else depth)[name] = chosen
    return Spec.select(width, blocks=depth)


# ---- each client for itself ----


def leading(axes: Axes, rate: Rate, *, state: Any = None, seed: int = 0, round: int = 0) -> Spec:
    """Return the first units of every axis: submodels are nested (HeteroFL, Diao et al. 2021, section 3.1)."""
    return spec_of(axes, {name: range(number) for name, number in counts(axes, rate).items()})


def rolling(axes: Axes, rate: Rate, *, state: Any = None, seed: int = 0, round: int = 0) -> Spec:
    """Return a window that moves on by one unit a round (FedRolex, Alam et al. 2022, section 3.2).

    Of an axis with K units, ``j = round mod K`` and the units after it, from K on at the beginning again. Within K rounds
    each unit is trained as often as any other. (The paper rounds the window down; this rounds up, as for every selector.)
    """
    kept = {}
    for name, number in counts(axes, rate).items():
        size = size_of(axes[name])
        kept[name] = [(round + i) % size for i in range(number)]
    return spec_of(axes, kept)


def at_random(axes: Axes, rate: Rate, *, state: Any = None, seed: int = 0, round: int = 0) -> Spec:
    """Return units drawn without replacement, anew in each round (Federated Dropout, Caldas et al. 2018)."""
    kept = {}
    for name, number in counts(axes, rate).items():
        kept[name] = random.Random(derive_seed(seed, round, name)).sample(range(size_of(axes[name])), number)
    return spec_of(axes, kept)


# ---- all clients together ----


def shared_fragments(axes: Axes, ratios: Sequence[float]) -> tuple[Spec, ...]:
    """Cut every axis into consecutive ranges by ``ratios``, one spec for each; each has a unit, however few there are.

    The ranges of an axis with as many units as fragments, or more, are disjoint: one that would be empty takes a unit from
    its neighbour. Of an axis with fewer (two heads, three fragments), each fragment has one unit, and neighbours have the
    same one. In both cases every unit is in a fragment, and a fragment is after the one before it.

    Raises:
        BadInput: a ratio that is not above 0.
    """
    bounds = _bounds(ratios)
    parts: list[dict[str, range]] = [{} for _ in ratios]
    for name in axes:
        size = size_of(axes[name])
        ranges = _filled_ranges(bounds, size) if size >= len(ratios) else _shared_units(bounds, size)
        for part, kept in zip(parts, ranges, strict=True):
            part[name] = kept
    return tuple(spec_of(axes, part) for part in parts)


def _filled_ranges(bounds: Sequence[float], size: int) -> list[range]:
    num, cuts = len(bounds) - 1, [0]
    for j in range(1, num + 1):
        cuts.append(min(max(round(bounds[j] * size), cuts[-1] + 1), size - (num - j)))
    return [range(start, stop) for start, stop in pairwise(cuts)]


def _shared_units(bounds: Sequence[float], size: int) -> list[range]:
    """Return the unit at the middle of each share, moved so that no unit is left out."""
    num, units = len(bounds) - 1, [0]
    for j in range(1, num):
        middle = int((bounds[j] + bounds[j + 1]) / 2 * size)
        units.append(min(max(middle, units[-1], size - num + j), units[-1] + 1, size - 1))
    return [range(unit, unit + 1) for unit in units]


def _bounds(ratios: Sequence[float]) -> list[float]:
    """Return where each share of [0, 1] begins, and where the last one ends."""
    for ratio in ratios:
        positive("a ratio in fragments", ratio)
    total = math.fsum(ratios)
    bounds = [min(bound / total, 1.0) for bound in accumulate(ratios, initial=0.0)]
    bounds[-1] = 1.0  # rounding must not lose the last unit
    return bounds
