"""Masked cross entropy (HeteroFL, Diao et al. 2021, section 3.2): ignore the classes of which a client has no samples."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from raafl.core.masked_loss import HasLogits, logits_of


@contextmanager
def masked(module: nn.Module, classes: Set[int] | None, masks: dict[int, Tensor] | None = None) -> Iterator[list[int]]:
    """Return a context that keeps classes without samples out of the loss: their logits are 0 and have no gradient.

    The context yields a list, which the first forward pass fills with the classes that have samples, in ascending
    order; if all classes have samples, it stays empty and nothing changes. The module must return logits of shape
    (batch, num_classes), as a tensor or as the attribute ``logits``; other outputs stay unchanged.

    `classes`: classes of the client's samples; None = unknown, so nothing is masked.
    `masks`: masks by number of classes, on the module's device, which stay where they are from task to task, since
    graphs read them; those of earlier tasks are rewritten. None = masks of this context alone.
    """
    left: list[int] = []
    if not classes:
        yield left
        return
    masks = {} if masks is None else masks
    for num, mask in masks.items():
        mask.copy_(_absent(num, classes, left))
    handle = module.register_forward_hook(lambda _, args, output: _masked(output, classes, left, masks))
    try:
        yield left
    finally:
        handle.remove()


def _absent(num: int, classes: Set[int], left: list[int]) -> Tensor:
    """Return the mask of classes without samples, and put the others into ``left``; where no class is to be masked, none is."""
    absent = torch.zeros(num, dtype=torch.bool)
    if min(classes) >= 0 and max(classes) < num and len(classes) < num:
        left[:] = sorted(classes)
        absent.fill_(True)[left] = False
    return absent


def _masked(output: Tensor | HasLogits, classes: Set[int], left: list[int], masks: dict[int, Tensor]) -> object:
    logits = logits_of(output)
    if logits is None:
        return output
    num = logits.shape[1]
    if num not in masks:
        masks[num] = _absent(num, classes, left).to(logits.device)
    if not left and not logits.is_cuda:  # on a GPU each task does the same, so that one graph serves all
        return output
    zeroed = logits.masked_fill(masks[num], 0.0)
    if isinstance(output, Tensor):
        return zeroed
    output.logits = zeroed
    return output
