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
"""Why a client's update is refused that has an element beyond the bound, or one that is not finite."""


class OutOfRange(ValueError):
    """Raised if an update has an element that fixed point cannot hold: it is beyond the bound, or not finite."""


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """Fixed-point numbers up to ``bound`` in steps of ``2**-bits``, of which ``num_members`` add up without overflow.

    An element is rounded towards zero, so that no bound on an update's norm is exceeded by rounding; its error is below one step.

    Attributes:
        bound: largest magnitude of an element (B).
        num_members: largest number of updates in a sum (K).
    """

    bound: float
    num_members: int

    def __post_init__(self) -> None:
        if self.bound * self.num_members > LARGEST / 2:
            raise BadInput(
                f"secure_aggregation.bound is {self.bound:g} for sums of {self.num_members} updates, which 32 bits do not hold: "
                "give a smaller bound"
            )

    @property
    def bits(self) -> int:
        """Number of binary places after the point: ``floor(log2((2^31 - 1) / (K B)))``."""
        return math.floor(math.log2(LARGEST / (self.num_members * self.bound)))

    @property
    def step(self) -> float:
        """Distance between two neighbouring fixed-point numbers."""
        return 2.0**-self.bits

    def scale(self, values: Tensor, clip_norm: float | None = None) -> float:
        """Return the factor, at most 1, that clips a change to a norm.

        Args:
            values: the client's change, one flat buffer.
            clip_norm: L2 norm to which ``values`` are scaled down; None = no clipping.

        Raises:
            OutOfRange: an element is beyond the bound after clipping, or not finite.
        """
        wide, factor = values.double(), 1.0
        if clip_norm is not None and (norm := float(torch.linalg.vector_norm(wide))) > clip_norm:
            factor = clip_norm / norm
        if wide.numel() and not float(wide.abs().max()) * factor <= self.bound:  # NaN is not
            raise OutOfRange(f"an element is beyond {self.bound:g} (secure_aggregation.bound), or not finite")
        return factor

    def encode(self, values: Tensor, share: float = 1.0, scale: float = 1.0) -> Tensor:
        """Return ``share * scale * values`` as whole numbers of steps, int32, on the same device.

        Args:
            values: the client's change, one flat buffer, which `scale` has accepted.
            share: weight of the client as a share of the largest weight in the sum, from 0 to 1.
            scale: factor that `scale` returned for these values.
        """
        wide = values.double() if scale == 1.0 else values.double() * scale
        return (wide * (share * 2.0**self.bits)).trunc_().to(torch.int32)

    def decode(self, total: Tensor) -> Tensor:
        """Convert a sum of encoded changes back to float64."""
        return total.double() * self.step


def add_(total: Tensor, more: Tensor | np.ndarray) -> None:
    """Add int32 tensors modulo 2^32, in place, on the CPU. NumPy does it, since torch does not define an overflow's result."""
    words = total.numpy().view(np.uint32)
    other = more.numpy() if isinstance(more, Tensor) else more
    np.add(words, other.view(np.uint32), out=words)
