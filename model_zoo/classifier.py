"""Define the steps and the optimiser that the zoo's classifiers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional as F

from model_zoo.metrics import MacroF1

Batch = Sequence[Tensor] | Mapping[str, Tensor]


class Classifier(LightningModule):
    """Base class of classifiers, whose forward returns logits (batch, num_classes), trained with SGD on the cross-entropy.

    Batches are ``(inputs, labels)``, ``(tokens, attention mask, labels)`` and the like, or mappings with an entry
    ``labels`` or ``label``. Everything but the labels is passed to ``forward``.
    """

    def __init__(self, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        """Set SGD's learning rate, momentum and weight decay."""
        super().__init__()
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss of a batch."""
        return F.cross_entropy(*self._logits_and_labels(batch))

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return and log the mean loss and accuracy of a batch, and top-5 accuracy if there are more than 5 classes.

        Log macro F1. The loss is computed at least in float32: in bfloat16 it would have three digits.
        """
        logits, y = self._logits_and_labels(batch)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        metrics = {"loss": F.cross_entropy(logits, y), "accuracy": accuracy(logits, y)}
        if logits.shape[-1] > 5:
            metrics["top5_accuracy"] = accuracy(logits, y, 5)
        if "macro_f1" not in self._modules:  # not before: copies that only train do without it
            self.macro_f1 = MacroF1().to(logits.device)
        self.macro_f1.update(logits, y)
        self.log_dict({**metrics, "macro_f1": self.macro_f1}, batch_size=len(y))
        return metrics

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD for the parameters that train."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    def _logits_and_labels(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if isinstance(batch, Mapping):
            inputs = dict(batch)
            y = inputs.pop("labels") if "labels" in inputs else inputs.pop("label")
            return self(**inputs), y
        *values, y = batch
        return self(*values), y


def accuracy(logits: Tensor, y: Tensor, k: int = 1) -> Tensor:
    """Return the share of samples whose label is among the k largest logits; ties are broken arbitrarily.

    Args:
        logits: logits of shape (batch, classes).
        y: labels of shape (batch,).
        k: number of largest logits among which the label may be.
    """
    if k == 1:
        return (logits.argmax(dim=-1) == y).float().mean()
    return (logits.topk(k, dim=-1).indices == y.unsqueeze(-1)).any(dim=-1).float().mean()
