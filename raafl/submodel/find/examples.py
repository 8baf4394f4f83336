"""Generate a batch for a model that came without one, from what its first layer reads, by trying."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

PIXELS = (*dict.fromkeys((8, 28, 32, 64, 96, 224, *range(4, 33), 128, 256)),)
"""Sides of pictures, the most likely first."""

LENGTHS = (9, 4, 2, 3, 5, 8, 16)
"""Of sequences."""

_FIRST: tuple[Any, ...] = (nn.modules.conv._ConvNd, (nn.Embedding, nn.EmbeddingBag), nn.Linear)


def made_batch(module: nn.Module, runs: Callable[[Mapping[str, Any]], bool]) -> Mapping[str, Any] | None:
    """Generate input for a model without example data, by trial; None if nothing worked."""
    own = getattr(module, "example_input_array", None)
    names = _required(module)
    if own is not None and names:
        values = own if isinstance(own, tuple) else (own,)
        return own if isinstance(own, Mapping) else dict(zip(names, values, strict=False))
    return next((batch for batch in _options(module, names) if runs(batch)), None)


def _options(module: nn.Module, names: list[str]) -> Iterator[Mapping[str, Any]]:
    hub = getattr(module, "dummy_inputs", None)  # of a model of transformers
    if getattr(module, "main_input_name", None) == "input_ids":
        yield {"input_ids": torch.ones(2, 9, dtype=torch.long), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    if isinstance(hub, Mapping):
        yield hub
    names = names or [getattr(module, "main_input_name", "x")]
    layers = [part for part in module.modules() if list(part.parameters(recurse=False))]
    firsts = (next((layer for layer in layers if isinstance(layer, kind)), None) for kind in _FIRST)
    for layer in dict.fromkeys(layer for layer in (*layers[:1], *firsts) if layer is not None):
        for value in _values(layer):
            yield dict.fromkeys(names, value)
    config: Any = getattr(module, "config", None)
    if hasattr(config, "image_size"):
        yield {"pixel_values": torch.zeros(2, getattr(config, "num_channels", 3), config.image_size, config.image_size)}


def _values(first: nn.Module) -> Iterator[Tensor]:
    """Yield inputs that a layer may read."""
    if isinstance(first, nn.Embedding | nn.EmbeddingBag):
        yield from (torch.ones(2, length, dtype=torch.long) for length in LENGTHS)
    elif isinstance(first, nn.modules.conv._ConvNd):
        for side in PIXELS:
            yield torch.zeros(2, first.in_channels, *[side] * (first.weight.dim() - 2), dtype=first.weight.dtype)
    else:
        weight = next((p for p in first.parameters(recurse=False) if p.dim() > 1), None)
        if weight is not None:
            yield torch.zeros(2, weight.shape[1], dtype=weight.dtype)
            yield from (torch.zeros(2, length, weight.shape[1], dtype=weight.dtype) for length in LENGTHS)


def _required(module: nn.Module) -> list[str]:
    """Return the names of the arguments that the forward cannot do without."""
    forward = inspect.signature(module.forward)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in forward.parameters.values() if p.kind in kinds and p.default is inspect.Parameter.empty]
