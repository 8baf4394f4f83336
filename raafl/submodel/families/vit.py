"""Vision transformers: ViT and DeiT as transformers has them, and torchvision's."""

from __future__ import annotations

from raafl.submodel.known import BLOCKS, HELD, MODELS, TORCHVISION, register_tail

BLOCKS.update(
    {
        f"{MODELS}.vit.modeling_vit.ViTLayer", f"{MODELS}.deit.modeling_deit.DeiTLayer",
        "torchvision.models.vision_transformer.EncoderBlock",
    }
)  # fmt: skip
HELD.update(
    {
        f"{MODELS}.vit.modeling_vit.ViTPooler": {"dense": True},
        f"{MODELS}.deit.modeling_deit.DeiTPooler": {"dense": True},
        TORCHVISION: {"heads.pre_logits": False},
    }
)
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
