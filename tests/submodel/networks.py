"""Transformers and recurrent nets that the submodel tests cut: a tiny one for each adapter and each of torch's layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from raafl.submodel import FlatTensors, Submodels

WORDS = {"vocab_size": 23, "hidden_size": 12, "num_hidden_layers": 2, "intermediate_size": 7}
SLOW = {"num_attention_heads": 3, "max_position_embeddings": 16}
PIXELS = {
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 7,
    "num_labels": 4,
}
GROUPED = {**WORDS, "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 16}


def hugging_face(name: str, config: str, attention: str = "sdpa", **options: Any) -> nn.Module:
    """A model of transformers with random weights."""
    import transformers

    made = getattr(transformers, config)(**options)
    return getattr(transformers, name)._from_config(made, attn_implementation=attention)


def words() -> dict[str, Tensor]:
    """A batch of two texts, the second padded."""
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": torch.randint(3, 23, (2, 9)), "attention_mask": mask}


def pixels() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 8, 8)}


class Holds(nn.Module):
    """A module of a user's own that holds a model of transformers, and a head of its own."""

    def __init__(self, model: nn.Module, width: int = 12) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"backbone": model})
        self.head = nn.Sequential(nn.Linear(width, 5), nn.ReLU(), nn.Linear(5, 2))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.inner["backbone"](input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.head(hidden[:, 0])


class Encoder(nn.Module):
    """torch's own encoder over an embedding, with a padding mask."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 12)
        layer = nn.TransformerEncoderLayer(12, 3, 7, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(12), enable_nested_tensor=False)
        self.head = nn.Linear(12, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.encoder(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        return self.head(x[:, 0])


class Decoder(nn.Module):
    """torch's own decoder: two attentions in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(12, 3, 7, norm_first=True)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.head(self.layer(x, memory, tgt_mask=nn.Transformer.generate_square_subsequent_mask(len(x))))


class Attends(nn.Module):
    """An attention with keys and values of other widths, whose weights are part of the answer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, kdim=5, vdim=6, batch_first=True, **options)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(q, k, v, need_weights=True)[0]


class Spotter(nn.Module):
    """A convolution, a recurrent net of two layers, its last state to the output."""

    def __init__(self, kind: type[nn.RNNBase] = nn.GRU, **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 6, 3)
        self.rnn = kind(6, 5, num_layers=2, batch_first=True, **options)
        self.head = nn.Linear(10 if self.rnn.bidirectional else 5, 4)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(torch.relu(self.conv(x)).transpose(1, 2))
        return self.head(out[:, -1])


def last_state(spotter: Spotter, x: Tensor) -> Tensor:
    _, state = spotter.rnn(spotter.conv(x).transpose(1, 2))
    state = state[0] if isinstance(state, tuple) else state
    return spotter.head(state[-1])


def torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(8, 4, num_layers=2, num_heads=3, hidden_dim=12, mlp_dim=7, num_classes=4)
    nn.init.normal_(model.heads.head.weight)
    return model


@dataclass(frozen=True)
class Case:
    """A model, keyword arguments for it, and the axes it is known to have; ``width`` is that of the residual."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    axes: Mapping[str, int]
    width: str | None = "width"


def _layers(path: str, **axes: int) -> dict[str, int]:
    return {f"{path}.{index}.{axis}": size for index in range(2) for axis, size in axes.items()}


def _both(path: str, heads: int = 3) -> dict[str, int]:
    return _layers(path, heads=heads, ffn=7)


def _classifier(kind: str, task: str = "SequenceClassification", **options: Any) -> Callable[[], nn.Module]:
    return lambda: hugging_face(f"{kind}For{task}", f"{kind}Config", **options)


COVERING = (
    "bert_eager",
    "albert",
    "vit_eager",
    "llama_tied",
    "mistral",
    "held",
    "encoder",
    "decoder",
    "attention",
    "both_ways",
    "lstm",
    "rnn",
)
"""Cases that have every kind of layer between them; what holds for all is tested of the others in `make test-long`."""

CASES: dict[str, Case] = {
    "bert": Case(_classifier("Bert", **WORDS, **SLOW), words, _both("bert.encoder.layer")),
    "bert_eager": Case(_classifier("Bert", attention="eager", **WORDS, **SLOW), words, _both("bert.encoder.layer")),
    "bert_tied": Case(_classifier("Bert", "MaskedLM", **WORDS, **SLOW), words, _both("bert.encoder.layer")),
    "roberta": Case(_classifier("Roberta", **WORDS, **SLOW), words, _both("roberta.encoder.layer")),
    "distilbert": Case(
        _classifier("DistilBert", vocab_size=23, dim=12, hidden_dim=7, n_layers=2, n_heads=3),
        words,
        _both("distilbert.transformer.layer"),
    ),
    "albert": Case(
        _classifier("Albert", **{**WORDS, "num_hidden_layers": 4}, **SLOW, embedding_size=5),
        words,
        {f"albert.encoder.albert_layer_groups.0.albert_layers.0.{axis}": n for axis, n in (("heads", 3), ("ffn", 7))},
    ),
    "vit": Case(_classifier("ViT", "ImageClassification", **PIXELS), pixels, _both("vit.layers")),
    "vit_eager": Case(
        _classifier("ViT", "ImageClassification", attention="eager", **PIXELS), pixels, _both("vit.layers")
    ),
    "deit": Case(_classifier("DeiT", "ImageClassification", **PIXELS), pixels, _both("deit.layers")),
    "llama": Case(_classifier("Llama", "CausalLM", **GROUPED), words, _both("model.layers")),
    "llama_tied": Case(
        _classifier("Llama", "CausalLM", attention="eager", **GROUPED, tie_word_embeddings=True, attention_bias=True),
        words,
        _both("model.layers"),
    ),
    "mistral": Case(
        _classifier("Mistral", **GROUPED, head_dim=4, sliding_window=5, pad_token_id=0), words, _both("model.layers")
    ),
    "qwen2": Case(_classifier("Qwen2", "CausalLM", **GROUPED), words, _both("model.layers")),
    "held": Case(
        lambda: Holds(hugging_face("BertModel", "BertConfig", **WORDS, **SLOW)),
        words,
        {**_both("inner.backbone.encoder.layer"), "head.0": 5},
        None,
    ),
    "encoder": Case(Encoder, words, _both("encoder.layers"), "embed"),
    "encoder_first": Case(
        lambda: Encoder(norm_first=True, bias=False, activation="gelu"), words, _both("encoder.layers"), "embed"
    ),
    "decoder": Case(
        Decoder,
        lambda: {"x": torch.randn(5, 2, 12), "memory": torch.randn(4, 2, 12)},
        {"layer.heads": 3, "layer.cross_heads": 3, "layer.ffn": 7},
        None,
    ),
    "attention": Case(
        Attends,
        lambda: {"q": torch.randn(2, 4, 12), "k": torch.randn(2, 3, 5), "v": torch.randn(2, 3, 6)},
        {"attention.heads": 3},
        None,
    ),
    "torchvision_vit": Case(
        torchvision_vit,
        lambda: {"x": torch.randn(2, 3, 8, 8)},
        {f"encoder.layers.encoder_layer_{i}.{axis}": n for i in range(2) for axis, n in (("heads", 3), ("ffn", 7))},
    ),
    "both_ways": Case(
        lambda: Spotter(bidirectional=True), lambda: {"x": torch.randn(2, 3, 9)}, {"conv": 6, "rnn": 5}, None
    ),
    "gru": Case(Spotter, lambda: {"x": torch.randn(2, 3, 9)}, {"conv": 6, "rnn": 5}, None),
    "lstm": Case(lambda: Spotter(nn.LSTM), lambda: {"x": torch.randn(2, 3, 9)}, {"conv": 6, "rnn": 5}, None),
    "rnn": Case(
        lambda: Spotter(nn.RNN, bias=False, dropout=0.5),
        lambda: {"x": torch.randn(2, 3, 9)},
        {"conv": 6, "rnn": 5},
        None,
    ),
}


def output(module: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """The module's answer as one tensor."""
    answer = module(**inputs)
    return answer if isinstance(answer, Tensor) else answer.logits


@cache
def built(name: str, **options: Any) -> tuple[nn.Module, Submodels, FlatTensors]:
    """A model in evaluation mode with random parameters, its submodels, and its state; made once, leave them as they are."""
    torch.manual_seed(0)
    module = CASES[name].make().eval()
    randomise(module)
    submodels = Submodels(module, CASES[name].inputs(), **options)
    return module, submodels, submodels.state(module)


def randomise(module: nn.Module) -> None:
    """Draw every parameter so that none is near zero."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(0.2, 1.0).mul_(torch.randint(0, 2, parameter.shape) * 2 - 1)


class Task(nn.Module):
    """A model of transformers and a loss over its logits."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = CASES[name].make()

    def forward(self, x: Any) -> Any:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return output(self.model, batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())
