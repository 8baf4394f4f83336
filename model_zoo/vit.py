"""Vision transformers in the sizes of the Co-S2P paper, and smaller ones."""

from __future__ import annotations

from typing import Final, Literal

from torch import Tensor

from model_zoo import hub
from model_zoo.adamw import Optimizer
from model_zoo.huggingface import HFClassifier
from model_zoo.sizes import shape_of

SIZES: Final = {
    "micro": (2, 32, 64, 2),
    "mini": (4, 128, 256, 4),
    "narrow": (8, 64, 128, 4),
    "tiny": (8, 512, 2048, 8),
    "base": (12, 768, 3072, 12),
    "base-ext": (16, 768, 3072, 12),
}
"""Blocks, width, width of the MLP, heads. The last three are the paper's (Table II): 26 M, 86 M and 0.11 B parameters with
224 x 224 images in patches of 16; micro is for tests, mini for a CPU, and narrow, too, with as many blocks as tiny."""


class ViT(HFClassifier):
    """Dosovitskiy et al. 2021 (arXiv:2010.11929), transformers' ``ViTForImageClassification`` with random weights.

    Takes images (batch, in_channels, image_size, image_size); returns logits (batch, num_classes). Trained with AdamW.
    """

    def __init__(
        self,
        size: Literal["micro", "mini", "narrow", "tiny", "base", "base-ext"] = "tiny",
        image_size: int = 32,
        patch_size: int = 4,
        in_channels: int = 3,
        num_classes: int = 10,
        dropout: float = 0.0,
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        warmup_steps: int = 0,
        optimizer: Optimizer = "adamw",
    ) -> None:
        """Build the model.

        Args:
            size: one of `SIZES`.
            image_size: height and width.
            patch_size: height and width of a patch: 4 for 32 x 32 images, 16 in the papers for 224 x 224.
            in_channels: 3 for colour.
            num_classes: number of logits.
            dropout: probability of dropping a hidden unit.
            lr: learning rate of AdamW.
            weight_decay: of matrices.
            warmup_steps: steps of each task over which the learning rate rises.
            optimizer: adamw, or adan (Xie et al. 2022).

        Raises:
            ValueError: there is no such size, or the patches do not fill the image.
        """
        if image_size % patch_size:
            raise ValueError(f"ViT: image_size is {image_size}: give a multiple of patch_size, {patch_size}")
        depth, width, mlp, heads = shape_of("ViT", size, SIZES)
        architecture = {
            "model_type": "vit",
            "num_hidden_layers": depth,
            "hidden_size": width,
            "intermediate_size": mlp,
            "num_attention_heads": heads,
            "image_size": image_size,
            "patch_size": patch_size,
            "num_channels": in_channels,
            "num_labels": num_classes,
            "hidden_dropout_prob": dropout,
        }
        super().__init__(
            hub.make("ImageClassification", None, False, architecture), lr, weight_decay, warmup_steps, optimizer
        )
        self.save_hyperparameters()

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch."""
        logits: Tensor = self.model(pixel_values=x).logits
        return logits
