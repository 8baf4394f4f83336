"""Models of many makes, tiny and with random weights, none of which the package knows by name: axes are found in all."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F


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

WORDS = 40
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


WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
GROUPED = {**WIDE, "num_key_value_heads": 2, "max_position_embeddings": 64}
SEEN = {**WIDE, "image_size": 32, "patch_size": 8, "num_labels": 2}

TRANSFORMERS = {
    "GPT-2": Architecture(_hub("GPT2LMHeadModel", "GPT2Config", **TEXT, n_embd=32, n_layer=2, n_head=4, n_positions=64), _causal()),
    "Qwen3": Architecture(_hub("Qwen3ForCausalLM", "Qwen3Config", **TEXT, **GROUPED, head_dim=8), _causal()),
    "GPT-NeoX": Architecture(_hub("GPTNeoXForCausalLM", "GPTNeoXConfig", **TEXT, **WIDE, max_position_embeddings=64), _causal()),
    "T5": Architecture(
        _hub("T5ForConditionalGeneration", "T5Config", vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
             decoder_start_token_id=0), _translated),
    "T5 gated": Architecture(
        _hub("T5ForConditionalGeneration", "T5Config", vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
             feed_forward_proj="gated-gelu", decoder_start_token_id=0), _translated),
    "BART": Architecture(
        _hub("BartForConditionalGeneration", "BartConfig", **TEXT, d_model=32, encoder_layers=2, decoder_layers=2,
             encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
             max_position_embeddings=64, decoder_start_token_id=2, forced_eos_token_id=2), _translated),
    "ELECTRA": Architecture(
        _hub("ElectraForSequenceClassification", "ElectraConfig", **TEXT, **WIDE, embedding_size=16, max_position_embeddings=64),
        _classified),
    "BLOOM": Architecture(_hub("BloomForCausalLM", "BloomConfig", **TEXT, hidden_size=32, n_layer=2, n_head=4), _causal()),
    "Gemma": Architecture(_hub("GemmaForCausalLM", "GemmaConfig", **TEXT, **GROUPED, head_dim=8), _causal()),
    "Phi": Architecture(_hub("PhiForCausalLM", "PhiConfig", **TEXT, **GROUPED), _causal()),
    "Phi-3": Architecture(_hub("Phi3ForCausalLM", "Phi3Config", **TEXT, **GROUPED), _causal()),
    "OPT": Architecture(
        _hub("OPTForCausalLM", "OPTConfig", **TEXT, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64,
             max_position_embeddings=64, word_embed_proj_dim=32), _causal()),
    "DeBERTa-v2": Architecture(
        _hub("DebertaV2ForSequenceClassification", "DebertaV2Config", **TEXT, **WIDE, max_position_embeddings=64,
             relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8), _classified),
    "Falcon": Architecture(
        _hub("FalconForCausalLM", "FalconConfig", **TEXT, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
             multi_query=True, parallel_attn=True, bias=False), _causal()),
    "GPT-BigCode": Architecture(
        _hub("GPTBigCodeForCausalLM", "GPTBigCodeConfig", **TEXT, n_embd=32, n_layer=2, n_head=4, n_positions=64), _causal()),
    "Mixtral": Architecture(
        _hub("MixtralForCausalLM", "MixtralConfig", **TEXT, **GROUPED, num_local_experts=2, num_experts_per_tok=1), _causal()),
    "Mamba": Architecture(
        _hub("MambaForCausalLM", "MambaConfig", **TEXT, hidden_size=32, num_hidden_layers=2, state_size=4), _causal()),
    "ViT-MAE": Architecture(
        _hub("ViTMAEForPreTraining", "ViTMAEConfig", **SEEN, decoder_hidden_size=32, decoder_num_hidden_layers=1,
             decoder_num_attention_heads=4, decoder_intermediate_size=64), _only_pictures()),
    "DINOv2": Architecture(
        _hub("Dinov2ForImageClassification", "Dinov2Config", hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
             mlp_ratio=2, image_size=32, patch_size=8, num_labels=2), _pictures()),
    "SegFormer": Architecture(
        _hub("SegformerForImageClassification", "SegformerConfig", hidden_sizes=[16, 32], depths=[1, 1], num_encoder_blocks=2,
             num_attention_heads=[2, 4], sr_ratios=[2, 1], strides=[4, 2], patch_sizes=[7, 3], mlp_ratios=[2, 2], num_labels=2),
        _pictures()),
    "Swin": Architecture(
        _hub("SwinForImageClassification", "SwinConfig", image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
             window_size=4, num_labels=2), _pictures()),
    "CLIP text": Architecture(
        _hub("CLIPTextModel", "CLIPTextConfig", **TEXT, **WIDE, max_position_embeddings=64),
        lambda: {"input_ids": torch.randint(3, WORDS, (2, 8))}),
    "HuBERT": Architecture(
        _hub("HubertForSequenceClassification", "HubertConfig", **WIDE, conv_dim=(16, 16), conv_stride=(4, 4), conv_kernel=(8, 4),
             num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4, num_feat_extract_layers=2, mask_time_prob=0.0,
             layerdrop=0.0, classifier_proj_size=16, num_labels=2, apply_spec_augment=False),
        lambda: {"input_values": torch.randn(2, 400), "labels": torch.tensor([0, 1])}),
    "Whisper": Architecture(
        _hub("WhisperForConditionalGeneration", "WhisperConfig", **TEXT, d_model=32, encoder_layers=1, decoder_layers=1,
             encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8,
             max_source_positions=10, max_target_positions=16, decoder_start_token_id=1),
        lambda: {"input_features": torch.randn(2, 8, 20), "labels": torch.randint(3, WORDS, (2, 6))}),
}  # fmt: skip


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


# ---- written by hand ----


class NanoAttention(nn.Module):
    """The attention of nanoGPT: one projection, sizes worked out of the input's."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head, self.n_embd = heads, width

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(width // self.n_head))
        mask = torch.tril(torch.ones(length, length, device=x.device)) == 0
        y = F.softmax(scores.masked_fill(mask, float("-inf")), dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class Gated(nn.Module):
    """A feed-forward part whose gate and values are halves of one projection."""

    def __init__(self, width: int, units: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * units), nn.Linear(units, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class Literal(nn.Module):
    """An attention whose sizes stand in the code."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 96), nn.Linear(32, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(x.shape[0], x.shape[1], 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(x.shape[0], x.shape[1], 32))


class Tokens(nn.Module):
    """Blocks over an embedding, and a head."""

    def __init__(self, *makers: Callable[[int], nn.Module], width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {f"part{i}": nn.Sequential(nn.LayerNorm(width), make(width)) for i, make in enumerate(makers)}
            )
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            for part in block.values():
                x = x + part(x)
        return self.head(self.norm(x))


class Rotary(nn.Module):
    """An attention that rotates pairs of features as complex numbers, and works its sizes out of a constant."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.register_buffer("turns", torch.polar(torch.ones(64, 4), torch.rand(64, 4)), persistent=False)

    def rotated(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns[: x.shape[1], None]).flatten(3).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        size = int(self.width / self.heads)
        q, k, v = (f(x).view(x.shape[0], x.shape[1], self.heads, size) for f in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in (self.rotated(q), self.rotated(k), v))
        y = ((q @ k.transpose(-2, -1)) / math.sqrt(size)).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(*x.shape))


class Experts(nn.Module):
    """Two of four experts for each token; gate and values of each are pairs of one projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.route = nn.Linear(width, 4)
        self.up = nn.ModuleList(nn.Linear(width, 64) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(32, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        share, chosen = self.route(rows).softmax(-1).topk(2, -1)
        answer = torch.zeros_like(rows)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            row, place = torch.where(chosen == number)
            y = up(rows[row])
            answer.index_add_(0, row, down(F.silu(y[..., ::2]) * y[..., 1::2]) * share[row, place, None])
        return answer.view_as(x)


class Coder(LightningModule):
    """An autoencoder whose parts the training step itself calls."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten()
        )
        self.mean, self.spread, self.expand = nn.Linear(256, 10), nn.Linear(256, 10), nn.Linear(10, 256)
        self.decode = nn.Sequential(nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.encode(batch[0])
        mean, spread = self.mean(hidden), self.spread(hidden)
        made = self.decode(self.expand(mean + (0.5 * spread).exp() * 0.1).view(-1, 16, 4, 4))
        return F.mse_loss(made, batch[0]) - 0.01 * (1 + spread - mean.square() - spread.exp()).sum(1).mean()


class Functional(nn.Module):
    """Weights without layers."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(24, 12)), nn.Parameter(torch.randn(24))
        self.w2 = nn.Parameter(torch.randn(24, 16))
        self.w3 = nn.Parameter(torch.randn(2, 16))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(F.linear(x, self.w1, self.b1))
        return torch.einsum("bh,ho->bo", h, self.w2).tanh() @ self.w3.t()


class HandLSTM(nn.Module):
    """A cell by hand, and torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 16
        self.embed, self.cell = nn.Embedding(WORDS, 12), nn.Linear(12 + 16, 64)
        self.gru, self.head = nn.GRUCell(16, 16), nn.Linear(16, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        h = c = x.new_zeros(len(x), self.size)
        g, answers = torch.zeros(len(x), 16, dtype=x.dtype, device=x.device), []
        for t in range(x.shape[1]):
            i, f, o, n = self.cell(torch.cat([x[:, t], h], -1)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(n)
            h = torch.sigmoid(o) * torch.tanh(c)
            g = self.gru(h, g)
            answers.append(self.head(g))
        return torch.stack(answers, 1)


class Unet(nn.Module):
    """Two scales, joined again."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU())
        self.down2 = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.join, self.head = nn.Conv2d(16, 8, 3, padding=1), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        joined = torch.cat([fine, self.up(self.down2(fine))], 1)
        return self.head(self.join(joined).relu().mean((2, 3)))


class Mixer(nn.Module):
    """An MLP over positions and one over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 8, 8)
        self.tokens = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.channels = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norm(x))
        return self.head(x.mean(1))


class TorchEncoder(nn.Module):
    """torch's own encoder."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
        self.embed, self.encoder, self.head = (
            nn.Embedding(WORDS, 32),
            nn.TransformerEncoder(layer, 2),
            nn.Linear(32, WORDS),
        )

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(words)))


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
