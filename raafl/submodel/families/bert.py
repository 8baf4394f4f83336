"""BERT, RoBERTa, DistilBERT and ALBERT, as transformers has them."""

from __future__ import annotations

from typing import Any

from raafl.submodel.rules import leaf, register
from raafl.submodel.transformer import Attention, Block, register_block, renumber

_MODELS = "transformers.models"


@register_block(f"{_MODELS}.bert.modeling_bert.BertLayer", f"{_MODELS}.roberta.modeling_roberta.RobertaLayer")
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


@register_block(f"{_MODELS}.distilbert.modeling_distilbert.TransformerBlock")
def _distilbert(layer: Any) -> Block:
    at = "attention"
    heads = Attention(
        f"{at}.q_lin", f"{at}.k_lin", f"{at}.v_lin", f"{at}.out_lin", at, layer.attention.attention_head_size
    )
    return Block({"heads": heads}, ("ffn.lin1",), "ffn.lin2", ("sa_layer_norm", "output_layer_norm"))


@register_block(f"{_MODELS}.albert.modeling_albert.AlbertLayer")
def _albert(layer: Any) -> Block:
    at = "attention"
    heads = Attention(f"{at}.query", f"{at}.key", f"{at}.value", f"{at}.dense", at, layer.attention.attention_head_size)
    return Block({"heads": heads}, ("ffn",), "ffn_output", (f"{at}.LayerNorm", "full_layer_layer_norm"))


def _resize(encoder: Any) -> None:
    if len(encoder.layer) != encoder.config.num_hidden_layers:
        renumber(encoder.layer, encoder.config)


register(
    f"{_MODELS}.bert.modeling_bert.BertEncoder", f"{_MODELS}.roberta.modeling_roberta.RobertaEncoder", resize=_resize
)(leaf)
