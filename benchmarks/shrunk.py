"""Compare a step of a shrunk model with the same step of a small model written by hand.

Each model is cut to a share of every axis (`rate`), the residual width whole, and stands beside the same class made with the
small sizes; where the class cannot be told of them (BERT's heads, nanoGPT's, those of `nn.MultiheadAttention`), beside layers
that were put there by hand. Both have the same values and give the same loss. A step is forward, backward and SGD with momentum.

- `ratio` is the median of turns in which steps of both are taken one after the other, the shortest of each counted.
- `shrunk_ms` and `by_hand_ms` are the medians of those, in CPU time.

    OMP_NUM_THREADS=1 python -m benchmarks.shrunk [--json] [--out FILE]
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common import Row, main
from model_zoo import CNN, MLP
from raafl.parts.select.units import leading
from raafl.submodel import Submodels
from tests.submodel.architectures import WORDS, Gated, NanoAttention, Step, Tokens

RATES = (0.5, 0.25)
TURNS, STEPS = 40, 5
WIDTH, HEADS, UNITS = 128, 4, 512


@dataclass(frozen=True)
class Case:
    """A model as a function of the share of its axes; ``batch`` is the batch of a step."""

    whole: Callable[[], Any]
    by_hand: Callable[[float], Any]
    batch: Callable[[], Any]


# ---- by hand ----


class Attention(nn.Module):
    """nanoGPT's attention, but with heads whose total width may differ from the model's."""

    def __init__(self, width: int, heads: int, head: int) -> None:
        """Make the projections."""
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * heads * head), nn.Linear(heads * head, width)
        self.heads, self.head = heads, head

    def forward(self, x: Tensor) -> Tensor:
        """Attend to what came before; shape (batch, positions, width)."""
        batch, length, _ = x.size()
        q, k, v = self.c_attn(x).split(self.heads * self.head, dim=2)
        q, k, v = (t.view(batch, length, self.heads, self.head).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-2, -1) * self.head**-0.5
        mask = torch.tril(torch.ones(length, length, device=x.device)) == 0
        y = F.softmax(scores.masked_fill(mask, float("-inf")), dim=-1) @ v
        answer: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, self.heads * self.head))
        return answer


class SelfAttention(nn.Module):
    """Self-attention like `nn.MultiheadAttention`, but with heads whose total width may differ from the model's."""

    def __init__(self, width: int, heads: int, head: int) -> None:
        """Make the projections."""
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.empty(3 * heads * head, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * heads * head))
        self.out_proj, self.heads = nn.Linear(heads * head, width), heads

    def forward(self, x: Tensor) -> Tensor:
        """Attend to all; shape (batch, positions, width)."""
        q, k, v = F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        q, k, v = (t.view(*t.shape[:2], self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v)
        answer: Tensor = self.out_proj(y.transpose(1, 2).flatten(2))
        return answer


class Layer(nn.Module):
    """`nn.TransformerEncoderLayer` with its defaults and `SelfAttention`."""

    def __init__(self, width: int, heads: int, head: int, units: int) -> None:
        """Make the parts."""
        super().__init__()
        self.self_attn = SelfAttention(width, heads, head)
        self.linear1, self.linear2 = nn.Linear(width, units), nn.Linear(units, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        x = self.norm1(x + self.self_attn(x))
        answer: Tensor = self.norm2(x + self.linear2(F.relu(self.linear1(x))))
        return answer


class Encoder(nn.Module):
    """Model of an embedding, an encoder and a head."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        """Make four layers."""
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(layer() for _ in range(4))

    def forward(self, words: Tensor) -> Tensor:
        """Return logits."""
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        answer: Tensor = self.head(x)
        return answer


def _bert(rate: float) -> nn.Module:
    """Make BERT and prune its heads, since its config only allows heads of width / number."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=1000,
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_labels=2,
        intermediate_size=int(rate * UNITS),
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model: Any = transformers.BertForSequenceClassification(config)
    heads, head = int(rate * HEADS), WIDTH // HEADS
    for layer in model.bert.encoder.layer if rate < 1 else ():
        own, output = layer.attention.self, layer.attention.output
        own.query, own.key, own.value = (nn.Linear(WIDTH, heads * head) for _ in range(3))
        own.num_attention_heads, own.all_head_size = heads, heads * head
        output.dense = nn.Linear(heads * head, WIDTH)
    return Step(model)


def _llama(rate: float) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=int(2 * HEADS * rate),
        num_key_value_heads=int(HEADS * rate),
        head_dim=16,
        intermediate_size=int(rate * UNITS),
        max_position_embeddings=64,
    )
    return Step(transformers.LlamaForCausalLM(config))


def _words() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 1000, (8, 32)), "attention_mask": torch.ones(8, 32, dtype=torch.long)}


