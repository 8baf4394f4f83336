"""BERT, RoBERTa, DistilBERT and ALBERT, as transformers has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from raafl.submodel.known import MODELS, SQUARE, along, register_piece, register_tail
from raafl.submodel.rules import leaf, register
from raafl.submodel.transformer import Attention, Block, register_block, renumber


@register_block(f"{MODELS}.bert.modeling_bert.BertLayer", f"{MODELS}.roberta.modeling_roberta.RobertaLayer")
def _bert(layer: Any) -> Block:
    attentions = {"heads": _bert_attention(layer.attention, "attention")}
    norms = ["attention.output.LayerNorm", "output.LayerNorm"]
    if getattr(layer, "crossattention", None) is not None:
        attentions["cross_heads"] = _bert_attention(layer.crossattention, "crossattention", on_width=False)
        norms.append("crossattention.output.LayerNorm")
    return Block(attentions, ("intermediate.dense",), "output.dense", tuple(norms))


def _bert_attention(attention: Any, path: str, *, on_width: bool = True) -> Attention:
    own = f"{path}.self"
    return Attention(
        f"{own}.query", f"{own}.key", f"{own}.value", f"{path}.output.dense", own,
        attention.self.attention_head_size, on_width,
    )  # fmt: skip


@register_block(f"{MODELS}.distilbert.modeling_distilbert.TransformerBlock")
def _distilbert(layer: Any) -> Block:
    at = "attention"
    heads = Attention(
        f"{at}.q_lin", f"{at}.k_lin", f"{at}.v_lin", f"{at}.out_lin", at, layer.attention.attention_head_size
    )
    return Block({"heads": heads}, ("ffn.lin1",), "ffn.lin2", ("sa_layer_norm", "output_layer_norm"))


@register_block(f"{MODELS}.albert.modeling_albert.AlbertLayer")
def _albert(layer: Any) -> Block:
    at = "attention"
    heads = Attention(f"{at}.query", f"{at}.key", f"{at}.value", f"{at}.dense", at, layer.attention.attention_head_size)
    return Block({"heads": heads}, ("ffn",), "ffn_output", (f"{at}.LayerNorm", "full_layer_layer_norm"))


def _resize(encoder: Any) -> None:
    if len(encoder.layer) != encoder.config.num_hidden_layers:
        renumber(encoder.layer, encoder.config)


register(
    f"{MODELS}.bert.modeling_bert.BertEncoder", f"{MODELS}.roberta.modeling_roberta.RobertaEncoder", resize=_resize
)(leaf)


@register_piece(
    f"{MODELS}.bert.modeling_bert.BertEmbeddings", f"{MODELS}.roberta.modeling_roberta.RobertaEmbeddings",
    f"{MODELS}.distilbert.modeling_distilbert.Embeddings",
)  # fmt: skip
def _embeddings(layer: Any) -> Iterator[tuple[str, int]]:
    for name, part in layer.named_children():
        if isinstance(part, nn.Embedding | nn.LayerNorm):
            yield from along(layer, name)


@register_piece(f"{MODELS}.bert.modeling_bert.BertPooler", f"{MODELS}.roberta.modeling_roberta.RobertaPooler")
def _pooler(layer: Any) -> Iterator[tuple[str, int]]:
    return along(layer, "dense", square=True)


@register_piece(f"{MODELS}.albert.modeling_albert.AlbertTransformer")
def _albert_mapping(layer: Any) -> Iterator[tuple[str, int]]:
    # the embedding's own width is another one
    yield from ((f"embedding_hidden_mapping_in.{name}", 0) for name in ("weight", "bias"))


@register_piece(f"{MODELS}.bert.modeling_bert.BertLMPredictionHead")
def _bert_lm_head(layer: Any) -> Iterator[tuple[str, int]]:
    yield from (
        (f"transform.{name}", dim)
        for part, square in (("dense", True), ("LayerNorm", False))
        for name, dim in along(layer.transform, part, square=square)
    )
    yield from along(layer, "decoder")


@register_piece(f"{MODELS}.roberta.modeling_roberta.RobertaLMHead")
def _roberta_lm_head(layer: Any) -> Iterator[tuple[str, int]]:
    yield from along(layer, "dense", square=True)
    yield from along(layer, "layer_norm")
    yield from along(layer, "decoder")


@register_piece(f"{MODELS}.roberta.modeling_roberta.RobertaClassificationHead")
def _roberta_head(layer: Any) -> Iterator[tuple[str, int]]:
    yield from along(layer, "dense", square=True)
    yield from along(layer, "out_proj")


@register_piece(
    f"{MODELS}.bert.modeling_bert.BertOnlyNSPHead", f"{MODELS}.bert.modeling_bert.BertPreTrainingHeads",
    f"{MODELS}.albert.modeling_albert.AlbertSOPHead",
)  # fmt: skip
def _sentence_head(layer: Any) -> Iterator[tuple[str, int]]:
    (name,) = (name for name, part in layer.named_children() if isinstance(part, nn.Linear))
    return along(layer, name)


@register_piece(f"{MODELS}.albert.modeling_albert.AlbertMLMHead")
def _albert_lm_head(layer: Any) -> Iterator[tuple[str, int]]:
    return along(layer, "dense")


SQUARE.update(
    {
        (f"{MODELS}.distilbert.modeling_distilbert.DistilBertForSequenceClassification", "pre_classifier"),
        (f"{MODELS}.distilbert.modeling_distilbert.DistilBertForMultipleChoice", "pre_classifier"),
        (f"{MODELS}.distilbert.modeling_distilbert.DistilBertForMaskedLM", "vocab_transform"),
        (f"{MODELS}.albert.modeling_albert.AlbertModel", "pooler"),
    }
)
register_tail(
    ("bert.pooler", "classifier"),
    lambda model, own, hidden, ids: own[1](model.dropout(own[0](hidden))),
    f"{MODELS}.bert.modeling_bert.BertForSequenceClassification",
)
register_tail(
    ("classifier",),
    lambda model, own, hidden, ids: own[0](model.dropout(hidden)),
    f"{MODELS}.bert.modeling_bert.BertForTokenClassification",
    f"{MODELS}.roberta.modeling_roberta.RobertaForTokenClassification",
    f"{MODELS}.distilbert.modeling_distilbert.DistilBertForTokenClassification",
)
register_tail(
    ("classifier",),
    lambda model, own, hidden, ids: own[0](hidden),
    f"{MODELS}.roberta.modeling_roberta.RobertaForSequenceClassification",
)
register_tail(
    ("pre_classifier", "classifier"),
    lambda model, own, hidden, ids: own[1](model.dropout(torch.relu(own[0](hidden[:, 0])))),
    f"{MODELS}.distilbert.modeling_distilbert.DistilBertForSequenceClassification",
)
