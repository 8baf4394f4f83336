"""Exit heads for transformers of Hugging Face and torchvision, which have none of their own.

An exit after k blocks has its own copy of what comes after the last block. A submodel with k blocks and that exit puts the
copy in the place of the original: the model's own forward then ends early.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from raafl.errors import BadInput
from raafl.submodel.declared import Stack, find_stacks

_MODELS = "transformers.models"
_LAYERS = "transformers.modeling_layers"

Tail = Callable[[Any], tuple[str, ...]]

TAILS: dict[str, Tail] = {}
"""What of a model comes after the last block and is to be an exit's own, by dotted name of the model's type."""


def _tail(make: Tail, *types: str) -> None:
    TAILS.update(dict.fromkeys(types, make))


_tail(
    lambda model: (f"{model.base_model_prefix}.layernorm", "classifier"),
    f"{_MODELS}.vit.modeling_vit.ViTForImageClassification",
    f"{_MODELS}.deit.modeling_deit.DeiTForImageClassification",
)
_tail(
    lambda model: ("deit.layernorm", "cls_classifier", "distillation_classifier"),
    f"{_MODELS}.deit.modeling_deit.DeiTForImageClassificationWithTeacher",
)
_tail(lambda model: ("encoder.ln", "heads"), "torchvision.models.vision_transformer.VisionTransformer")
_tail(lambda model: ("bert.pooler", "classifier"), f"{_MODELS}.bert.modeling_bert.BertForSequenceClassification")
_tail(
    lambda model: ("classifier",),
    f"{_MODELS}.bert.modeling_bert.BertForTokenClassification",
    f"{_MODELS}.roberta.modeling_roberta.RobertaForSequenceClassification",
    f"{_MODELS}.roberta.modeling_roberta.RobertaForTokenClassification",
    f"{_MODELS}.distilbert.modeling_distilbert.DistilBertForTokenClassification",
)
_tail(
    lambda model: ("pre_classifier", "classifier"),
    f"{_MODELS}.distilbert.modeling_distilbert.DistilBertForSequenceClassification",
)
_tail(
    lambda model: (f"{model.base_model_prefix}.norm", "score"),
    f"{_LAYERS}.GenericForSequenceClassification",
    f"{_LAYERS}.GenericForTokenClassification",
)
# the vocabulary is large and often tied to the embedding: every exit of a language model reads the same one
_tail(
    lambda model: ("model.norm",),
    f"{_MODELS}.llama.modeling_llama.LlamaForCausalLM",
    f"{_MODELS}.mistral.modeling_mistral.MistralForCausalLM",
    f"{_MODELS}.qwen2.modeling_qwen2.Qwen2ForCausalLM",
)


def add_exits(model: nn.Module, depths: Sequence[int]) -> nn.Module:
    """Give ``model`` an exit head after each of these numbers of blocks, in place, and return it.

    The exits are modules ``exits.exit4`` and so on, copies of the model's own norm and head as they are now, and are
    declared as ``submodel_exits``; an exit of a language model has a norm of its own and shares the vocabulary. A model
    of your own declares its exits itself, see `Submodels`.

    Args:
        model: a classifier or causal language model of transformers (BERT, RoBERTa, DistilBERT, ViT, DeiT, LLaMA, Mistral,
            Qwen2) or torchvision's `VisionTransformer`.
        depths: numbers of blocks, each from 1 to one less than the model has.

    Raises:
        BadInput: another type of model, a depth that it does not have, or exits that it has already.
    """
    names = [f"{base.__module__}.{base.__qualname__}" for base in type(model).__mro__]
    tail = next((TAILS[name] for name in names if name in TAILS), None)
    if tail is None:
        raise BadInput(
            f"exits: {type(model).__name__} is of no type whose last layers are known: declare `submodel_exits` on it, "
            "or give " + ", ".join(sorted(name.rpartition(".")[2] for name in TAILS))
        )
    if hasattr(model, "submodel_exits") or hasattr(model, "exits"):
        raise BadInput(f"exits: {type(model).__name__} has exits already: add all of them at once")
    (stack,) = find_stacks(model).values() or (Stack("", ()),)
    exits, declared = nn.ModuleDict(), {}
    for depth in sorted(set(depths)):
        if not 0 < depth < len(stack):
            raise BadInput(f"exits: there is no exit after {depth} of {len(stack)} blocks: give 1 to {len(stack) - 1}")
        name = f"exit{depth}"
        exits[name] = nn.ModuleList(copy.deepcopy(model.get_submodule(path)) for path in tail(model))
        declared[name] = {path: f"exits.{name}.{place}" for place, path in enumerate(tail(model))}
    model.exits = exits
    model.submodel_exits = declared  # type: ignore[assignment]  # plain data
    return model


class StandIn(nn.Module):
    """Takes the place of another module, whose tensors keep the names they have where it lies itself."""

    def __init__(self, module: nn.Module) -> None:
        """Stand for ``module``, which lies elsewhere in the same model."""
        super().__init__()
        self.__dict__["stands_for"] = [module]  # in a list, or it would be a submodule here as well

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's answer."""
        return self.stands_for[0](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return the module's attribute."""
        if "stands_for" not in self.__dict__:  # while it is being copied
            raise AttributeError(name)
        return getattr(self.__dict__["stands_for"][0], name)
