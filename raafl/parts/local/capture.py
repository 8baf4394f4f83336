"""Capture the representation of a batch: the input of a model's last linear layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from raafl.errors import BadInput


def linear_in(module: nn.Module, path: str | None = None) -> tuple[str, nn.Linear]:
    """Return the name and module of the linear layer at ``path``; None = the model's last linear layer.

    Raises:
        BadInput: the model has no such layer.
    """
    linear = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    if not linear or path not in (None, *linear):
        if not linear:
            raise BadInput(f"{type(module).__name__} has no linear layer: use a model that has one")
        raise BadInput(
            f"layer is {path}, which is no linear layer of {type(module).__name__}: give {', '.join(linear)}"
        )
    name = path or list(linear)[-1]
    return name, linear[name]


class InputCapture:
    """Hook on a linear layer that stores the layer's latest input.

    Attributes:
        seen: latest input of the layer, shape (samples, features); empty before the first one.
    """

    def __init__(self, module: nn.Module, path: str | None = None) -> None:
        """Attach to the layer at ``path``, or to the last linear layer if None, until `close`."""
        self.seen: Tensor = torch.empty(0)
        self._handle = linear_in(module, path)[1].register_forward_pre_hook(self._see)

    def _see(self, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.seen = args[0].flatten(1)

    def close(self) -> None:
        """Stop capturing: remove the hook from its layer."""
        self._handle.remove()
