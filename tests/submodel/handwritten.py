"""Networks written by hand, as people write them, that no rule for a library's layers knows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

WORDS = 40


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
