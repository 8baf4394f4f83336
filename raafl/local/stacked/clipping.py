"""Clip the gradients of several clients, each by its own norm, with the bits of `torch.nn.utils.clip_grad_norm_`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from raafl.local.stacked.products import Known, product

_LEAST_NORM = 1e-6  # torch's own


def clip_(known: Known, gradients: Sequence[Tensor], most: float) -> None:
    """Scale gradients in place so that no client's total norm exceeds a bound.

    `known`: record of whether one call on stacked tensors gives the same bits as one call per client, by operation
    and shapes.
    `gradients`: stacked gradients of shape (clients, ...).
    """
    if gradients:
        norms = torch.stack([_norms(known, one) for one in gradients], 1)
        factors = (most / (_norms(known, norms) + _LEAST_NORM)).clamp(max=1.0)
        for one in gradients:
            one.mul_(factors.view(-1, *(1,) * (one.dim() - 1)))


def _norms(known: Known, stack: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm
    return product(known, "norm", lambda all: norm(all.reshape(len(all), -1), dim=1), norm, stack)
