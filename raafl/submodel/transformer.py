"""Transformer blocks: a description of where heads and units lie is all that a type of block needs.

From it follow the axes ``heads`` (q, k and v rows and o columns of a head; under grouped-query attention a key-value head
with all its query heads) and ``ffn`` (both sides of the feed-forward part, gate included), the residual width where that is
asked for, and the attributes of a smaller block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from raafl.submodel.flow import Flow, Groups
from raafl.submodel.rules import Follow, keep_whole, register


@dataclass(frozen=True, slots=True)
class Attention:
    """Where the heads of one attention lie: paths of `nn.Linear` layers within the block.

    Attributes:
        q: makes ``num_heads * head_dim`` features, head by head.
        k: makes ``num_key_value_heads * head_dim``; query heads of one group lie together.
        v: as k.
        out: reads what q makes.
        owner: path of the module that has the counts as attributes.
        head_dim: features of a head.
        on_width: whether k and v read the residual width, too; False = another input (cross-attention).
    """

    q: str
    k: str
    v: str
    out: str
    owner: str
    head_dim: int
    on_width: bool = True


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a transformer; all paths are relative to it.

    Attributes:
        attentions: by the name of the axis; text is the path of an `nn.MultiheadAttention`.
        up: layers that make the units of the feed-forward part; of several, the last is the one that is not a gate.
        down: the layer that reads them.
        norms: norms over the residual width.
    """

    attentions: Mapping[str, Attention | str]
    up: tuple[str, ...]
    down: str
    norms: tuple[str, ...] = field(default=())


Describe = Callable[[Any], Block]


def register_block(*types: type[nn.Module] | str) -> Callable[[Describe], Describe]:
    """Register the decorated description as the rule of these types of block; text names types of other packages."""

    def add(describe: Describe) -> Describe:
        register(
            *types,
            resize=lambda layer: _resize(layer, describe(layer)),
            is_composite=True,
            is_block=True,
            unscaled=lambda layer: _unscaled(describe(layer)),
        )(_follower(describe))
        return describe

    return add


def _follower(describe: Describe) -> Follow:
    def follow(layer: nn.Module, name: str, flow: Flow | None, groups: Groups) -> Flow | None:
        try:
            block = describe(layer)
            note_axes(layer, name, block, groups)
        except AttributeError as error:  # another release of the package has other layers inside
            keep_whole(layer, name, groups)
            reason = f"block '{name}' ({type(layer).__name__}) is made in a way that is not known: {error}"
            for group in [groups.new(_join(name, axis), 1) for axis in ("heads", "ffn")]:
                groups.pin(group, reason)
            if flow is not None:
                groups.pin(flow.group, reason)
            return None
        if flow is None:
            return None
        problem = _width(layer, name, block, flow, groups)
        if problem is not None:
            groups.pin(flow.group, problem)
            return None
        return Flow(flow.group, "last", 3)  # batch, positions, width

    return follow


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def note_axes(layer: nn.Module, name: str, block: Block, groups: Groups) -> None:
    """Note the axes of ``block``, a description of ``layer``, which lies at ``name``."""
    for axis, attention in block.attentions.items():
        if isinstance(attention, str):
            note_heads_of_multihead(layer.get_submodule(attention), _join(name, attention), _join(name, axis), groups)
        else:
            _heads(layer, name, _join(name, axis), attention, groups)
    group = groups.new(_join(name, "ffn"), _weight(layer, block.down).shape[1])
    for path in block.up:
        _rows(layer, name, path, group, 1, groups)
    groups.add(group, _join(name, block.down, "weight"), 1)


def _heads(layer: nn.Module, name: str, axis: str, attention: Attention, groups: Groups) -> None:
    heads, key_value_heads = _counts(layer, attention)
    per_index = heads // key_value_heads
    group = groups.new(axis, key_value_heads)
    _rows(layer, name, attention.q, group, per_index * attention.head_dim, groups)
    for path in (attention.k, attention.v):
        _rows(layer, name, path, group, attention.head_dim, groups)
    groups.add(group, _join(name, attention.out, "weight"), 1, per_index * attention.head_dim)


def _counts(layer: nn.Module, attention: Attention) -> tuple[int, int]:
    heads, key_value_heads = (
        _weight(layer, path).shape[0] // attention.head_dim for path in (attention.q, attention.k)
    )
    return heads, key_value_heads


def _weight(layer: nn.Module, path: str) -> Tensor:
    return layer.get_parameter(f"{path}.weight")


def _rows(layer: nn.Module, name: str, path: str, group: int, unit: int, groups: Groups) -> None:
    part = layer.get_submodule(path)
    groups.add(group, _join(name, path, "weight"), 0, unit)
    if getattr(part, "bias", None) is not None:
        groups.add(group, _join(name, path, "bias"), 0, unit)


