"""Plain LightningModules to train with raafl, or without it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model_zoo.albert import ALBERT as ALBERT
    from model_zoo.bert import BERT as BERT
    from model_zoo.char_lm import CharLM as CharLM
    from model_zoo.cnn import CNN as CNN
    from model_zoo.fasttext import FastText as FastText
    from model_zoo.huggingface import HFCausalLM as HFCausalLM
    from model_zoo.huggingface import HFImageClassifier as HFImageClassifier
    from model_zoo.huggingface import HFSeq2SeqLM as HFSeq2SeqLM
    from model_zoo.huggingface import HFSequenceClassifier as HFSequenceClassifier
    from model_zoo.keyword_spotter import KeywordSpotter as KeywordSpotter
    from model_zoo.llama import LLaMA as LLaMA
    from model_zoo.mlp import MLP as MLP
    from model_zoo.resnet import ResNet as ResNet
    from model_zoo.vgg import VGG as VGG
    from model_zoo.vgg import VGG11 as VGG11
    from model_zoo.vit import ViT as ViT

_HOMES = {
    "ALBERT": "albert",
    "BERT": "bert",
    "CNN": "cnn",
    "CharLM": "char_lm",
    "FastText": "fasttext",
    "HFCausalLM": "huggingface",
    "HFImageClassifier": "huggingface",
    "HFSeq2SeqLM": "huggingface",
    "HFSequenceClassifier": "huggingface",
    "KeywordSpotter": "keyword_spotter",
    "LLaMA": "llama",
    "MLP": "mlp",
    "ResNet": "resnet",
    "VGG": "vgg",
    "VGG11": "vgg",
    "ViT": "vit",
}


def __getattr__(name: str) -> Any:
    """Import a model when it is first asked for: a rank that trains an MLP need not import the others."""
    if name not in _HOMES:
        raise AttributeError(f"module 'model_zoo' has no model {name!r}; it has {', '.join(sorted(_HOMES))}")
    return getattr(importlib.import_module(f"model_zoo.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Return the names of all models."""
    return [*globals(), *_HOMES]
