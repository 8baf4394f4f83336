"""Models that nothing in the package knows: each is cut along every axis found, is proven, and keeps the share known."""

from __future__ import annotations

import pytest
import torch

from raafl.submodel import Spec, Submodels
from raafl.submodel.prove.proof import refuted
from tests.submodel.architectures import ARCHITECTURES

SHARES = {
    "GPT-2": (4, 0.35),
    "Qwen3": (4, 0.42),
    "GPT-NeoX": (4, 0.36),
    "T5": (7, 0.28),
    "T5 gated": (7, 0.27),
    "BART": (10, 0.35),
    "ELECTRA": (5, 0.35),
    "BLOOM": (4, 0.30),
    "Gemma": (4, 0.38),
    "Phi": (4, 0.46),
    "Phi-3": (4, 0.42),
    "OPT": (4, 0.39),
    "DeBERTa-v2": (6, 0.33),
    "Falcon": (4, 0.33),
    "GPT-BigCode": (4, 0.39),
    "Mixtral": (4, 0.36),
    "Mamba": (6, 0.29),
    "ViT-MAE": (6, 0.54),
    "DINOv2": (4, 0.48),
    "SegFormer": (4, 0.59),
    "Swin": (8, 0.34),
    "CLIP text": (4, 0.39),
    "HuBERT": (6, 0.36),
    "Whisper": (6, 0.33),
    "Wav2Vec2": (6, 0.36),
    "torchvision swin": (8, 0.34),
    "torchvision convnext": (2, 0.51),
    "torchvision densenet": (10, 0.10),
    "nanoGPT": (4, 0.36),
    "sizes in the code": (4, 0.36),
    "rotary, experts": (10, 0.32),
    "autoencoder": (5, 0.07),
    "functional weights": (2, 0.15),
    "cells by hand": (3, 0.12),
    "UNet": (4, 0.08),
    "MLP-Mixer": (2, 0.72),
    "nn.TransformerEncoder": (4, 0.36),
}
"""Number of axes, and share of the parameters with a quarter of each, the residual width whole."""


@pytest.mark.quick_cases(
    "GPT-2",
    "T5 gated",
    "DeBERTa-v2",
    "Mixtral",
    "Mamba",
    "Swin",
    "torchvision convnext",
    "torchvision densenet",
    "sizes in the code",
    "rotary, experts",
    "autoencoder",
    "functional weights",
    "cells by hand",
    "UNet",
    "MLP-Mixer",
    "nn.TransformerEncoder",
)
@pytest.mark.parametrize("name", SHARES)
def test_every_axis_is_proven(name):
    if not name.startswith(
        ("torchvision", "nn.", "nano", "sizes", "rotary", "auto", "functional", "cells", "UNet", "MLP")
    ):
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    architecture = ARCHITECTURES[name]
    module, batch = architecture.make(), architecture.batch()
    submodels = Submodels(module, batch)
    number, share = SHARES[name]
    assert submodels.problem is None and len(submodels.axes) == number
    assert refuted(submodels, module, batch) == {}
    spec = Spec.select({axis.name: range(max(1, axis.size // 4)) for axis in submodels.axes.values()})
    kept = sum(e.numel for e in submodels.layout(spec).entries if e.name in submodels.parameter_names)
    assert kept / sum(submodels.parameters.values()) == pytest.approx(share, abs=0.006)
