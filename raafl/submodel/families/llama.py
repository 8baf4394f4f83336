"""LLaMA, Mistral and Qwen2, as transformers has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raafl.submodel.known import BLOCKS, MODELS, register_tail, renumber
from raafl.submodel.layers import resizes

_GENERIC = "transformers.modeling_layers.Generic"

BLOCKS.update(
    {
        f"{MODELS}.llama.modeling_llama.LlamaDecoderLayer", f"{MODELS}.mistral.modeling_mistral.MistralDecoderLayer",
        f"{MODELS}.qwen2.modeling_qwen2.Qwen2DecoderLayer",
    }
)  # fmt: skip


@resizes(
    f"{MODELS}.llama.modeling_llama.LlamaModel",
    f"{MODELS}.mistral.modeling_mistral.MistralModel",
    f"{MODELS}.qwen2.modeling_qwen2.Qwen2Model",
)
def _resize(model: Any) -> None:
    renumber(model.layers, model.config)


def _at_last_token(model: Any, logits: Tensor, ids: Tensor | None) -> Tensor:
    if ids is None or model.config.pad_token_id is None:
        return logits[:, -1]
    places = torch.arange(ids.shape[1], device=ids.device) * (ids != model.config.pad_token_id)
    return logits[torch.arange(len(ids), device=ids.device), places.argmax(-1)]


register_tail(
    lambda model: (f"{model.base_model_prefix}.norm", "score"),
    lambda model, own, hidden, ids: _at_last_token(model, own[1](own[0](hidden)), ids),
    f"{_GENERIC}ForSequenceClassification",
)
register_tail(
    lambda model: (f"{model.base_model_prefix}.norm", "score"),
    lambda model, own, hidden, ids: own[1](model.dropout(own[0](hidden))),
    f"{_GENERIC}ForTokenClassification",
)


# the vocabulary is large and often tied to the embedding: every exit of a language model reads the same one
register_tail(
    ("model.norm",),
    lambda model, own, hidden, ids: model.lm_head(own[0](hidden)),
    f"{MODELS}.llama.modeling_llama.LlamaForCausalLM",
    f"{MODELS}.mistral.modeling_mistral.MistralForCausalLM",
    f"{MODELS}.qwen2.modeling_qwen2.Qwen2ForCausalLM",
)