def note_heads_of_multihead(layer: Any, name: str, axis: str, groups: Groups) -> None:
    """Note the heads of an `nn.MultiheadAttention` that lies at ``name`` as ``axis``."""
    if layer.bias_k is not None or layer.add_zero_attn:
        groups.pin(groups.new(axis, layer.num_heads), f"layer '{name}' adds a bias or zeros to its keys and values")
        return
    group = groups.new(axis, layer.num_heads)
    if layer.in_proj_weight is not None:
        for part in range(3):
            groups.add(group, _join(name, "in_proj_weight"), 0, layer.head_dim, part * layer.embed_dim)
    else:
        for letter in "qkv":
            groups.add(group, _join(name, f"{letter}_proj_weight"), 0, layer.head_dim)
    if layer.in_proj_bias is not None:
        for part in range(3):
            groups.add(group, _join(name, "in_proj_bias"), 0, layer.head_dim, part * layer.embed_dim)
    groups.add(group, _join(name, "out_proj.weight"), 1, layer.head_dim)


def _width(layer: nn.Module, name: str, block: Block, flow: Flow, groups: Groups) -> str | None:
    """Put the block on the axis of the value it adds to; return why that is not possible."""
    if not groups.residual_width:
        return f"block '{name}' adds to it: it is the residual width, which shrinks only where that is asked for"
    if flow.form != "last":
        return f"block '{name}' reads it, but not as its last dimension"
    read, made = list(block.up), [block.down]
    for attention in block.attentions.values():
        if isinstance(attention, str):
            reason = width_of_multihead(layer.get_submodule(attention), _join(name, attention), flow, groups)
            if reason is not None:
                return reason
        elif not attention.on_width:
            return f"block '{name}' attends to another value as well"
        else:
            read += [attention.q, attention.k, attention.v]
            made.append(attention.out)
    for path in read:
        groups.consume(flow, _join(name, path, "weight"), 1, name)
    for path in (*made, *block.norms):
        module = layer.get_submodule(path)
        for tensor in ("weight", "bias"):
            if getattr(module, tensor, None) is not None:
                groups.consume(flow, _join(name, path, tensor), 0, name)
    return None


def width_of_multihead(layer: Any, name: str, flow: Flow, groups: Groups) -> str | None:
    """Put the width of an `nn.MultiheadAttention` on the axis of its one input; return why that is not possible."""
    if layer.in_proj_weight is None or layer.bias_k is not None or layer.add_zero_attn:
        return f"layer '{name}' has parts that cannot shrink with the residual width"
    groups.consume(flow, _join(name, "in_proj_weight"), 1, name)
    groups.consume(flow, _join(name, "out_proj.weight"), 0, name)
    if layer.out_proj.bias is not None:
        groups.consume(flow, _join(name, "out_proj.bias"), 0, name)
    return None


_HEADS = ("num_attention_heads", "num_heads", "n_heads")
_SIZES = ("all_head_size",)


def _resize(layer: nn.Module, block: Block) -> None:
    """Bring the counts that the block's modules hold in line with the tensors."""
    for attention in block.attentions.values():
        if isinstance(attention, str):
            continue  # has a rule of its own
        heads, key_value_heads = _counts(layer, attention)
        width = _weight(layer, attention.q).shape[1]
        values = dict.fromkeys(_HEADS, heads) | dict.fromkeys(_SIZES, heads * attention.head_dim)
        values |= {"num_key_value_heads": key_value_heads, "hidden_size": width, "dim": heads * attention.head_dim}
        set_known(layer.get_submodule(attention.owner), values)
    units, width = _weight(layer, block.up[-1]).shape
    sizes = {"hidden_size": width, "intermediate_size": units}
    set_known(layer, {"hidden_size": width})
    set_known(layer.get_submodule(block.up[-1].rpartition(".")[0]), sizes)


def set_known(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Set those attributes that the module has."""
    for name, value in values.items():
        if name in module.__dict__:
            setattr(module, name, value)


def _unscaled(block: Block) -> tuple[str, ...]:
    # the scores q k^T do not shrink with the number of heads, and a gate multiplies what is scaled already
    queries = [path for a in block.attentions.values() if not isinstance(a, str) for path in (a.q, a.k)]
    return (*queries, *block.up[:-1])


def renumber(layers: nn.Module, config: Any) -> None:
    """Make the small model's own ``config`` and blocks count the blocks that are there, in place."""
    present = list(layers._modules)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and len(kinds) == config.num_hidden_layers:
        config.layer_types = [kinds[int(name)] for name in present]
    config.num_hidden_layers = len(present)
    for place, layer in enumerate(layers.children()):
        for part in layer.modules():
            set_known(part, {"layer_idx": place})  # where a cache keeps its keys and values
