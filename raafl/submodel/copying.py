"""Copies of a module's structure, whose tensors are other ones."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

_ATTACHED = ("_trainer", "_fabric")
"""Attributes by which a LightningModule holds on to what runs it; a small copy is not run by that."""


def copy_structure(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Deep-copy everything but the tensors in ``memo`` and what a LightningModule is attached to."""
    sentinel = object()
    for part in module.modules():
        for attribute in _ATTACHED:
            if part.__dict__.get(attribute) is not None:
                memo[id(part.__dict__[attribute])] = sentinel
    small = copy.deepcopy(module, memo)
    for part in small.modules():
        for attribute in _ATTACHED:
            if part.__dict__.get(attribute) is sentinel:
                part.__dict__[attribute] = None
    return small
