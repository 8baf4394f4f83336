"""Run a batch with other tensors in the place of a module's parameters, through which gradients flow back to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from raafl.errors import BadInput


@contextmanager
def with_tensors(module: nn.Module, tensors: Mapping[str, Tensor], *, keep_buffers: bool = False) -> Iterator[None]:
    """Return a context in which a module uses the given ``tensors`` as its parameters; gradients flow back to them.

    The tensors may be computed, such as products of weights and masks. Backward may also be called after the context
    ends.

    Raises:
        BadInput: a tensor would replace a parameter of a recurrent layer (RNN, LSTM or GRU), which is not supported.
    """
    places: list[tuple[Any, str, Tensor]] = []
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        layer = module.get_submodule(path)
        if isinstance(layer, nn.RNNBase):
            raise BadInput(
                f"'{name}' belongs to a recurrent layer, whose weights cannot be masked: use another model or method"
            )
        places.append((layer, leaf, tensor))
    own = [layer._parameters[leaf] for layer, leaf, _ in places]
    # use copies: the backward pass needs a batch norm's buffers, and fails if they are restored in place before
    buffers = [] if keep_buffers else [(part, dict(part._buffers)) for part in module.modules() if part._buffers]
    try:
        for part, _ in buffers:
            part._buffers.update({name: None if one is None else one.clone() for name, one in part._buffers.items()})
        for layer, leaf, tensor in places:
            layer._parameters[leaf] = tensor
        yield
    finally:
        for (layer, leaf, _), parameter in zip(places, own, strict=True):
            layer._parameters[leaf] = parameter
        for part, before in buffers:
            part._buffers.update(before)
