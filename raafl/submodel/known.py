"""What is known of transformers of other packages: their last layers, of which exits are copies, and layers that stay whole.

A type is named in text, by its module and name, so that the package need not be there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

PRETRAINED = "transformers.modeling_utils.PreTrainedModel"
TORCHVISION = "torchvision.models.vision_transformer.VisionTransformer"


def _types(names: str) -> list[str]:
    """Return the dotted names of types of transformers, each given as family and type."""
    split = [name.split(".") for name in names.split()]
    return [f"transformers.models.{family}.modeling_{family}.{kind}" for family, kind in split]


HELD: dict[str, tuple[str, bool]] = {
    **dict.fromkeys(_types("bert.BertPooler roberta.RobertaPooler vit.ViTPooler deit.DeiTPooler"), ("dense", True)),
    **dict.fromkeys(_types("roberta.RobertaClassificationHead"), ("dense", True)),
    **dict.fromkeys(_types("distilbert.DistilBertForSequenceClassification"), ("pre_classifier", True)),
    **dict.fromkeys(_types("distilbert.DistilBertForMultipleChoice"), ("pre_classifier", True)),
    **dict.fromkeys(_types("albert.AlbertModel"), ("pooler", True)),
    **dict.fromkeys(_types("albert.AlbertEmbeddings"), ("word_embeddings", False)),
    TORCHVISION: ("heads.pre_logits", False),
}
"""Types, and a layer in each that was whole before axes were found by following steps: recorded runs of them stay as they are.

Whether the features that it makes are hidden states as those that it reads are, and go with the residual width; else they
stay whole.
"""


@dataclass(frozen=True, slots=True)
class Tail:
    """What comes after the last block of a type of model.

    Attributes:
        names: paths of the modules of which an exit has copies; {} is the model's ``base_model_prefix``.
        logits: ``logits(model, modules, hidden, input_ids)``: what the model makes of hidden states, shape (batch,
            positions, width), with these modules in the place of those.
    """

    names: str
    logits: Callable[[Any, Any, Tensor, Tensor | None], Any]

    def paths(self, model: nn.Module) -> list[str]:
        """Return the paths of those modules in ``model``."""
        return self.names.format(getattr(model, "base_model_prefix", "")).split()


def _at_last_token(model: Any, logits: Tensor, ids: Tensor | None) -> Tensor:
    if ids is None or model.config.pad_token_id is None:
        return logits[:, -1]
    places = torch.arange(ids.shape[1], device=ids.device) * (ids != model.config.pad_token_id)
    return logits[torch.arange(len(ids), device=ids.device), places.argmax(-1)]


_GENERIC = "transformers.modeling_layers.Generic"
_ENDS: list[tuple[list[str], Tail]] = [
    (_types("bert.BertForSequenceClassification"),
     Tail("{}.pooler classifier", lambda model, own, hidden, ids: own[1](model.dropout(own[0](hidden))))),
    (_types("bert.BertForTokenClassification roberta.RobertaForTokenClassification "
            "distilbert.DistilBertForTokenClassification"),
     Tail("classifier", lambda model, own, hidden, ids: own[0](model.dropout(hidden)))),
    (_types("roberta.RobertaForSequenceClassification"),
     Tail("classifier", lambda model, own, hidden, ids: own[0](hidden))),
    (_types("distilbert.DistilBertForSequenceClassification"),
     Tail("pre_classifier classifier",
          lambda model, own, hidden, ids: own[1](model.dropout(torch.relu(own[0](hidden[:, 0])))))),
    ([f"{_GENERIC}ForSequenceClassification"],
     Tail("{}.norm score", lambda model, own, hidden, ids: _at_last_token(model, own[1](own[0](hidden)), ids))),
    ([f"{_GENERIC}ForTokenClassification"],
     Tail("{}.norm score", lambda model, own, hidden, ids: own[1](model.dropout(own[0](hidden))))),
    # the vocabulary is large and often tied to the embedding: every exit of a language model reads the same one
    (_types("llama.LlamaForCausalLM mistral.MistralForCausalLM qwen2.Qwen2ForCausalLM"),
     Tail("{}.norm", lambda model, own, hidden, ids: model.lm_head(own[0](hidden)))),
    (_types("vit.ViTForImageClassification deit.DeiTForImageClassification"),
     Tail("{}.layernorm classifier", lambda model, own, hidden, ids: own[1](own[0](hidden)[:, 0]))),
    (_types("deit.DeiTForImageClassificationWithTeacher"),
     Tail("{}.layernorm cls_classifier distillation_classifier",
          lambda model, own, hidden, ids: (own[1](own[0](hidden)[:, 0]) + own[2](own[0](hidden)[:, 1])) / 2)),
    ([TORCHVISION], Tail("encoder.ln heads", lambda model, own, hidden, ids: own[1](own[0](hidden)[:, 0]))),
]  # fmt: skip
TAILS = {name: tail for names, tail in _ENDS for name in names}
"""By dotted name of the model's type."""


def bases(module: nn.Module) -> list[str]:
    """List the dotted names of the module's type and its bases, nearest first."""
    return [f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__]


def tail_of(model: nn.Module) -> Tail | None:
    """Look up the model's last layers."""
    return next((TAILS[name] for name in bases(model) if name in TAILS), None)


def held(module: nn.Module) -> Iterator[tuple[str, bool]]:
    """Yield the path of each layer of `HELD`, and whether it goes with the residual width."""
    for path, part in module.named_modules():
        for base in bases(part):
            if base in HELD:
                layer, is_wide = HELD[base]
                yield f"{path}.{layer}".removeprefix("."), is_wide


def is_packaged(module: nn.Module) -> bool:
    """Check whether the module is a whole transformer of a package."""
    return not {PRETRAINED, TORCHVISION}.isdisjoint(bases(module))
