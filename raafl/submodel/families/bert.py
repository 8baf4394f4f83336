"""BERT, RoBERTa, DistilBERT and ALBERT, as transformers has them."""

from __future__ import annotations

from typing import Any

import torch

from raafl.submodel.known import BLOCKS, HELD, MODELS, register_tail, renumber
from raafl.submodel.layers import resizes

BLOCKS.update(
    {
        f"{MODELS}.bert.modeling_bert.BertLayer", f"{MODELS}.roberta.modeling_roberta.RobertaLayer",
        f"{MODELS}.distilbert.modeling_distilbert.TransformerBlock", f"{MODELS}.albert.modeling_albert.AlbertLayer",
    }
)  # fmt: skip
HELD.update(
    {
        f"{MODELS}.bert.modeling_bert.BertPooler": {"dense": True},
        f"{MODELS}.roberta.modeling_roberta.RobertaPooler": {"dense": True},
        f"{MODELS}.roberta.modeling_roberta.RobertaClassificationHead": {"dense": True},
        f"{MODELS}.distilbert.modeling_distilbert.DistilBertForSequenceClassification": {"pre_classifier": True},
        f"{MODELS}.distilbert.modeling_distilbert.DistilBertForMultipleChoice": {"pre_classifier": True},
        f"{MODELS}.albert.modeling_albert.AlbertModel": {"pooler": True},
        f"{MODELS}.albert.modeling_albert.AlbertEmbeddings": {"word_embeddings": False},
    }
)


@resizes(f"{MODELS}.bert.modeling_bert.BertEncoder", f"{MODELS}.roberta.modeling_roberta.RobertaEncoder")
def _resize(encoder: Any) -> None:
    renumber(encoder.layer, encoder.config)


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
