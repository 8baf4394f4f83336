"""Masked cross entropy (HeteroFL, Diao et al. 2021, section 3.2): a client says nothing about classes it does not have."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from raafl.core.masked_loss import logits_of


@contextmanager
def masked(module: nn.Module, classes: Set[int] | None) -> Iterator[list[int]]:
    """Within this context the logits of absent classes that ``module``'s forward gives are 0, and have no gradient.

    Yields the list of the classes that were left, ascending; it fills at the first forward pass, and stays empty where
    nothing is masked.

    Acts on logits of shape (batch, num_classes), as a tensor or as the attribute ``logits``; what is not that, or has no
    such classes, is left as it is. With every class present nothing changes, to the last bit.

    ``classes`` are those of the client's samples; None = not known, and nothing is masked.
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


def _masked(output: Any, classes: Set[int], left: list[int]) -> Any:
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
