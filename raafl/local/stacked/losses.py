"""Compute the cross entropy of several clients: log-softmax of all at once, each client's mean by torch's own sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from raafl.local.stacked.stacks import by_slices, outside, stack_of

_IGNORED = -100
_USUAL = {
    "weight": None,
    "size_average": None,
    "ignore_index": _IGNORED,
    "reduce": None,
    "reduction": "mean",
    "label_smoothing": 0.0,
}


def cross_entropy(num: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    """Compute `F.cross_entropy` for all clients' stacked logits, inside vmap.

    The mean loss of logits (batch, classes), with labels that are class indices, is computed for all clients at once.
    Any other form is computed client by client.
    """
    usual = len(args) == 2 and all(value is None or value == _USUAL[name] for name, value in kwargs.items())
    logits, labels = (stack_of(one) for one in args[:2]) if usual else (None, None)
    if logits is None or labels is None or logits.dim() != 3 or labels.dim() != 2 or labels.is_floating_point():
        return by_slices(F.cross_entropy, args, kwargs, num)
    if bool(labels.eq(_IGNORED).any()):
        return by_slices(F.cross_entropy, args, kwargs, num)
    with outside() as inside:
        return inside(_CrossEntropy.apply(logits, labels))


class _CrossEntropy(Function):
    """Mean cross entropy of logits (clients, n, classes) and labels (clients, n), as autograd would differentiate it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        logs = torch.log_softmax(logits, -1)
        ctx.save_for_backward(logs, labels)
        # vmap's rule, and a mean of the stack, add up in another order
        return torch.stack([F.nll_loss(*own) for own in zip(logs.unbind(0), labels.unbind(0), strict=True)])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        logs, labels = ctx.saved_tensors
        each = -(g / labels.shape[1]).view(-1, 1, 1).expand(*labels.shape, 1)
        of_logs = torch.zeros_like(logs).scatter_(2, labels.unsqueeze(-1), each)
        return torch.ops.aten._log_softmax_backward_data(of_logs, logs, -1, logs.dtype), None
