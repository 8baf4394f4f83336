"""Recurrent layers of torch, whose weights are to stay where they lie."""

from __future__ import annotations

from typing import Any

from torch import nn

from raafl.submodel.layers import resizes


def adopt(layer: nn.RNNBase) -> None:
    """Make the layer use the tensors that it has now, where they lie."""
    layer.__dict__["flatten_parameters"] = _stays  # cuDNN would move them into storage of its own
    layer._init_flat_weights()


def _stays() -> None:
    return None


@resizes(nn.RNNBase)
def _resize(layer: Any) -> None:
    layer.input_size = layer.weight_ih_l0.shape[1]
    gates = layer.weight_ih_l0.shape[0] // layer.weight_hh_l0.shape[1] if not layer.proj_size else 4
    layer.hidden_size = layer.weight_ih_l0.shape[0] // gates
    layer.proj_size = layer.weight_hr_l0.shape[0] if layer.proj_size else 0
    adopt(layer)
