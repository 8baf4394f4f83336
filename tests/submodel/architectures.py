"""Models of many makes, tiny and with random weights, none of which the package knows by name: axes are found in all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from tests.submodel.handwritten import (
    WORDS,
    Coder,
    Experts,
    Functional,
    Gated,
    HandLSTM,
    Literal,
    Mixer,
    NanoAttention,
    Rotary,
    Tokens,
    TorchEncoder,
    Unet,
)


@dataclass(frozen=True)
class Architecture:
    """How to make a model and a batch for it."""

    make: Callable[[], LightningModule]
    batch: Callable[[], Any]


class Step(LightningModule):
    """Trains ``model`` on a batch of its keyword arguments, or on one of inputs and labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, dict):
            answer = self(**batch)
            loss = getattr(answer, "loss", None)
            return answer[0].square().mean() if loss is None else loss
        x, labels = batch
        answer = self(x)
        answer = answer if isinstance(answer, Tensor) else answer[0]
        return F.cross_entropy(answer.flatten(0, -2), labels.flatten())


# ---- transformers ----

TEXT: dict[str, Any] = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _hub(kind: str, config: str, **options: Any) -> Callable[[], LightningModule]:
    def make() -> LightningModule:
        import transformers

        made = getattr(transformers, config)(**options)
        return Step(getattr(transformers, kind)._from_config(made))

    return make


def _causal(**more: Any) -> Callable[[], Any]:
    def batch() -> Any:
        words = torch.randint(3, WORDS, (2, 8))
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words, **more}

    return batch


def _classified() -> Any:
    words = torch.randint(3, WORDS, (2, 8))
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": torch.tensor([0, 1])}


def _translated() -> Any:
    words = torch.randint(3, WORDS, (2, 8))
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": torch.randint(3, WORDS, (2, 6))}


def _pictures(size: int = 32) -> Callable[[], Any]:
    return lambda: {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([0, 1])}


def _only_pictures(size: int = 32) -> Callable[[], Any]:
    return lambda: {"pixel_values": torch.randn(2, 3, size, size)}


