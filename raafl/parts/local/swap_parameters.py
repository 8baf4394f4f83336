"""Run a user's module with other parameters or attributes, differentiably or not, and capture what enters a layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from raafl.errors import BadInput
from raafl.submodel import FlatTensors


@contextmanager
def patched(attributes: Mapping[tuple[nn.Module, str], Any]) -> Iterator[None]:
    """Return a context in which the given attributes of modules are replaced, such as ``forward``."""
    own = {(module, name): module.__dict__.get(name) for module, name in attributes}
    try:
        for (module, name), value in attributes.items():
            module.__dict__[name] = value
        yield
    finally:
        for (module, name), value in own.items():
            if value is None:
                del module.__dict__[name]
            else:
                module.__dict__[name] = value


def quiet(module: nn.Module) -> dict[tuple[nn.Module, str], Any]:
    """Return attribute replacements for `patched` that turn off logging in ``module``."""
    return {(module, name): _ignore for name in ("log", "log_dict")}


@contextmanager
def with_parameters(module: nn.Module, values: FlatTensors) -> Iterator[None]:
    """Return a context in which a module's trained parameters have other ``values``; buffers are restored on exit.

    Logging is off within the context. Do not call backward across its boundary, since parameters point to other memory
    inside.
    """
    # swapping `.data` keeps the references of optimizers and hooks, and needs no copy back
    parameters = [(p, p.data, values[name]) for name, p in module.named_parameters() if name in values]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        for parameter, own, other in parameters:
            parameter.data = other.to(own.device)
        with patched(quiet(module)):
            yield
    finally:
        for parameter, own, _ in parameters:
            parameter.data = own
        for buffer, before in buffers:
            buffer.copy_(before)


def _ignore(*args: object, **kwargs: object) -> None:
    return None


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
        """Register a hook that records the input of the layer at ``path`` (None = the last linear layer) until `close`."""
        self.seen: Tensor = torch.empty(0)
        self._handle = linear_in(module, path)[1].register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        self.seen = (args[0] if args else kwargs["input"]).flatten(1)

    def close(self) -> None:
        """Stop capturing: remove the hook from its layer."""
        self._handle.remove()


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
    # store copies, since the backward pass needs a batch norm's buffers after they are restored here
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
