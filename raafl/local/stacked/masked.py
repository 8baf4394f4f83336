"""Compute masked cross entropy (`raafl.local.masked`) of several clients at once, each with its own classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from raafl.core.masked_loss import HasLogits, logits_of
from raafl.local.stacked.stacks import outside


class _Masking:
    """A forward hook that sets the logits of classes that a client has not to 0."""

    def __init__(self, classes: Sequence[Set[int] | None]) -> None:
        self._classes = classes
        self._clients: Sequence[int] = ()
        self.left: list[list[int]] = [[] for _ in classes]

    @contextmanager
    def choose(self, clients: Sequence[int]) -> Iterator[None]:
        """Return a context for a forward pass of these clients, in the order of the stack.

        For each client, the classes without samples are masked.
        """
        self._clients = clients
        yield

    def __call__(self, module: nn.Module, args: object, output: Tensor | HasLogits) -> object:
        logits = logits_of(output)
        if logits is None:
            return output
        num = logits.shape[1]
        absent = torch.zeros(len(self._clients), num, dtype=torch.bool)
        for place, client in enumerate(self._clients):
            classes = self._classes[client]
            if classes and min(classes) >= 0 and max(classes) < num and len(classes) < num:
                self.left[client] = sorted(classes)
                absent[place] = True
                absent[place, self.left[client]] = False
        with outside() as inside:
            mask = inside(absent)
        zeroed = logits.masked_fill(mask, 0.0)
        if isinstance(output, Tensor):
            return zeroed
        output.logits = zeroed
        return output


@contextmanager
def masked_together(module: nn.Module, classes: Sequence[Set[int] | None]) -> Iterator[_Masking]:
    """Return a context that keeps, for each client, the classes without samples out of the loss: their logits are 0.

    It yields an object whose method `choose` says for which clients the next forward pass is computed.

    `classes`: classes of each client's samples; None = unknown, so nothing is masked.
    """
    masking = _Masking(classes)
    if not any(classes):
        yield masking
        return
    handle = module.register_forward_hook(masking)
    try:
        yield masking
    finally:
        handle.remove()
