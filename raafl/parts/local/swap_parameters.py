"""A module with other values or attributes for a while, for methods that look at a batch from another model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from raafl.submodel import FlatTensors


@contextmanager
def patched(attributes: Mapping[tuple[nn.Module, str], Any]) -> Iterator[None]:
    """Give modules other attributes within this context, such as a ``forward``."""
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
    """Make attributes, for `patched`, by which nobody hears what ``module`` logs."""
    return {(module, name): _ignore for name in ("log", "log_dict")}


@contextmanager
def at(module: nn.Module, values: FlatTensors) -> Iterator[None]:
    """Give what trains in ``module`` the ``values`` within this context; what it logs is dropped, what it counts undone.

    No graph from outside may be gone back through within, nor one from within outside: parameters lie elsewhere meanwhile.
    """
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


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None