DEEP = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**DEEP, "intermediate_size": 64}
GROUPED = {**WIDE, "num_key_value_heads": 2, "max_position_embeddings": 64}
SEEN = {**WIDE, "image_size": 32, "patch_size": 8, "num_labels": 2}
T5 = {
    "vocab_size": WORDS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
BOTH_WAYS = {**TEXT, **HEADS, "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
BART = {"encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64, "decoder_start_token_id": 2}
WHISPER = {"encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 8, "max_source_positions": 10}
WHISPER |= {"max_target_positions": 16, "decoder_start_token_id": 1}
POSITIONS = {"max_position_embeddings": 64}
HEARD = {**WIDE, "conv_dim": (16, 16), "num_feat_extract_layers": 2, "classifier_proj_size": 16, "num_labels": 2}
HUBERT = {
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
}
HUBERT |= {"mask_time_prob": 0.0, "layerdrop": 0.0, "apply_spec_augment": False}
WAV2VEC2 = {
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}

TRANSFORMERS = {
    "GPT-2": Architecture(
        _hub("GPT2LMHeadModel", "GPT2Config", **TEXT, n_embd=32, n_layer=2, n_head=4, n_positions=64), _causal()
    ),
    "Qwen3": Architecture(_hub("Qwen3ForCausalLM", "Qwen3Config", **TEXT, **GROUPED, head_dim=8), _causal()),
    "GPT-NeoX": Architecture(
        _hub("GPTNeoXForCausalLM", "GPTNeoXConfig", **TEXT, **WIDE, max_position_embeddings=64), _causal()
    ),
    "T5": Architecture(_hub("T5ForConditionalGeneration", "T5Config", **T5), _translated),
    "T5 gated": Architecture(
        _hub("T5ForConditionalGeneration", "T5Config", **T5, feed_forward_proj="gated-gelu"), _translated
    ),
    "BART": Architecture(
        _hub("BartForConditionalGeneration", "BartConfig", **BOTH_WAYS, **BART, forced_eos_token_id=2), _translated
    ),
    "ELECTRA": Architecture(
        _hub("ElectraForSequenceClassification", "ElectraConfig", **TEXT, **WIDE, **POSITIONS, embedding_size=16),
        _classified,
    ),
    "BLOOM": Architecture(
        _hub("BloomForCausalLM", "BloomConfig", **TEXT, hidden_size=32, n_layer=2, n_head=4), _causal()
    ),
    "Gemma": Architecture(_hub("GemmaForCausalLM", "GemmaConfig", **TEXT, **GROUPED, head_dim=8), _causal()),
    "Phi": Architecture(_hub("PhiForCausalLM", "PhiConfig", **TEXT, **GROUPED), _causal()),
    "Phi-3": Architecture(_hub("Phi3ForCausalLM", "Phi3Config", **TEXT, **GROUPED), _causal()),
    "OPT": Architecture(
        _hub("OPTForCausalLM", "OPTConfig", **TEXT, **DEEP, **POSITIONS, ffn_dim=64, word_embed_proj_dim=32), _causal()
    ),
    "DeBERTa-v2": Architecture(
        _hub(
            "DebertaV2ForSequenceClassification",
            "DebertaV2Config",
            **TEXT,
            **WIDE,
            max_position_embeddings=64,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_buckets=8,
        ),
        _classified,
    ),
    "Falcon": Architecture(
        _hub("FalconForCausalLM", "FalconConfig", **TEXT, **DEEP, multi_query=True, parallel_attn=True, bias=False),
        _causal(),
    ),
    "GPT-BigCode": Architecture(
        _hub("GPTBigCodeForCausalLM", "GPTBigCodeConfig", **TEXT, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        _causal(),
    ),
    "Mixtral": Architecture(
        _hub("MixtralForCausalLM", "MixtralConfig", **TEXT, **GROUPED, num_local_experts=2, num_experts_per_tok=1),
        _causal(),
    ),
    "Mamba": Architecture(
        _hub("MambaForCausalLM", "MambaConfig", **TEXT, hidden_size=32, num_hidden_layers=2, state_size=4), _causal()
    ),
    "ViT-MAE": Architecture(
        _hub(
            "ViTMAEForPreTraining",
            "ViTMAEConfig",
            **SEEN,
            decoder_hidden_size=32,
            decoder_num_hidden_layers=1,
            decoder_num_attention_heads=4,
            decoder_intermediate_size=64,
        ),
        _only_pictures(),
    ),
    "DINOv2": Architecture(
        _hub(
            "Dinov2ForImageClassification",
            "Dinov2Config",
            **DEEP,
            mlp_ratio=2,
            image_size=32,
            patch_size=8,
            num_labels=2,
        ),
        _pictures(),
    ),
    "SegFormer": Architecture(
        _hub(
            "SegformerForImageClassification",
            "SegformerConfig",
            hidden_sizes=[16, 32],
            depths=[1, 1],
            num_encoder_blocks=2,
            num_attention_heads=[2, 4],
            sr_ratios=[2, 1],
            strides=[4, 2],
            patch_sizes=[7, 3],
            mlp_ratios=[2, 2],
            num_labels=2,
        ),
        _pictures(),
    ),
    "Swin": Architecture(
        _hub(
            "SwinForImageClassification",
            "SwinConfig",
            image_size=32,
            patch_size=4,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
            num_labels=2,
        ),
        _pictures(),
    ),
    "CLIP text": Architecture(
        _hub("CLIPTextModel", "CLIPTextConfig", **TEXT, **WIDE, max_position_embeddings=64),
        lambda: {"input_ids": torch.randint(3, WORDS, (2, 8))},
    ),
    "HuBERT": Architecture(
        _hub("HubertForSequenceClassification", "HubertConfig", **HEARD, **HUBERT),
        lambda: {"input_values": torch.randn(2, 400), "labels": torch.tensor([0, 1])},
    ),
    "Wav2Vec2": Architecture(  # which hides drawn spans of what it hears
        _hub("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **HEARD, **WAV2VEC2, vocab_size=WORDS),
        lambda: {"input_values": torch.randn(2, 4000), "labels": torch.tensor([0, 1])},
    ),
    "Whisper": Architecture(
        _hub("WhisperForConditionalGeneration", "WhisperConfig", **BOTH_WAYS, **WHISPER),
        lambda: {"input_features": torch.randn(2, 8, 20), "labels": torch.randint(3, WORDS, (2, 6))},
    ),
}


# ---- torchvision ----


def _vision(name: str, **options: Any) -> Callable[[], LightningModule]:
    def make() -> LightningModule:
        import torchvision

        return Step(getattr(torchvision.models, name)(**options))

    return make


def _labelled(size: int = 32) -> Callable[[], Any]:
    return lambda: (torch.randn(2, 3, size, size), torch.tensor([0, 1]))


def _densenet() -> LightningModule:
    from torchvision.models import DenseNet

    return Step(DenseNet(8, (2, 2), 16, num_classes=2))


def _swin() -> LightningModule:
    from torchvision.models import SwinTransformer

    return Step(SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=2))


def _convnext() -> LightningModule:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return Step(ConvNeXt([CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)], num_classes=2))


TORCHVISION = {
    "torchvision swin": Architecture(_swin, _labelled()),
    "torchvision convnext": Architecture(_convnext, _labelled(64)),
    "torchvision densenet": Architecture(_densenet, _labelled()),
    "torchvision resnet18": Architecture(_vision("resnet18", num_classes=2), _labelled(64)),
    "torchvision mobilenet": Architecture(_vision("mobilenet_v3_small", num_classes=2), _labelled(64)),
    "torchvision shufflenet": Architecture(_vision("shufflenet_v2_x0_5", num_classes=2), _labelled(64)),
}


def _words() -> Any:
    return torch.randint(3, WORDS, (2, 8)), torch.randint(3, WORDS, (2, 8))


OWN = {
    "nanoGPT": Architecture(lambda: Step(Tokens(lambda w: NanoAttention(w, 4), lambda w: Gated(w, 48))), _words),
    "sizes in the code": Architecture(lambda: Step(Tokens(Literal, lambda w: Gated(w, 48))), _words),
    "rotary, experts": Architecture(lambda: Step(Tokens(Rotary, Experts)), _words),
    "autoencoder": Architecture(Coder, _labelled(16)),
    "functional weights": Architecture(
        lambda: Step(Functional()), lambda: (torch.randn(4, 12), torch.tensor([0, 1, 1, 0]))
    ),
    "cells by hand": Architecture(lambda: Step(HandLSTM()), _words),
    "UNet": Architecture(lambda: Step(Unet()), _labelled(16)),
    "MLP-Mixer": Architecture(lambda: Step(Mixer()), _labelled(32)),
    "nn.TransformerEncoder": Architecture(lambda: Step(TorchEncoder()), _words),
}

ARCHITECTURES = {**TRANSFORMERS, **TORCHVISION, **OWN}
