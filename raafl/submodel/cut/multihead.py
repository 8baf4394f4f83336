"""Shrink torch's own attention and transformer layers.

An `nn.MultiheadAttention` ties the number of heads to the width, so one with fewer heads needs another class.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from raafl.errors import BadInput
from raafl.submodel.cut.layers import resizes


class FewerHeads(nn.MultiheadAttention):
    """An `nn.MultiheadAttention` from which heads were removed, so that ``num_heads * head_dim`` differs from its ``embed_dim``."""

    scale: float = 1.0  # factor on the joint output of all heads while training; see `Submodels.shrink`
    # the model whose mode says whether it trains, in a tuple so that it is no submodule; empty = it is not scaled
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
        weight: Any = self.in_proj_weight  # of q, k and v, or None
        bias: Any = self.in_proj_bias
        if is_self and weight is not None:
            return F.linear(query, weight, bias).chunk(3, -1)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        parts = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if weight is None else weight.chunk(3)
        inputs = (query, key, value)
        return tuple(F.linear(x, w, b) for x, w, b in zip(inputs, parts, biases, strict=True))

    def _mask(self, q: Tensor, k: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """Join both masks to one that is added to the scores, shape (batch or 1, heads or 1, queries or 1, keys)."""
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
    # or the layers around it would take torch's fused path, which knows no such heads
    layer._qkv_same_embed_dim = False
