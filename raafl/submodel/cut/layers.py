"""Adjust the size attributes of layers to smaller tensors, by layer type, where no call passes those numbers on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm

Resize = Callable[[Any], None]
"""``resize(layer)``: the layer has its small tensors and the large attributes; set the attributes."""

RESIZES: dict[type[nn.Module] | str, Resize] = {}
"""Function that resizes a layer, by its type, or by the type's dotted name if the package is optional; subclasses inherit it."""

OUTPUTS: dict[type[nn.Module], tuple[str, int]] = {
    nn.Linear: ("weight", 0),
    nn.Embedding: ("weight", 1),
    nn.EmbeddingBag: ("weight", 1),
    nn.Conv1d: ("weight", 0),
    nn.Conv2d: ("weight", 0),
    nn.Conv3d: ("weight", 0),
    nn.ConvTranspose1d: ("weight", 1),
    nn.ConvTranspose2d: ("weight", 1),
    nn.ConvTranspose3d: ("weight", 1),
}
"""Parameter and dimension that determine a layer's number of output features, by type."""


def resizes(*types: type[nn.Module] | str) -> Callable[[Resize], Resize]:
    """Register the decorated function, which adjusts size attributes of layers of these types after they have shrunk."""

    def add(function: Resize) -> Resize:
        RESIZES.update(dict.fromkeys(types, function))
        return function

    return add


def resize(layer: nn.Module) -> None:
    """Adjust the size attributes of a layer, such as ``out_features``, to its current tensors."""
    _compute_anew(layer)
    names = (key for pair in zip(type(layer).__mro__, type_names(layer), strict=True) for key in pair)
    if (found := next((RESIZES[key] for key in names if key in RESIZES), None)) is not None:
        with _looked_at(layer):
            found(layer)


def computed_by(hook: object) -> str | None:
    """Return the name of the tensor that a hook of `torch.nn.utils` recomputes before each forward pass; None = there is none.

    Such hooks are those of `weight_norm`, `spectral_norm` and `prune`.
    """
    name = getattr(hook, "name", getattr(hook, "_tensor_name", None))
    return name if type(hook).__module__.startswith("torch.nn.utils.") else None


@torch.no_grad()
def _compute_anew(layer: nn.Module) -> None:
    """Let hooks such as weight norm recompute their tensors, so that these get the shapes of the layer's new parameters."""
    for hook in layer._forward_pre_hooks.values():
        name = computed_by(hook)
        if isinstance(hook, SpectralNorm):  # calling it would change its power-iteration vectors
            setattr(layer, hook.name, hook.compute_weight(layer, do_power_iteration=False))
        elif name is not None:
            hook(layer, ())


@contextmanager
def _looked_at(layer: nn.Module) -> Iterator[None]:
    """Put parametrizations into eval mode, so that reading a weight does not change the vectors of a spectral norm."""
    parts = list(layer.parametrizations.modules()) if parametrize.is_parametrized(layer) else []  # type: ignore[union-attr]
    modes = [part.training for part in parts]
    try:
        for part in parts:
            part.training = False
        yield
    finally:
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode


def produces(layer: nn.Module) -> tuple[str, int] | None:
    """Return the parameter and dimension along which a layer's output features lie, such as ``("weight", 0)``; else None."""
    if isinstance(layer, nn.modules.conv._ConvNd) and layer.groups > 1:
        return None  # in a grouped convolution each output channel reads its own inputs
    found = next((base for base in type(layer).__mro__ if base in OUTPUTS), None)
    return OUTPUTS[found] if found is not None and type(layer).forward is found.forward else None


def _from(**sizes: tuple[str, int]) -> Resize:
    """Return a function that sets each named attribute of a layer to the size of a dimension of one of its tensors."""

    def set_(layer: object) -> None:
        for attribute, (tensor, dim) in sizes.items():
            setattr(layer, attribute, getattr(layer, tensor).shape[dim])

    return set_


resizes(nn.Linear)(_from(out_features=("weight", 0), in_features=("weight", 1)))
resizes(nn.Embedding, nn.EmbeddingBag)(_from(num_embeddings=("weight", 0), embedding_dim=("weight", 1)))
resizes(nn.PReLU)(_from(num_parameters=("weight", 0)))
resizes(nn.RNNCellBase)(_from(input_size=("weight_ih", 1), hidden_size=("weight_hh", 1)))


@resizes(nn.modules.conv._ConvNd)
def _convolution(layer: nn.modules.conv._ConvNd) -> None:
    out, inner = (1, 0) if layer.transposed else (0, 1)
    if layer.groups > 1:
        channels = layer.in_channels if layer.transposed else layer.out_channels
        layer.groups = layer.groups * layer.weight.shape[0] // channels
    layer.out_channels = layer.weight.shape[out] * (layer.groups if layer.transposed else 1)
    layer.in_channels = layer.weight.shape[inner] * (1 if layer.transposed else layer.groups)


@resizes(nn.modules.batchnorm._NormBase)
def _batch_norm(layer: nn.modules.batchnorm._NormBase) -> None:
    tensor = next((t for t in (layer.weight, layer.running_mean, layer.bias) if t is not None), None)
    layer.num_features = layer.num_features if tensor is None else len(tensor)


@resizes(nn.GroupNorm)
def _group_norm(layer: nn.GroupNorm) -> None:
    if layer.weight is not None:
        per_group = layer.num_channels // layer.num_groups
        layer.num_channels = layer.weight.shape[0]
        layer.num_groups = layer.num_channels // per_group


@resizes(nn.LayerNorm, nn.RMSNorm)
def _layer_norm(layer: nn.LayerNorm | nn.RMSNorm) -> None:
    if layer.weight is not None:
        layer.normalized_shape = tuple(layer.weight.shape)


def adopt(layer: nn.RNNBase) -> None:
    """Refresh a recurrent layer's internal list of weights after its tensors were replaced."""
    layer.__dict__["flatten_parameters"] = _stays  # it would move the weights into a storage of cuDNN's
    layer._init_flat_weights()


def _stays() -> None:
    return None


@resizes(nn.RNNBase)
def _recurrent(layer: Any) -> None:
    layer.input_size = layer.weight_ih_l0.shape[1]
    gates = layer.weight_ih_l0.shape[0] // layer.weight_hh_l0.shape[1] if not layer.proj_size else 4
    layer.hidden_size = layer.weight_ih_l0.shape[0] // gates
    layer.proj_size = layer.weight_hr_l0.shape[0] if layer.proj_size else 0
    adopt(layer)


PRETRAINED = "transformers.modeling_utils.PreTrainedModel"
TORCHVISION = "torchvision.models.vision_transformer.VisionTransformer"


def hugging_face(names: str) -> list[str]:
    """Return the full names of types in transformers, which the user need not have installed."""
    split = [name.split(".") for name in names.split()]
    return [f"transformers.models.{family}.modeling_{family}.{kind}" for family, kind in split]


def type_names(module: nn.Module) -> list[str]:
    """Return the dotted names of a module's type and of its base classes, nearest first."""
    return [f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__]


def is_packaged(module: nn.Module) -> bool:
    """Check whether a module is a whole transformer model from another package."""
    return not {PRETRAINED, TORCHVISION}.isdisjoint(type_names(module))
