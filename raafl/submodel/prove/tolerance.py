"""Decide whether two steps differ by more than rounding explains.

A difference is allowed up to a fixed share of the largest value. Beyond it, the rounding of the very step is measured: some models
amplify it, such as deep ones with batch norms, and a gradient that should be 0 consists of nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Largest difference, as a share of the largest value; float32 is for code that does not run in double precision."""

FORCED = 1e-6
"""The tolerance where code turns doubles into float32 in between."""

CAPS = {torch.float64: 1e-4, torch.float32: 1e-2}
"""Share of the largest value beyond which no difference is taken for rounding."""

DRAWS = 3
"""Steps by which rounding is measured."""

MOVED = 1
"""Units in the last place by which each parameter is moved for that, up or down by chance."""

TIMES = 32
"""Differences are allowed up to so many times what that changes: rounding happens in operations without parameters, too."""

LEAST = 64
"""Units in the last place of the uncut model's largest gradient that are allowed in each gradient."""


@dataclass
class Rounding:
    """Measured effect of rounding on the tensors of a step; without arguments, rounding that was not measured."""

    cap: float = 0.0  # largest share of a tensor's largest value that is allowed
    # largest absolute change of each tensor, by its name in messages
    changes: dict[str, float] = field(default_factory=dict)

    def add(self, one: Iterable[tuple[str, Tensor]], other: Iterable[tuple[str, Tensor]]) -> None:
        """Add the changes between two runs of the same step."""
        for (what, before), (_, after) in zip(one, other, strict=False):
            if before.shape == after.shape and before.numel():
                self.changes[what] = max(self.changes.get(what, 0.0), float((before - after).abs().max()))

    def allows(self, what: str, gap: float, scale: float) -> bool:
        """Check whether rounding explains a difference."""
        return gap <= min(TIMES * self.changes.get(what, 0.0), self.cap * scale)


@dataclass(frozen=True, slots=True)
class Bound:
    """Largest difference that is allowed between two tensors."""

    tolerance: float  # share of the largest value
    floor: float = 1e-6  # smallest value that counts as the largest one
    rounding: Rounding = field(default_factory=Rounding)  # measured rounding, which may exceed that share
    least: float = 0.0  # absolute difference that is allowed in any case


def apart(what: str, one: Tensor, other: Tensor, bound: Bound) -> Iterator[str]:
    """Yield in words that two tensors differ by more than allowed, if they do."""
    if one.shape != other.shape:
        yield f"{what} has the shape {tuple(one.shape)}, not {tuple(other.shape)}"
        return
    if not one.numel():
        return
    if not bool(torch.isfinite(one).all() and torch.isfinite(other).all()):  # max(0, nan) is 0
        same = torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)) and math.isinf(bound.tolerance)
        if not same:
            yield f"{what} is not finite"
        return
    scale = max(float(other.abs().max()), bound.floor)
    gap = float((one - other).abs().max())
    if gap > max(bound.tolerance * scale, bound.least) and not bound.rounding.allows(what, gap, scale):
        yield f"{what} differs by {gap / scale:.2g}" if scale else f"{what} is not 0"
