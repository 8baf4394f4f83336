"""What layers say of their own sizes, brought in line with smaller tensors: by type, since no call hands those numbers on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Resize = Callable[[Any], None]
"""``resize(layer)``: the layer has its small tensors and the large attributes; set the attributes."""

RESIZES: dict[type[nn.Module] | str, Resize] = {}
"""By type, or its dotted name where its package need not be there; a subclass has that of its nearest base."""

OUTPUTS: dict[type[nn.Module], tuple[str, int]] = {
    nn.Linear: ("weight", 0), nn.Embedding: ("weight", 1), nn.EmbeddingBag: ("weight", 1),
    nn.Conv1d: ("weight", 0), nn.Conv2d: ("weight", 0), nn.Conv3d: ("weight", 0),
    nn.ConvTranspose1d: ("weight", 1), nn.ConvTranspose2d: ("weight", 1), nn.ConvTranspose3d: ("weight", 1),
}  # fmt: skip
"""Parameter and dimension that make the output's features."""


def resizes(*types: type[nn.Module] | str) -> Callable[[Resize], Resize]:
    """Register the decorated function for these types."""

    def add(function: Resize) -> Resize:
        RESIZES.update(dict.fromkeys(types, function))
        return function

    return add


def resize(layer: nn.Module) -> None:
    """Set the size attributes of a layer whose tensors have been replaced by smaller ones."""
    for base in type(layer).__mro__:
        found = RESIZES.get(base) or RESIZES.get(f"{base.__module__}.{base.__qualname__}")
        if found is not None:
            found(layer)
            return


def produces(layer: nn.Module) -> tuple[str, int] | None:
    """Return the parameter and dimension that make the layer's output features; None for one that passes an axis on."""
    if isinstance(layer, nn.modules.conv._ConvNd) and layer.groups > 1:
        return None  # each output channel has its own inputs
    found = next((base for base in type(layer).__mro__ if base in OUTPUTS), None)
    return OUTPUTS[found] if found is not None and type(layer).forward is found.forward else None


@resizes(nn.Linear)
def _linear(layer: nn.Linear) -> None:
    layer.out_features, layer.in_features = layer.weight.shape


@resizes(nn.modules.conv._ConvNd)
def _convolution(layer: Any) -> None:
    out, inner = (1, 0) if layer.transposed else (0, 1)
    if layer.groups > 1:
        channels = layer.in_channels if layer.transposed else layer.out_channels
        layer.groups = layer.groups * layer.weight.shape[0] // channels
    layer.out_channels = layer.weight.shape[out] * (layer.groups if layer.transposed else 1)
    layer.in_channels = layer.weight.shape[inner] * (1 if layer.transposed else layer.groups)


@resizes(nn.Embedding, nn.EmbeddingBag)
def _embedding(layer: Any) -> None:
    layer.num_embeddings, layer.embedding_dim = layer.weight.shape


@resizes(nn.modules.batchnorm._NormBase)
def _batch_norm(layer: Any) -> None:
    tensor = next((t for t in (layer.weight, layer.running_mean, layer.bias) if t is not None), None)
    layer.num_features = layer.num_features if tensor is None else len(tensor)


@resizes(nn.GroupNorm)
def _group_norm(layer: nn.GroupNorm) -> None:
    if layer.weight is not None:
        per_group = layer.num_channels // layer.num_groups
        layer.num_channels = layer.weight.shape[0]
        layer.num_groups = layer.num_channels // per_group


@resizes(nn.LayerNorm, nn.RMSNorm)
def _layer_norm(layer: Any) -> None:
    if layer.weight is not None:
        layer.normalized_shape = tuple(layer.weight.shape)


@resizes(nn.PReLU)
def _prelu(layer: nn.PReLU) -> None:
    layer.num_parameters = layer.weight.numel()


@resizes(nn.RNNCellBase)
def _cell(layer: Any) -> None:
    layer.input_size, layer.hidden_size = layer.weight_ih.shape[1], layer.weight_hh.shape[1]
