"""Store the weights of frozen linear layers in 4 bits, NormalFloat (QLoRA, Dettmers et al. 2023, arXiv:2305.14314).

In plain torch, so that it runs wherever the model does, on the meta device, too. Codes and scales are those of bitsandbytes' `nf4`
in blocks of 64; the paper's second quantisation, of the scales, is not done: 4.5 bits a weight instead of 4.13.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BLOCK: Final = 64
"""Weights that share a scale (section 3)."""

LEVELS: Final = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""What the 16 codes stand for (appendix E)."""


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round weights to 4 bits: to the nearest of 16 levels, scaled for each block of weights.

    Returns:
        codes: two per byte, the first in the upper half; int8, since T5 would cast inputs to the type of floating-point
            weights.
        scales: float32, the largest magnitude in each block of the flattened weight.
    """
    flat = weight.detach().flatten().float()
    blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    levels = torch.tensor(LEVELS, device=weight.device)
    codes = torch.bucketize(blocks / scales.clamp_min(1e-30)[:, None], (levels[1:] + levels[:-1]) / 2)
    first, second = codes.to(torch.uint8).view(-1, 2).unbind(1)
    return (first << 4 | second).view(torch.int8), scales


def dequantised(codes: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the weights that codes and scales represent.

    Args:
        codes: codes of 4 bits, two per byte.
        scales: scale of each block of `BLOCK` weights.
        shape: shape of the weights.
        dtype: dtype of the result.
    """
    levels = torch.tensor(LEVELS, device=codes.device, dtype=dtype)
    codes = codes.view(torch.uint8)
    pairs = torch.stack((codes >> 4, codes & 15), 1).flatten()
    blocks = levels.index_select(0, pairs.int()).view(-1, BLOCK) * scales.to(dtype)[:, None]
    return blocks.flatten()[: shape[0] * shape[1]].view(shape)


class _Product(torch.autograd.Function):
    """``x W^T``; the backward pass computes W again, so that no layer's W is stored until then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.shape = shape
        return F.linear(x, dequantised(codes, scales, shape, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        codes, scales = ctx.saved_tensors
        return grad @ dequantised(codes, scales, ctx.shape, grad.dtype), None, None, None


class NF4Linear(nn.Linear):
    """Frozen linear layer whose weights are stored in 4 bits.

    Attributes:
        weight: codes of the weights, two per byte.
        scales: scales of all blocks of weights.
    """

    def __init__(self, layer: nn.Linear) -> None:
        """Round the values of ``layer``."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        codes, scales = quantised(layer.weight)
        self.weight, self.scales = nn.Parameter(codes, requires_grad=False), nn.Parameter(scales, requires_grad=False)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x W^T + b`` in the dtype of ``x``."""
        product: Tensor = _Product.apply(x, self.weight, self.scales, (self.out_features, self.in_features))
        return product if self.bias is None else product + self.bias

    def plain(self, dtype: torch.dtype) -> nn.Linear:
        """Return an ordinary linear layer with the same weights."""
        layer, shape = self.submodel_plain(), (self.out_features, self.in_features)
        layer.weight = nn.Parameter(dequantised(self.weight, self.scales, shape, dtype), requires_grad=False)
        layer.bias = self.bias
        return layer

    def submodel_plain(self) -> nn.Linear:
        """Return an ordinary frozen layer of the same shapes without values, with which raafl checks how the model can shrink."""
        layer = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        return layer.requires_grad_(False)


def linear_layers(model: Any) -> dict[str, nn.Linear]:
    """Return the linear layers of a transformers model by name, except heads, tied layers and adapters."""
    body, head = getattr(model, model.base_model_prefix, model), model.get_output_embeddings()
    heads = (head, getattr(head, "base_layer", None))  # the second where the head has an adapter
    own = {id(layer) for name, layer in body.named_modules() if type(layer) is nn.Linear and ".lora_" not in name}
    return {name: layer for name, layer in model.named_modules() if id(layer) in own and layer not in heads}


def quantise(model: Any) -> None:
    """Replace the linear layers of a transformers model by 4-bit ones, in place, except heads, tied layers and adapters."""
    for name, layer in linear_layers(model).items():
        model.set_submodule(name, NF4Linear(layer))
