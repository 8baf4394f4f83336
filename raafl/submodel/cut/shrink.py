"""Build small dense modules: the user's own module with smaller tensors, all views into one flat buffer."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raafl.errors import BadInput
from raafl.submodel.cut.layers import copy_structure, select
from raafl.submodel.cut.sizes import Sizes, adopt, produces, resize, resizes
from raafl.submodel.declared import above
from raafl.submodel.flat import FlatTensors
from raafl.submodel.spec import Runs


@contextmanager
def skeleton() -> Iterator[None]:
    """Return a context in which new modules get their parameters on the meta device, so that they take no memory.

    It affects this thread only. Buffers stay real, since the values that a constructor computes (positions,
    frequencies) belong to the model. A parameter is released as soon as it is registered, so that at most one takes
    memory at a time.
    """
    from torch.nn.modules.module import register_module_parameter_registration_hook
    from torch.utils.weak import WeakIdKeyDictionary

    thread = threading.get_ident()
    made: Any = WeakIdKeyDictionary()  # by original parameter, which may have two names

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.device.type == "meta" or threading.get_ident() != thread:
            return None
        if parameter not in made:
            made[parameter] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        return made[parameter]

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True, slots=True)
class Structure:
    """Instructions for building a submodel's module: the full module, and the units and blocks to keep."""

    module: nn.Module  # whole module, of which no values are read
    # index ranges to keep, by tensor and dimension, for tensors that shrink
    selections: Mapping[str, Mapping[int, Runs]]
    trains: frozenset[str]  # names of the parameters that are trained
    absent: tuple[str, ...]  # paths of the modules to leave out
    # paths of replaced modules, such as the head, mapped to those of their replacements, such as an exit
    stand_ins: Mapping[str, str]
    counts: Mapping[str, int]  # number of kept units of each axis that shrinks
    # values of frozen parameters that are shared with other modules
    frozen: Mapping[str, Tensor] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=Sizes)  # numbers in the module's own code that shrink with the axes
    full: Mapping[str, int] = field(default_factory=dict)  # number of units of each axis in the full module
    unscaled: frozenset[str] = frozenset()  # paths of layers whose output is not rescaled when they lose units


def build(structure: Structure, present: FlatTensors, *, rescale: bool) -> nn.Module:
    """Build a submodel's module, whose tensors are views into the storage ``present``."""
    if "peft" in sys.modules:
        from raafl.submodel import lora  # noqa: F401  # registers the sizes of its layers
    full = structure.module
    small = copy_structure(full, _replacements(structure, present))
    for path in structure.absent:
        _leave_out(small, path)
    for path, other in structure.stand_ins.items():
        parent, _, name = path.rpartition(".")
        small.get_submodule(parent)._modules[name] = StandIn(small.get_submodule(other))
    for path in dict.fromkeys(path.rpartition(".")[0] for path in structure.absent):
        _renumber(full, small, path)
    _resize_layers(small, structure)
    structure.sizes.apply_(small, {**structure.full, **structure.counts}, structure.full)
    if rescale:
        _rescale(full, small, structure.unscaled)
    if present.device.type != "cpu":
        small.to(present.device)  # moves tensors outside of the state dict; the views are on the device already
    return small


