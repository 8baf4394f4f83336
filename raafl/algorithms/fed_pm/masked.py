"""Mask frozen weights at random, with a gradient straight through the draw."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Masked(torch.autograd.Function):
    """Autograd function ``w * m`` with ``m ~ Bernoulli(sigmoid(score))`` and a straight-through gradient, dm/dp = 1."""

    @staticmethod
    def forward(ctx: Any, score: Tensor, uniform: Tensor, negative: Tensor, sigma: float) -> Tensor:
        """Return the masked weights, of the same shape as ``score``.

        Args:
            ctx: context of the autograd function.
            score: logit of each weight's probability.
            uniform: random numbers in [0, 1), of the same shape as ``score``.
            negative: True where the weight is -sigma, of the same shape as ``score``.
            sigma: absolute value of every weight.
        """
        ctx.save_for_backward(score, negative)
        ctx.sigma = sigma
        return (uniform < torch.sigmoid(score)).to(score.dtype).mul_(sigma).mul_(signs_of(negative, score.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the score, ``gradient * w * p (1 - p)``, and None for the other arguments."""
        score, negative = ctx.saved_tensors
        p = torch.sigmoid(score)
        return gradient * signs_of(negative, score.dtype) * ctx.sigma * p * (1 - p), None, None, None


def signs_of(negative: Tensor, dtype: torch.dtype) -> Tensor:
    """Return -1 where ``negative`` is True, else 1."""
    return 1 - 2 * negative.to(dtype)
