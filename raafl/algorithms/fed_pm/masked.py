"""Mask frozen weights at random, with a gradient straight through the draw."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Masked(torch.autograd.Function):
    """Autograd function that masks weights at random: ``w * m`` with ``m ~ Bernoulli(sigmoid(score))``.

    The gradient passes straight through the draw: dm/dp = 1.
    """

    @staticmethod
    def forward(ctx: Any, score: Tensor, uniform: Tensor, negative: Tensor, sigma: float) -> Tensor:
        """Draw a mask and return the masked weights, of the same shape as ``score``.

        Args:
            ctx: context of the autograd function.
            score: logit of the probability that a weight is used.
            uniform: random numbers in [0, 1) that decide the draw, of the same shape as ``score``.
            negative: mask of the weights that are -sigma, of the same shape as ``score``; the others are +sigma.
            sigma: absolute value of all weights.
        """
        ctx.save_for_backward(score, negative)
        ctx.sigma = sigma
        return (uniform < torch.sigmoid(score)).to(score.dtype).mul_(sigma).mul_(signs_of(negative, score.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the score, ``gradient * w * p (1 - p)``, for a weight w used with probability p = sigmoid(score).

        The other inputs of `forward` get None.
        """
        score, negative = ctx.saved_tensors
        p = torch.sigmoid(score)
        return gradient * signs_of(negative, score.dtype) * ctx.sigma * p * (1 - p), None, None, None


def signs_of(negative: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor with -1 where ``negative`` is True and 1 elsewhere."""
    return 1 - 2 * negative.to(dtype)
