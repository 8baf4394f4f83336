"""Write changes as whole numbers modulo 2^32, whose sums are exact in any order, and read sums of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raafl.errors import BadInput

LARGEST = 2**31 - 1
"""Largest whole number of 32 bits with a sign."""

OUT_OF_RANGE = "out-of-range"
"""Reason of a refusal: an element is beyond the bound, or not finite."""


class OutOfRange(ValueError):
    """Raised if an update has an element that fixed-point numbers cannot hold: it exceeds the bound or is not finite."""


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """Fixed-point format in which several clients' changes add up without overflow: values up to ``bound``, steps ``2**-bits``.

    An element is rounded towards zero by less than one step, so that rounding never increases the norm of an update.
    """

    bound: float  # largest magnitude B of an element
    num_members: int  # largest number K of updates in a sum

    def __post_init__(self) -> None:
        if self.bound * self.num_members > LARGEST / 2:
            raise BadInput(
                f"secure_aggregation.bound is {self.bound:g} for sums of {self.num_members} updates, which do not "
                "fit into 32 bits: give a smaller bound"
            )

    @property
    def bits(self) -> int:
        """Number of binary digits after the point: the most that leave room for a sum of `num_members` values up to `bound`."""
        return math.floor(math.log2(LARGEST / (self.num_members * self.bound)))

    @property
    def step(self) -> float:
        """Distance between two neighbouring fixed-point numbers."""
        return 2.0**-self.bits

    def scale(self, values: Tensor, clip_norm: float | None = None) -> float:
        """Return the factor, at most 1, by which a change must be multiplied to clip its norm.

        `clip_norm`: largest L2 norm of ``values``; None = no clipping.

        Raises:
            OutOfRange: after clipping, an element exceeds the bound or is not finite.
        """
        wide, factor = values.double(), 1.0
        if clip_norm is not None and (norm := float(torch.linalg.vector_norm(wide))) > clip_norm:
            factor = clip_norm / norm
        # written with `not`, so that NaN is refused, too
        if wide.numel() and not float(wide.abs().max()) * factor <= self.bound:
            raise OutOfRange(
                f"an element of the update is larger than {self.bound:g} (secure_aggregation.bound), or not finite: "
                "raise that bound, or set secure_aggregation.clip_norm"
            )
        return factor

    def encode(self, values: Tensor, share: float = 1.0, scale: float = 1.0) -> Tensor:
        """Encode ``share * scale * values`` as int32 multiples of the fixed-point step, on the device of ``values``."""
        wide = values.double() if scale == 1.0 else values.double() * scale
        return (wide * (share * 2.0**self.bits)).trunc_().to(torch.int32)

    def decode(self, total: Tensor) -> Tensor:
        """Convert a sum of encoded changes back to float64."""
        return total.double() * self.step


def add_(total: Tensor, more: Tensor | np.ndarray) -> None:
    """Add int32 tensors modulo 2^32, in place, on the CPU. NumPy does it, since torch does not define what an overflow gives."""
    words = total.numpy().view(np.uint32)
    other = more.numpy() if isinstance(more, Tensor) else more
    np.add(words, other.view(np.uint32), out=words)
