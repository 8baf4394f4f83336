"""Copy a module's structure with other tensors in place of its own, and adjust its layers' size attributes to them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm

from raafl.submodel.spec import Runs

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
    """Let hooks such as weight norm recompute the tensors that they set, for the shapes of the new parameters."""
    for hook in layer._forward_pre_hooks.values():
        name = computed_by(hook)
        if isinstance(hook, SpectralNorm):  # calling it would change its power-iteration vectors
            setattr(layer, hook.name, hook.compute_weight(layer, do_power_iteration=False))
        elif name is not None:
            hook(layer, ())


@contextmanager
def _looked_at(layer: nn.Module) -> Iterator[None]:
    """Set parametrizations to eval mode in the block: reading a weight then changes no spectral norm's state."""
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


_ATTACHED = ("_trainer", "_fabric")
"""Attributes that link a LightningModule to its runner; a small copy has another runner, so they are not copied."""


def copy_structure(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Deep-copy a module, except for the tensors in ``memo`` and the Trainer to which a LightningModule is attached.

    Attributes, or items in lists, tuples and dictionaries, that `copy.deepcopy` refuses are shared with the copy.
    """
    from raafl.trainer_stand_in import attach

    sentinel = object()
    for part in module.modules():
        for attribute in _ATTACHED:
            if part.__dict__.get(attribute) is not None:
                memo[id(part.__dict__[attribute])] = sentinel
        # a module has a dozen dictionaries of hooks, nearly always empty: copying them would take half of deepcopy's time
        memo |= {id(x): type(x)() for x in vars(part).values() if type(x) in (dict, OrderedDict, set) and not x}
        # deepcopy refuses tensors that a hook computes before each forward pass, such as the weight of `nn.utils.weight_norm`
        memo |= {id(x): x.detach() for x in vars(part).values() if isinstance(x, Tensor) and not x.is_leaf}
    small = _deep_copy(module, memo)
    for part in small.modules():
        for attribute in _ATTACHED:
            if part.__dict__.get(attribute) is sentinel:
                part.__dict__[attribute] = None
    attach(small)
    return small


def _deep_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Deep-copy a module with the ``memo`` of `copy.deepcopy`; objects that cannot be copied are shared."""
    try:
        return copy.deepcopy(module, dict(memo))
    except Exception:  # objects in a user's module may raise anything
        own = {id(x): x for x in (*module.modules(), *module.parameters(), *module.buffers())} | memo
        shared = {id(x): x for part in module.modules() for x in _uncopyable(vars(part), own)}
        if not shared:
            raise
        return copy.deepcopy(module, {**shared, **memo})


def _uncopyable(thing: object, own: dict[int, Any]) -> Iterator[Any]:
    """Yield objects in ``thing`` that `copy.deepcopy` refuses; ``own``: the module's parts by id, which it copies."""
    if id(thing) in own:
        return
    try:
        copy.deepcopy(thing, dict(own))
    except Exception:
        members = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple) else ()
        inner = [x for member in members for x in _uncopyable(member, own)]
        yield from inner or [thing]


def remade(module: nn.Module, parameter: Callable[[Tensor], Tensor], buffer: Callable[[Tensor], Tensor]) -> nn.Module:
    """Copy a module with new tensors: each parameter and buffer is replaced by the result of a function."""
    memo: dict[int, Any] = {id(p): nn.Parameter(parameter(p), p.requires_grad) for p in module.parameters()}
    memo |= {id(b): buffer(b) for b in module.buffers()}
    return copy_structure(module, memo)


def without_values(module: nn.Module) -> nn.Module:
    """Copy a module to the meta device, where tensors have no values. Non-persistent buffers are shared with the original."""
    persistent = {id(buffer) for buffer in persistent_buffers(module).values()}
    return remade(module, on_meta, lambda x: on_meta(x) if id(x) in persistent else x)


def on_meta(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape on the meta device, without values."""
    # empty_like would import sympy to answer on the meta device: 0.3 s of a client's start
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to the state dict, each once, by name."""
    transient = {
        f"{path}.{name}" if path else name
        for path, part in module.named_modules(remove_duplicate=False)
        for name in part._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in module.named_buffers() if name not in transient}


def select(tensor: Tensor, selection: Mapping[int, Runs]) -> Tensor:
    """Return a copy of the elements of a tensor that ``selection`` keeps."""
    for dim, runs in selection.items():
        tensor = torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in runs], dim)
    return tensor
