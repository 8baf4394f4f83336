"""Vision transformers: ViT and DeiT as transformers has them, and torchvision's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from raafl.submodel.known import MODELS, TORCHVISION, along, register_piece, register_tail
from raafl.submodel.rules import leaf, register
from raafl.submodel.transformer import Attention, Block, register_block, set_known


@register_block(f"{MODELS}.vit.modeling_vit.ViTLayer", f"{MODELS}.deit.modeling_deit.DeiTLayer")
def _vit(layer: Any) -> Block:
    at = "attention"
    heads = Attention(f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj", f"{at}.o_proj", at, layer.attention.head_dim)
    return Block({"heads": heads}, ("mlp.fc1",), "mlp.fc2", ("layernorm_before", "layernorm_after"))


@register_block("torchvision.models.vision_transformer.EncoderBlock")
def _torchvision_block(layer: Any) -> Block:
    up, down = (name for name, part in layer.mlp.named_children() if isinstance(part, nn.Linear))
    return Block({"heads": "self_attention"}, (f"mlp.{up}",), f"mlp.{down}", ("ln_1", "ln_2"))


@register_piece(f"{MODELS}.vit.modeling_vit.ViTEmbeddings", f"{MODELS}.deit.modeling_deit.DeiTEmbeddings")
def _patches(layer: Any) -> Iterator[tuple[str, int]]:
    yield from ((name, 2) for name, _ in layer.named_parameters(recurse=False))
    yield from ((f"patch_embeddings.projection.{name}", 0) for name in ("weight", "bias"))


@register_piece(f"{MODELS}.vit.modeling_vit.ViTPooler", f"{MODELS}.deit.modeling_deit.DeiTPooler")
def _reading_pooler(layer: Any) -> Iterator[tuple[str, int]]:
    return along(layer, "dense")


@register_piece(TORCHVISION)
def _torchvision(model: Any) -> Iterator[tuple[str, int]]:
    last = "conv_proj" if isinstance(model.conv_proj, nn.Conv2d) else "conv_proj.conv_last"
    yield from ((f"{last}.{name}", 0) for name in ("weight", "bias"))
    yield from (("class_token", 2), ("encoder.pos_embedding", 2))
    yield from along(model, "encoder.ln")
    yield from along(model, f"heads.{next(iter(dict(model.heads.named_children())))}")


def _resize_torchvision(model: Any) -> None:
    set_known(model, {"hidden_dim": model.class_token.shape[2]})


register(TORCHVISION, resize=_resize_torchvision)(leaf)
register_tail(
    lambda model: (f"{model.base_model_prefix}.layernorm", "classifier"),
    lambda model, own, hidden, ids: own[1](own[0](hidden)[:, 0]),
    f"{MODELS}.vit.modeling_vit.ViTForImageClassification",
    f"{MODELS}.deit.modeling_deit.DeiTForImageClassification",
)
register_tail(
    ("deit.layernorm", "cls_classifier", "distillation_classifier"),
    lambda model, own, hidden, ids: (own[1](own[0](hidden)[:, 0]) + own[2](own[0](hidden)[:, 1])) / 2,
    f"{MODELS}.deit.modeling_deit.DeiTForImageClassificationWithTeacher",
)
register_tail(
    ("encoder.ln", "heads"),
    lambda model, own, hidden, ids: own[1](own[0](hidden)[:, 0]),
    TORCHVISION,
)
