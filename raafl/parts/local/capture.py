"""Capture the representation of a batch: the input of a model's last linear layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def requiring_layer(module: nn.Module, path: str | None = None, field: str = "layer") -> Iterator[None]:
    """Return a context in which a training step runs that has to use the linear layer at ``path``; None = the last one.

    `field`: name of the method's option for the layer.

    Raises:
        BadInput: at the end, if the step has used linear layers, but not this one.
    """
    used: dict[str, None] = {}
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    handles = [
        layer.register_forward_pre_hook(lambda layer, args, name=name: used.setdefault(name))
        for name, layer in layers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    name, _ = linear_in(module, path)
    if used and name not in used:
        given = f"null, which is the last linear layer, '{name}'" if path is None else f"'{name}'"
        raise BadInput(
            f"{field} is {given}, but training_step does not use it: give one that it uses, {', '.join(used)}"
        )


class InputCapture:
    """Hook on a linear layer that stores the layer's latest input.

    `seen`: latest input of the layer, shape (samples, features); empty before the first one.
    """

    def __init__(self, module: nn.Module, path: str | None = None) -> None:
        """Attach to the layer at ``path``, or to the last linear layer if None, until `close`."""
        self.seen: Tensor = torch.empty(0)
        self._handle = linear_in(module, path)[1].register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        self.seen = (args[0] if args else kwargs["input"]).flatten(1)

    def close(self) -> None:
        """Stop capturing: remove the hook from its layer."""
        self._handle.remove()