def _plain_words(length: int = 32) -> tuple[Tensor, Tensor]:
    return torch.randint(3, WORDS, (8, length)), torch.randint(3, WORDS, (8, length))


def _mlp(rate: float) -> nn.Module:
    return MLP(784, [int(200 * rate)] * 2, 10)


def _cnn(rate: float) -> nn.Module:
    return CNN(3, 32, [int(32 * rate), int(64 * rate)], [int(120 * rate), int(84 * rate)], batch_norm=True)


def _nano(width: int, length: int) -> Case:
    """Make nanoGPT; as its code computes sizes, calls of the shrunk model are corrected at run time."""

    def by_hand(rate: float) -> nn.Module:
        parts = (lambda w: Attention(w, int(rate * HEADS), w // HEADS), lambda w: Gated(w, int(rate * 4 * width)))
        return Step(Tokens(*parts, width=width))

    def whole() -> nn.Module:
        return Step(Tokens(lambda w: NanoAttention(w, HEADS), lambda w: Gated(w, 4 * width), width=width))

    return Case(whole, by_hand, lambda: _plain_words(length))


CASES = {
    "MLP": Case(lambda: _mlp(1.0), _mlp, lambda: [torch.randn(32, 784), torch.randint(0, 10, (32,))]),
    "CNN": Case(lambda: _cnn(1.0), _cnn, lambda: [torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))]),
    "BERT": Case(lambda: _bert(1.0), _bert, lambda: {**_words(), "labels": torch.randint(0, 2, (8,))}),
    "LLaMA": Case(lambda: _llama(1.0), _llama, lambda: {**_words(), "labels": torch.randint(3, 1000, (8, 32))}),
    "nanoGPT": _nano(WIDTH, 32),
    "nanoGPT, 256 wide": _nano(256, 64),
    "nn.TransformerEncoderLayer": Case(
        lambda: Step(Encoder(lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, UNITS, 0.0, batch_first=True))),
        lambda rate: Step(Encoder(lambda: Layer(WIDTH, int(rate * HEADS), WIDTH // HEADS, int(rate * UNITS)))),
        _plain_words,
    ),
}


def pair(case: Case, rate: float) -> tuple[nn.Module, nn.Module, Any]:
    """Return a shrunk model, the hand-written one with the same values, and a batch."""
    torch.manual_seed(0)
    whole, batch = case.whole(), case.batch()
    submodels = Submodels(whole, batch)
    spanned = submodels.discovered.spanned if submodels.axes and submodels.discovered is not None else frozenset()
    spec = leading({name: axis for name, axis in submodels.axes.items() if name not in spanned}, rate)
    shrunk = submodels.shrink(spec)
    submodels.plan(spec, "present").gather(submodels.state(whole), out=shrunk.present)
    by_hand = case.by_hand(rate)
    by_hand.load_state_dict(shrunk.module.state_dict())
    return shrunk.module, by_hand, batch


def stepper(module: Any, batch: Any) -> Callable[[], float]:
    """Return a function that makes a training step and returns its CPU seconds."""
    module.train()
    module.log = module.log_dict = lambda *args, **kwargs: None
    optimizer = torch.optim.SGD(module.parameters(), lr=0.001, momentum=0.9)

    def step() -> float:
        begin_s = time.process_time()
        loss = module.training_step(batch, 0)
        (loss["loss"] if isinstance(loss, dict) else loss).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return time.process_time() - begin_s

    return step


def rows(turns: int = TURNS) -> Iterator[Row]:
    """Yield a row for each model and rate."""
    for (name, case), rate in itertools.product(CASES.items(), RATES):
        shrunk, by_hand, batch = pair(case, rate)
        steps = stepper(shrunk, batch), stepper(by_hand, batch)
        found: list[tuple[float, float]] = []
        for turn in range(turns + 1):
            taken: tuple[list[float], list[float]] = [], []
            for place in range(2 * STEPS):
                which = (place + turn) % 2
                taken[which].append(steps[which]())
            found.append((min(taken[0]), min(taken[1])))
        found = found[1:]
        ours, theirs = (statistics.median(one[which] for one in found) for which in (0, 1))
        ratio = statistics.median(one / other for one, other in found)
        yield {"model": name, "rate": rate, "ratio": ratio, "shrunk_ms": 1e3 * ours, "by_hand_ms": 1e3 * theirs}


if __name__ == "__main__":
    main("shrunk", lambda: list(rows()))
