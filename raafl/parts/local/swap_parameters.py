"""Swap a module's parameters or attributes within a context, for methods that run a batch through another model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

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
    # `.data` is swapped, not the parameters: optimizers and hooks keep their references, and no values are copied back
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
