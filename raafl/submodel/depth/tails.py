"""Describe the layers after the last block of transformers of other packages, by type, for exits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from raafl.submodel.packages import TORCHVISION, hugging_face, type_names


@dataclass(frozen=True, slots=True)
class Tail:
    """Description of the layers after a model's last block (norm and head), for one type of model."""

    names: str  # paths of the modules that an exit copies; in them, {} stands for the model's ``base_model_prefix``
    # function ``logits(model, modules, hidden, input_ids)`` that computes logits from hidden states (batch,
    # positions, width) with copies of these modules
    logits: Callable[[Any, Any, Tensor, Tensor | None], Any]

    def paths(self, model: nn.Module) -> list[str]:
        """Return the paths of the modules after the last block (norm and head) in ``model``."""
        return self.names.format(getattr(model, "base_model_prefix", "")).split()


def _at_last_token(model: Any, logits: Tensor, ids: Tensor | None) -> Tensor:
    if ids is None or model.config.pad_token_id is None:
        return logits[:, -1]
    places = torch.arange(ids.shape[1], device=ids.device) * (ids != model.config.pad_token_id)
    return logits[torch.arange(len(ids), device=ids.device), places.argmax(-1)]


_GENERIC = "transformers.modeling_layers.Generic"
_ENDS: list[tuple[list[str], Tail]] = [
    (
        hugging_face("bert.BertForSequenceClassification"),
        Tail("{}.pooler classifier", lambda model, own, hidden, ids: own[1](model.dropout(own[0](hidden)))),
    ),
    (
        hugging_face(
            "bert.BertForTokenClassification roberta.RobertaForTokenClassification "
            "distilbert.DistilBertForTokenClassification"
        ),
        Tail("classifier", lambda model, own, hidden, ids: own[0](model.dropout(hidden))),
    ),
    (
        hugging_face("roberta.RobertaForSequenceClassification"),
        Tail("classifier", lambda model, own, hidden, ids: own[0](hidden)),
    ),
    (
        hugging_face("distilbert.DistilBertForSequenceClassification"),
        Tail(
            "pre_classifier classifier",
            lambda model, own, hidden, ids: own[1](model.dropout(torch.relu(own[0](hidden[:, 0])))),
        ),
    ),
    (
        [f"{_GENERIC}ForSequenceClassification"],
        Tail("{}.norm score", lambda model, own, hidden, ids: _at_last_token(model, own[1](own[0](hidden)), ids)),
    ),
    (
        [f"{_GENERIC}ForTokenClassification"],
        Tail("{}.norm score", lambda model, own, hidden, ids: own[1](model.dropout(own[0](hidden)))),
    ),
    # the vocabulary is large and often tied to the embedding: every exit of a language model reads the same one
    (
        hugging_face("llama.LlamaForCausalLM mistral.MistralForCausalLM qwen2.Qwen2ForCausalLM"),
        Tail("{}.norm", lambda model, own, hidden, ids: model.lm_head(own[0](hidden))),
    ),
    (
        hugging_face("vit.ViTForImageClassification deit.DeiTForImageClassification"),
        Tail("{}.layernorm classifier", lambda model, own, hidden, ids: own[1](own[0](hidden)[:, 0])),
    ),
    (
        hugging_face("deit.DeiTForImageClassificationWithTeacher"),
        Tail(
            "{}.layernorm cls_classifier distillation_classifier",
            lambda model, own, hidden, ids: (own[1](own[0](hidden)[:, 0]) + own[2](own[0](hidden)[:, 1])) / 2,
        ),
    ),
    ([TORCHVISION], Tail("encoder.ln heads", lambda model, own, hidden, ids: own[1](own[0](hidden)[:, 0]))),
]
TAILS = {name: tail for names, tail in _ENDS for name in names}
"""By dotted name of the model's type."""


def tail_of(model: nn.Module) -> Tail | None:
    """Return the description of a model's last layers; None if the model's type is not known."""
    return next((TAILS[name] for name in type_names(model) if name in TAILS), None)