def _replacements(structure: Structure, present: FlatTensors) -> dict[int, Any]:
    memo: dict[int, Any] = {}
    for name, parameter in structure.module.named_parameters():
        view = present[name] if name in present else structure.frozen.get(name)
        if view is None:
            view = torch.empty(0, dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(view, requires_grad=name in structure.trains)
    for name, buffer in structure.module.named_buffers():
        if name in present:
            # `.data` gives the buffer a version counter of its own, else autograd would take a write to one buffer for
            # a write to all
            memo[id(buffer)] = present[name].data
        elif name in structure.selections:
            memo[id(buffer)] = select(buffer, structure.selections[name])
    return memo


def _resize_layers(small: nn.Module, structure: Structure) -> None:
    shrunk = {path for name in structure.selections for path in above(name)}
    for name, layer in small.named_modules(remove_duplicate=False):
        if name in shrunk:
            resize(layer)
        elif isinstance(layer, nn.RNNBase):
            adopt(layer)
        if structure.counts and hasattr(layer, "submodel_resize"):
            layer.submodel_resize(dict(structure.counts))


def _renumber(full: nn.Module, small: nn.Module, path: str) -> None:
    """Adapt a Hugging Face model's config and layer indices, in place, to the blocks that remain."""
    layers, owner = small.get_submodule(path), small.get_submodule(path.rpartition(".")[0])
    config: Any = getattr(owner, "config", None)
    if getattr(config, "num_hidden_layers", None) != len(full.get_submodule(path)._modules) or not path:
        return
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and len(kinds) == config.num_hidden_layers:
        config.layer_types = [kinds[int(name)] for name in layers._modules]
    config.num_hidden_layers = len(layers._modules)
    for place, layer in enumerate(layers.children()):
        for part in layer.modules():
            if "layer_idx" in part.__dict__:  # index of the layer in the key-value cache
                part.__dict__["layer_idx"] = place


class _Rescale:
    """Forward hook that rescales a layer's output while the whole model trains; an object, so that deepcopy can copy it."""

    def __init__(self, factor: float, model: nn.Module) -> None:
        self.factor, self.model = factor, model

    def __call__(self, layer: nn.Module, args: object, output: Tensor) -> Tensor | None:
        return output * self.factor if self.model.training else None


def _rescale(full: nn.Module, small: nn.Module, unscaled: frozenset[str]) -> None:
    # Compare tensors and not names: a tied weight has one name, and may be the output weight of only one of its layers.
    for name, layer in small.named_modules():
        if isinstance(layer, FewerHeads):
            layer.scale = full.get_submodule(name).num_heads / layer.num_heads
            layer.model = (small,)
        made = produces(layer)
        if made is None or name in unscaled:
            continue
        tensor, dim = made
        before = getattr(full.get_submodule(name), tensor).shape[dim]
        after = getattr(layer, tensor).shape[dim]
        if 0 < after < before:
            layer.register_forward_hook(_Rescale(before / after, small))


class StandIn(nn.Module):
    """Module that is put in the place of a removed module, and passes its calls on to another module of the same model.

    For example, if a model is cut to its first blocks, its early classifier is called where the last classifier was.
    The module that is called keeps its place, and its tensors keep their names.
    """

    def __init__(self, module: nn.Module) -> None:
        """Create a module that passes its calls on to ``module``, which is elsewhere in the same model."""
        super().__init__()
        self.training = module.training
        # a list, since a module as plain attribute would become a submodule
        self.__dict__["stands_for"] = [module]

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Call the replacement, such as an exit, with the arguments that were meant for the replaced module."""
        return self.stands_for[0](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module that this one stands for."""
        if "stands_for" not in self.__dict__:  # not set yet while an instance is being copied
            raise AttributeError(name)
        return getattr(self.__dict__["stands_for"][0], name)


class Gaps(nn.ModuleList):
    """A `ModuleList` from which blocks were removed. Indices count the remaining blocks; names stay those of the full model."""

    def _get_abs_string_index(self, idx: Any) -> str:
        return str(list(self._modules)[idx])


def _leave_out(small: nn.Module, path: str) -> None:
    """Delete a block from its list without renaming the others, or replace any other module by None."""
    parent_path, _, name = path.rpartition(".")
    parent = small.get_submodule(parent_path)
    if isinstance(parent, nn.ModuleList | nn.Sequential):
        del parent._modules[name]
        if type(parent) is nn.ModuleList:
            parent.__class__ = Gaps
    else:
        parent._modules[name] = None


# Shrink torch's own attention and transformer layers.
#
# An `nn.MultiheadAttention` ties the number of heads to the width, so one with fewer heads needs another class.


class FewerHeads(nn.MultiheadAttention):
    """An `nn.MultiheadAttention` from which heads were removed, so that ``num_heads * head_dim`` differs from its ``embed_dim``."""

    scale: float = 1.0  # factor on the output of all heads while training; see `Submodels.shrink`
    # model whose mode decides whether the output is scaled, in a tuple so that it is no submodule; empty = never
    model: tuple[nn.Module, ...] = ()

    def forward(  # the signature is torch's
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention as `nn.MultiheadAttention` does; return the output and, if requested, the attention weights.

        `query`: queries of shape (L, E), or with a batch dimension as in the base class.
        `key`: keys of shape (S, E), or with a batch dimension.
        `value`: values of shape (S, E), or with a batch dimension.
        `key_padding_mask`: mask as in `nn.MultiheadAttention`; None = no padding.
        `need_weights`: whether to return attention weights; False = return None in their place.
        `attn_mask`: mask as in `nn.MultiheadAttention`; None = no mask.
        """
        batched, is_self = query.dim() == 3, query is key and key is value
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        projected = self._project(query, key, value, is_self)
        q, k, v = (x.view(*x.shape[:2], self.num_heads, -1).transpose(1, 2) for x in projected)
        mask = self._mask(q, k, key_padding_mask, attn_mask)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(self.head_dim))
            weights = F.dropout(F.softmax(scores if mask is None else scores + mask, -1), dropout)
            heads = weights @ v
        else:
            heads = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        joined = heads.transpose(1, 2).flatten(2)
        if self.model and self.model[0].training:
            joined = joined * self.scale
        output = F.linear(joined, self.out_proj.weight, self.out_proj.bias)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor, is_self: bool) -> tuple[Tensor, ...]:
        weight: Any = self.in_proj_weight  # weight of q, k and v together, or None
        bias: Any = self.in_proj_bias
        if is_self and weight is not None:
            return F.linear(query, weight, bias).chunk(3, -1)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        parts = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if weight is None else weight.chunk(3)
        inputs = (query, key, value)
        return tuple(F.linear(x, w, b) for x, w, b in zip(inputs, parts, biases, strict=True))

    def _mask(self, q: Tensor, k: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """Combine padding and attention mask to one that is added to the scores: (batch or 1, heads or 1, queries or 1, keys)."""
        mask, padding = _added(mask, q), _added(padding, q)
        if mask is not None and mask.dim() == 3:
            if mask.shape[0] != q.shape[0] * self.num_heads:
                raise BadInput(
                    f"attn_mask has the shape {tuple(mask.shape)} of one mask for each head, but the layer has "
                    f"{self.num_heads} heads: give one mask for all heads, or keep all heads"
                )
            mask = mask.view(q.shape[0], self.num_heads, *mask.shape[1:])
        if padding is None:
            return mask
        padding = padding[:, None, None, :]
        return padding if mask is None else mask + padding


def _added(mask: Tensor | None, like: Tensor) -> Tensor | None:
    if mask is None or mask.is_floating_point():
        return mask
    return like.new_zeros(mask.shape).masked_fill_(mask, -math.inf)


@resizes(nn.MultiheadAttention)
def _resize_multihead(layer: nn.MultiheadAttention) -> None:
    head_dim, width = layer.head_dim, layer.out_proj.weight.shape[0]
    heads = layer.out_proj.weight.shape[1] // head_dim
    if (heads, width) == (layer.num_heads, layer.embed_dim):
        return
    layer.__class__ = FewerHeads
    layer.num_heads, layer.embed_dim = heads, width
    if layer.in_proj_weight is not None:
        layer.kdim = layer.vdim = layer.in_proj_weight.shape[1]
    # otherwise torch's encoder layer would use its fused kernel, which cannot have fewer heads
    layer._qkv_same_embed_dim = False
