"""What the classifiers of the zoo share: the steps and the optimiser."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional as F


class Classifier(LightningModule):
    """A module whose forward gives logits (batch, num_classes), trained with SGD on the cross-entropy.

    Batches are ``(inputs, labels)``.
    """

    def __init__(self, lr: float, momentum: float) -> None:
        """Note the learning rate and momentum of SGD."""
        super().__init__()
        self.lr, self.momentum = lr, momentum

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss of a batch."""
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return and log the mean loss and accuracy of a batch."""
        x, y = batch
        logits = self(x)
        metrics = {"loss": F.cross_entropy(logits, y), "accuracy": accuracy(logits, y)}
        self.log_dict(metrics)
        return metrics

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD over the parameters that train."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=self.lr, momentum=self.momentum)


def accuracy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the share of samples whose largest logit is their label."""
    return (logits.argmax(dim=-1) == y).float().mean()
