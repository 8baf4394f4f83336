"""LLaMA, Mistral and Qwen2, as transformers has them: grouped-query attention and a gated feed-forward part."""

from __future__ import annotations

from typing import Any

from raafl.submodel.rules import leaf, register
from raafl.submodel.transformer import Attention, Block, register_block, renumber

_MODELS = "transformers.models"


@register_block(
    f"{_MODELS}.llama.modeling_llama.LlamaDecoderLayer",
    f"{_MODELS}.mistral.modeling_mistral.MistralDecoderLayer",
    f"{_MODELS}.qwen2.modeling_qwen2.Qwen2DecoderLayer",
)
def _decoder_layer(layer: Any) -> Block:
    at = "self_attn"
    heads = Attention(f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj", f"{at}.o_proj", at, layer.self_attn.head_dim)
    norms = ("input_layernorm", "post_attention_layernorm")
    return Block({"heads": heads}, ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", norms)


def _resize(model: Any) -> None:
    if len(model.layers) != model.config.num_hidden_layers:
        renumber(model.layers, model.config)


register(
    f"{_MODELS}.llama.modeling_llama.LlamaModel",
    f"{_MODELS}.mistral.modeling_mistral.MistralModel",
    f"{_MODELS}.qwen2.modeling_qwen2.Qwen2Model",
    resize=_resize,
)(leaf)
