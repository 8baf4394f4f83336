"""Masked cross entropy (HeteroFL, Diao et al. 2021, section 3.2): ignore the classes of which a client has no samples."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from raafl.core.masked_loss import HasLogits, logits_of


@contextmanager
def masked(module: nn.Module, classes: Set[int] | None) -> Iterator[list[int]]:
    """Return a context that keeps classes without samples out of the loss: their logits are 0 and have no gradient.

    The context yields a list, which the first forward pass fills with the classes that have samples, in ascending
    order; if all classes have samples, it stays empty and nothing changes. The module must return logits of shape
    (batch, num_classes), as a tensor or as the attribute ``logits``; other outputs stay unchanged.

    `classes`: classes of the client's samples; None = unknown, so nothing is masked.
    """
    left: list[int] = []
    if not classes:
        yield left
        return
    handle = module.register_forward_hook(lambda _, args, output: _masked(output, classes, left))
    try:
        yield left
    finally:
        handle.remove()


def _masked(output: Tensor | HasLogits, classes: Set[int], left: list[int]) -> object:
    logits = logits_of(output)
    if logits is None:
        return output
    num = logits.shape[1]
    if min(classes) < 0 or max(classes) >= num or len(classes) == num:
        return output
    left[:] = sorted(classes)
    absent = torch.ones(num, dtype=torch.bool)
    absent[left] = False
    zeroed = logits.masked_fill(absent.to(logits.device), 0.0)
    if isinstance(output, Tensor):
        return zeroed
    output.logits = zeroed
    return output
