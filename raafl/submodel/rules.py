"""How each layer type shrinks: one rule for each `nn.Module` type, registered with one fixed signature.

A rule follows an axis through the layer, and brings the layer's attributes in line with its smaller tensors. A layer is
recognised by its type, or by a base type whose `forward` it has; a type of a package that need not be there is named in
text. Another type is added from anywhere:

>>> class Scale(nn.Module):
...     def __init__(self, width): super().__init__(); self.gain = nn.Parameter(torch.ones(width))
...     def forward(self, x): return x * self.gain
>>> @register(Scale)
... def _scale(layer, name, flow, groups):
...     if flow is not None:
...         groups.consume(flow, f"{name}.gain", 0, name)
...     return flow
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from raafl.submodel.axes import declared_axes
from raafl.submodel.flow import Flow, Groups

Follow = Callable[[Any, str, Flow | None, Groups], Flow | None]
"""``follow(layer, name, flow, groups) -> flow of the output``: note in ``groups`` what the layer couples."""

Resize = Callable[[Any], None]
"""``resize(layer)``: the layer has its small tensors and the large attributes; set the attributes."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What is known of a layer type.

    Attributes:
        follow: see `Follow`.
        resize: see `Resize`.
        output: parameter and dimension whose slices make the layer's output features, for layers that begin an axis.
        is_composite: it has axes of its own inside, which are noted whether or not a value can be followed to it.
        is_block: equal blocks of this type make up a deep model; any of them may be absent.
        unscaled: paths of the layers inside whose output is not multiplied when they lose features (see `Submodels`).
    """

    follow: Follow
    resize: Resize | None = None
    output: tuple[str, int] | None = None
    is_composite: bool = False
    is_block: bool = False
    unscaled: Callable[[Any], tuple[str, ...]] | None = None


RULES: dict[type[nn.Module] | str, Rule] = {}
"""The rule of each layer type, or of its dotted name."""


def register(
    *types: type[nn.Module] | str, resize: Resize | None = None, output: tuple[str, int] | None = None, **more: Any
) -> Callable[[Follow], Follow]:
    """Register the decorated function as `Rule.follow` of these types; see `Rule` for the other arguments."""

    def add(follow: Follow) -> Follow:
        for layer_type in types:
            RULES[layer_type] = Rule(follow, resize, output, **more)
        return follow

    return add


def _registered(layer: nn.Module) -> tuple[Rule | None, type[nn.Module]]:
    """Return the rule of the layer's type or nearest base type, and which type that is."""
    for layer_type in type(layer).__mro__:
        rule = RULES.get(layer_type) or RULES.get(f"{layer_type.__module__}.{layer_type.__qualname__}")
        if rule is not None:
            return rule, layer_type
    return None, nn.Module


def _runs(layer: nn.Module, layer_type: type[nn.Module]) -> bool:
    """Check whether the layer's `forward` is that of ``layer_type``, or a wrapper that its package puts around it."""
    forward: Any = type(layer).forward
    wanted: Any = getattr(layer_type, "forward", None)  # a mix-in has none of its own
    while wanted is not None and forward is not wanted:
        forward = getattr(forward, "__wrapped__", None)
        if forward is None:
            return False
    return True


def rule_of(layer: nn.Module) -> Rule | None:
    """Return the rule of the layer's type, or of the nearest base type whose `forward` it runs.

    A part that declares its axes (``submodel_axes``) is a composite.
    """
    if hasattr(type(layer), "submodel_axes") or "submodel_axes" in layer.__dict__:
        return _DECLARES
    rule, layer_type = _registered(layer)
    return rule if rule is not None and _runs(layer, layer_type) else None


