"""Vision transformers: ViT and DeiT as transformers has them, and torchvision's."""

from __future__ import annotations

from typing import Any

from torch import nn

from raafl.submodel.transformer import Attention, Block, register_block

_MODELS = "transformers.models"


@register_block(f"{_MODELS}.vit.modeling_vit.ViTLayer", f"{_MODELS}.deit.modeling_deit.DeiTLayer")
def _vit(layer: Any) -> Block:
    at = "attention"
    heads = Attention(f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj", f"{at}.o_proj", at, layer.attention.head_dim)
    return Block({"heads": heads}, ("mlp.fc1",), "mlp.fc2", ("layernorm_before", "layernorm_after"))


@register_block("torchvision.models.vision_transformer.EncoderBlock")
def _torchvision(layer: Any) -> Block:
    up, down = (name for name, part in layer.mlp.named_children() if isinstance(part, nn.Linear))
    return Block({"heads": "self_attention"}, (f"mlp.{up}",), f"mlp.{down}", ("ln_1", "ln_2"))
