"""Recurrent layers: the hidden units of an `nn.GRU`, `nn.LSTM` or `nn.RNN`, gates, layers and directions together."""

from __future__ import annotations

from typing import Any

from torch import nn

from raafl.submodel.flow import Flow, Groups
from raafl.submodel.rules import register


def adopt(layer: nn.RNNBase) -> None:
    """Make the layer use the tensors that it has now, where they lie."""
    layer.__dict__["flatten_parameters"] = _stays  # cuDNN would move them into storage of its own
    layer._init_flat_weights()


def _stays() -> None:
    return None


def _resize(layer: Any) -> None:
    layer.input_size = layer.weight_ih_l0.shape[1]
    layer.hidden_size = layer.weight_hh_l0.shape[1]
    adopt(layer)


@register(nn.GRU, nn.LSTM, nn.RNN, resize=_resize, is_composite=True)
def _recurrent(layer: Any, name: str, flow: Flow | None, groups: Groups) -> Flow | None:
    prefix, size = f"{name}." if name else "", layer.hidden_size
    group = groups.new(name or "hidden", size)
    directions = ("", "_reverse") if layer.bidirectional else ("",)
    if getattr(layer, "proj_size", 0):
        groups.pin(group, f"layer '{name}' projects its hidden units")
    for ending in directions:
        _reads(f"{prefix}weight_ih_l0{ending}", name, flow, groups)
        for index in range(layer.num_layers):
            _units(layer, prefix, f"_l{index}{ending}", group, groups)
            if index:  # it reads all directions of the layer before
                for place in range(len(directions)):
                    groups.add(group, f"{prefix}weight_ih_l{index}{ending}", 1, 1, place * size)
    return Flow(group, "both" if layer.bidirectional else "tuple", 3)


def _reads(tensor: str, name: str, flow: Flow | None, groups: Groups) -> None:
    if flow is not None and flow.form in ("last", "repeat"):
        groups.consume(flow, tensor, 1, name)
        return
    groups.fix(tensor, 1, f"layer '{name}' reads a value whose width is fixed")
    if flow is not None:
        groups.pin(flow.group, f"layer '{name}' reads it, but not as its last dimension")


def _units(layer: Any, prefix: str, ending: str, group: int, groups: Groups) -> None:
    size = layer.hidden_size
    for tensor in ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if layer.bias else ())):
        for gate in range(getattr(layer, tensor + ending).shape[0] // size):
            groups.add(group, prefix + tensor + ending, 0, 1, gate * size)
    groups.add(group, f"{prefix}weight_hh{ending}", 1)