def composites(module: nn.Module, prefix: str = "", known: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and layer of each outermost composite (see `Rule`), each once."""
    known = set() if known is None else known
    if id(module) in known:
        return
    known.add(id(module))
    rule = rule_of(module)
    if rule is not None and rule.is_composite:
        yield prefix, module
        return
    for name, child in module.named_children():
        yield from composites(child, f"{prefix}.{name}" if prefix else name, known)


def is_torchs(layer: nn.Module) -> bool:
    """Check whether a layer is resized though its axes are traced: it is torch's own, and no block."""
    rule, layer_type = _registered(layer)
    return rule is not None and not rule.is_block and layer_type in RULES


def resize(layer: nn.Module) -> None:
    """Set the size attributes of a layer whose tensors have been replaced by smaller ones."""
    rule, _ = _registered(layer)
    if rule is not None and rule.resize is not None:
        rule.resize(layer)


def produces(layer: nn.Module) -> tuple[str, int] | None:
    """Return the parameter and dimension that make the layer's output features; None for one that passes an axis on."""
    rule = rule_of(layer)
    passes = isinstance(layer, nn.modules.conv._ConvNd) and layer.groups > 1  # each output channel has its own inputs
    return None if rule is None or passes else rule.output


def _tensor_size(layer: nn.Module) -> int | None:
    for name in ("weight", "running_mean", "bias"):
        tensor = getattr(layer, name, None)
        if tensor is not None:
            return int(tensor.shape[0])
    return None


def _begin(layer: nn.Module, name: str, size: int, dim: int, groups: Groups) -> int:
    group = groups.new(name or "output", size)
    prefix = f"{name}." if name else ""
    groups.add(group, f"{prefix}weight", dim)
    if getattr(layer, "bias", None) is not None:
        groups.add(group, f"{prefix}bias", 0)
    return group


def _resize_linear(layer: nn.Linear) -> None:
    layer.out_features, layer.in_features = layer.weight.shape


@register(nn.Linear, resize=_resize_linear, output=("weight", 0))
def _linear(layer: nn.Linear, name: str, flow: Flow | None, groups: Groups) -> Flow | None:
    if flow is None or flow.form == "channels":
        groups.fix(f"{name}.weight", 1, f"layer '{name}' reads a value whose width is fixed")
    if flow is not None and flow.form == "channels":
        groups.pin(flow.group, f"layer '{name}' works along a dimension of pixels")
    elif flow is not None:
        groups.consume(flow, f"{name}.weight", 1, name)
    return Flow(_begin(layer, name, layer.out_features, 0, groups), "last")


def _resize_conv(layer: Any) -> None:
    out, inner = (1, 0) if layer.transposed else (0, 1)
    if layer.groups > 1:
        layer.groups = (
            layer.groups * layer.weight.shape[0] // (layer.in_channels if layer.transposed else layer.out_channels)
        )
    per_group = layer.groups if layer.transposed else 1
    layer.out_channels = layer.weight.shape[out] * per_group
    layer.in_channels = layer.weight.shape[inner] * (1 if layer.transposed else layer.groups)


def _takes_channels(layer: Any, name: str, flow: Flow | None, dim: int, groups: Groups) -> bool:
    """Couple a convolution's input channels; return whether they are on an axis."""
    pixels = layer.weight.dim() - 2
    if flow is not None and flow.form == "channels" and flow.ndim == pixels + 2:
        if layer.groups == 1:
            groups.consume(flow, f"{name}.weight", dim, name)
        return True
    groups.fix(f"{name}.weight", dim, f"layer '{name}' reads a value whose width is fixed")
    if flow is not None:
        groups.pin(flow.group, f"layer '{name}' reads it, but not as channels")
    return False


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d, resize=_resize_conv, output=("weight", 0))
def _conv(layer: Any, name: str, flow: Flow | None, groups: Groups) -> Flow | None:
    on_axis = _takes_channels(layer, name, flow, 1, groups)
    out = _begin(layer, name, layer.out_channels, 0, groups)
    if layer.groups > 1:
        # a group's inputs and outputs can only go together
        if flow is not None and on_axis and layer.in_channels == layer.out_channels:
            groups.join(flow.group, out)
            groups.coarsen(out, layer.out_channels // layer.groups)
        else:
            groups.pin(out, f"the groups of layer '{name}' cannot shrink on their own")
            if flow is not None:
                groups.pin(flow.group, f"the groups of layer '{name}' change the number of channels")
    return Flow(out, "channels", layer.weight.dim())


@register(
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, resize=_resize_conv, output=("weight", 1)
)  # fmt: skip
def _conv_transpose(layer: Any, name: str, flow: Flow | None, groups: Groups) -> Flow | None:
    if layer.groups > 1:
        _keep_whole(layer, name, flow, groups)
        return None
    _takes_channels(layer, name, flow, 0, groups)
    return Flow(_begin(layer, name, layer.out_channels, 1, groups), "channels", layer.weight.dim())


def _resize_embedding(layer: Any) -> None:
    layer.num_embeddings, layer.embedding_dim = layer.weight.shape


@register(nn.Embedding, nn.EmbeddingBag, resize=_resize_embedding, output=("weight", 1))
def _embedding(layer: Any, name: str, flow: Flow | None, groups: Groups) -> Flow | None:
    groups.fix(f"{name}.weight", 0, f"the rows of layer '{name}' are a vocabulary")
    if layer.max_norm is not None:
        _keep_whole(layer, name, flow, groups)  # a row's norm spans its width
        return None
    group = groups.new(name, layer.embedding_dim)
    groups.add(group, f"{name}.weight", 1)
    return Flow(group, "last")


def _resize_norm(layer: Any) -> None:
    layer.num_features = _tensor_size(layer) or layer.num_features


@register(
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d,
    nn.InstanceNorm3d, resize=_resize_norm,
)  # fmt: skip
def _batch_norm(layer: Any, name: str, flow: Flow | None, groups: Groups) -> Flow | None:
    return _per_channel(layer, name, flow, groups, ("weight", "bias", "running_mean", "running_var"))


def _per_channel(layer: Any, name: str, flow: Flow | None, groups: Groups, tensors: tuple[str, ...]) -> Flow | None:
    """Couple one element of each tensor with each channel."""
    present = [tensor for tensor in tensors if getattr(layer, tensor, None) is not None]
    if flow is None:
        for tensor in present:
            groups.fix(f"{name}.{tensor}", 0, f"layer '{name}' reads a value whose width is fixed")
    elif not present:
        groups.pin(flow.group, f"layer '{name}' has no tensors to tell its width")
    else:
        for tensor in present:
            groups.consume(flow, f"{name}.{tensor}", 0, name)
    return flow


def _resize_group_norm(layer: nn.GroupNorm) -> None:
    if layer.weight is not None:
        per_group = layer.num_channels // layer.num_groups
        layer.num_channels = layer.weight.shape[0]
        layer.num_groups = layer.num_channels // per_group


@register(nn.GroupNorm, resize=_resize_group_norm)
def _group_norm(layer: nn.GroupNorm, name: str, flow: Flow | None, groups: Groups) -> Flow | None:
    if flow is not None:
        # statistics span a group of channels: only whole groups may go, so one group cannot shrink
        groups.coarsen(flow.group, layer.num_channels // layer.num_groups)
        if flow.form in ("flat", "repeat"):
            groups.pin(flow.group, f"layer '{name}' norms flattened pixels")
    return _per_channel(layer, name, flow, groups, ("weight", "bias"))


def _resize_layer_norm(layer: Any) -> None:
    if layer.weight is not None:
        layer.normalized_shape = tuple(layer.weight.shape)


@register(nn.LayerNorm, nn.RMSNorm, resize=_resize_layer_norm)
def _layer_norm(layer: Any, name: str, flow: Flow | None, groups: Groups) -> Flow | None:
    # its statistics span the width: without some units, the others change
    if groups.residual_width and flow is not None and flow.form == "last" and len(layer.normalized_shape) == 1:
        return _per_channel(layer, name, flow, groups, ("weight", "bias"))
    if flow is not None:
        groups.pin(flow.group, f"layer '{name}' takes statistics across it")
    return flow


@register(nn.LocalResponseNorm)
def _across_channels(layer: nn.Module, name: str, flow: Flow | None, groups: Groups) -> Flow | None:
    if flow is not None:
        groups.pin(flow.group, f"layer '{name}' takes statistics across it")
    return flow


@register(
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh,
    nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Hardshrink,
    nn.Softshrink, nn.Tanhshrink, nn.Threshold, nn.RReLU, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip
def _elementwise(layer: nn.Module, name: str, flow: Flow | None, groups: Groups) -> Flow | None:
    return flow


def _resize_prelu(layer: nn.PReLU) -> None:
    layer.num_parameters = layer.weight.numel()


@register(nn.PReLU, resize=_resize_prelu)
def _prelu(layer: nn.PReLU, name: str, flow: Flow | None, groups: Groups) -> Flow | None:
    return flow if layer.weight.numel() == 1 else _per_channel(layer, name, flow, groups, ("weight",))


@register(
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.LPPool1d, nn.LPPool2d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d, nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, nn.ZeroPad1d, nn.ZeroPad2d,
    nn.ConstantPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d,
)  # fmt: skip
def _pool(layer: nn.Module, name: str, flow: Flow | None, groups: Groups) -> Flow | None:
    if flow is not None and flow.form != "channels":
        _keep_whole(layer, name, flow, groups)
        return None
    return flow


@register(nn.Flatten)
def _flatten(layer: nn.Flatten, name: str, flow: Flow | None, groups: Groups) -> Flow | None:
    return flattened(flow, layer.start_dim, layer.end_dim, f"layer '{name}'", groups)


def flattened(flow: Flow | None, start: Any, end: Any, what: str, groups: Groups) -> Flow | None:
    """Return the flow after flattening dimensions ``start`` to ``end``; pin it where the axis cannot be followed."""
    if flow is None:
        return None
    if flow.form == "channels" and end in (-1, flow.ndim - 1):
        if start == 1:
            return Flow(flow.group, "flat")
        if start == 2:
            return Flow(flow.group, "channels", 3)
    elif start == 1 and end == -1:
        return Flow(flow.group, "repeat") if flow.form == "last" else flow
    groups.pin(flow.group, f"{what} flattens it in a way that is not followed")
    return None


def _keep_whole(layer: nn.Module, name: str, flow: Flow | None, groups: Groups) -> None:
    keep_whole(layer, name, groups)
    if flow is not None:
        groups.pin(flow.group, f"layer '{name}' ({type(layer).__name__}) is not followed")


def keep_whole(layer: nn.Module, name: str, groups: Groups) -> None:
    """Fix every dimension of the layer's tensors but those in composites: there is no rule for it."""
    inside = tuple(f"{path}." for path, _ in composites(layer) if path)
    for tensor_name, tensor in [*layer.named_parameters(remove_duplicate=False), *layer.named_buffers()]:
        if tensor_name.startswith(inside):
            continue
        for dim in range(tensor.dim()):
            groups.fix(f"{name}.{tensor_name}", dim, f"layer '{name}' ({type(layer).__name__}) has no rule")


def leaf(layer: nn.Module, name: str, flow: Flow | None, groups: Groups) -> Flow | None:
    """Follow nothing into or out of the layer: the rule of a type that is only resized."""
    _keep_whole(layer, name, flow, groups)
    return None


def _declared(layer: Any, name: str, flow: Flow | None, groups: Groups) -> Flow | None:
    prefix = f"{name}." if name else ""
    declaration = layer.submodel_axes() if callable(layer.submodel_axes) else layer.submodel_axes
    shapes = {key.removeprefix(prefix): shape for key, shape in groups.shapes.items() if key.startswith(prefix)}
    own = {key.removeprefix(prefix): groups.aliases[key] for key in groups.aliases if key.startswith(prefix)}
    shapes |= {other: groups.shapes[other] for other in own.values()}
    for axis in declared_axes(declaration, shapes, own):
        group = groups.new(f"{prefix}{axis.name}", axis.size)
        for member in axis.members:
            full = member.name if member.name in own.values() else f"{prefix}{member.name}"
            groups.add(group, full, member.dim, member.unit, member.offset)
    if flow is not None:
        groups.pin(flow.group, f"'{name}' ({type(layer).__name__}), which declares its axes, reads it")
    return None


_DECLARES = Rule(_declared, is_composite=True)
