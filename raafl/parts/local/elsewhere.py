"""A module with other values for a while, for methods that look at a batch from another model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from raafl.submodel import FlatTensors

_LOGS = ("log", "log_dict")


@contextmanager
def at(module: nn.Module, values: FlatTensors) -> Iterator[None]:
    """Give what trains in ``module`` the ``values`` within this context; what it logs is dropped, what it counts undone.

    No graph from outside may be gone back through within, nor one from within outside: parameters lie elsewhere meanwhile.
    """
    parameters = [(p, p.data, values[name]) for name, p in module.named_parameters() if name in values]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    logs: dict[str, Any] = {name: module.__dict__.pop(name) for name in _LOGS if name in module.__dict__}
    module.__dict__.update(dict.fromkeys(_LOGS, _ignore))
    try:
        for parameter, own, other in parameters:
            parameter.data = other.to(own.device)
        yield
    finally:
        for parameter, own, _ in parameters:
            parameter.data = own
        for buffer, before in buffers:
            buffer.copy_(before)
        for name in _LOGS:
            del module.__dict__[name]
        module.__dict__.update(logs)


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None
