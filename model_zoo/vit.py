"""Vision transformers in the sizes of the Co-S2P paper, and smaller ones."""

from __future__ import annotations

from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from model_zoo import hub
from model_zoo.adamw import Optimizer
from model_zoo.classifier import Batch
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
    """Vision transformer: transformers' ``ViTForImageClassification`` with random weights.

    Dosovitskiy et al. 2021 (arXiv:2010.11929). Input: images (batch, in_channels, image_size, image_size). Output:
    logits (batch, num_classes). Trained with AdamW.
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
        mixup: float = 0.0,
        mixup_labels: bool = True,
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
            mixup: train on mixtures of two images (Zhang et al. 2018), with a share drawn for each batch from
                Beta(mixup, mixup); 0 = on images as they are.
            mixup_labels: mix the loss as the images; false = the label of the first image alone, which is a fault that published
                code has (docs/methods/co-s2p.md).

        Raises:
            ValueError: there is no such size, the patches do not fill the image, or ``mixup`` is below 0.
        """
        if mixup < 0:
            raise ValueError(f"ViT: mixup is {mixup}: give 0 (none) or more, such as 1")
        if not (mixup or mixup_labels):
            raise ValueError("ViT: mixup_labels is false, but mixup is 0: leave it out, or set mixup")
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
        self.mixup, self.mixup_labels = mixup, mixup_labels
        self.save_hyperparameters()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss of a batch; if ``mixup`` is set, of mixed images."""
        if not self.mixup:
            return super().training_step(batch, batch_idx)
        images, labels = batch
        assert isinstance(images, Tensor) and isinstance(labels, Tensor)
        # drawn before the forward pass, so that each exit of a distilled submodel sees the same mixture
        order = torch.randperm(len(labels), device=images.device)
        share = torch.distributions.Beta(self.mixup, self.mixup).sample().to(images.device)
        logits = self(share * images + (1 - share) * images[order])
        loss = F.cross_entropy(logits, labels)
        return share * loss + (1 - share) * F.cross_entropy(logits, labels[order]) if self.mixup_labels else loss

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch."""
        logits: Tensor = self.model(pixel_values=x).logits
        return logits
