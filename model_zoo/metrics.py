"""Compute metrics that are no means over batches, as torchmetrics objects: `self.log` computes them after the last batch.

They are built on torchmetrics' own base class, which comes with lightning. Its ready-made metrics are not used: to import
them takes as long as everything else that a rank imports, and 100 MB.
"""

from __future__ import annotations

import torch
from lightning.pytorch.core.module import Metric  # type: ignore[attr-defined]  # torchmetrics' own, without its other metrics
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100
"""Target of a position or a sample that counts for nothing."""


class MacroF1(Metric):
    """Macro F1: the F1 score of each class over all samples, averaged over the classes that occur.

    The F1 score of a class is 2 TP / (2 TP + FP + FN). A class that is neither a label nor a prediction of any sample
    is left out, as in torchmetrics and scikit-learn.
    """

    full_state_update = False
    higher_is_better = True
    counts: Tensor

    def __init__(self) -> None:
        """Start without samples; the first ones determine the number of classes."""
        super().__init__()
        self.add_state("counts", torch.zeros(3, 0, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add the logits (batch, num_classes) and labels (batch,) of a batch; a label of -100 is ignored."""
        num_classes, counted = logits.shape[-1], labels != IGNORED
        predicted, labels = logits.argmax(dim=-1)[counted], labels[counted]
        found = (predicted[predicted == labels], predicted, labels)
        counts = torch.stack([torch.bincount(classes, minlength=num_classes) for classes in found])
        self.counts = self.counts + counts if self.counts.numel() else counts

    def compute(self) -> Tensor:
        """Return the macro F1 score, a scalar from 0 to 1; 0 without samples."""
        hits, predicted, labelled = self.counts
        occurs = predicted + labelled > 0
        if not bool(occurs.any()):
            return torch.zeros((), device=self.counts.device)
        score: Tensor = (2.0 * hits[occurs] / (predicted + labelled)[occurs]).mean()
        return score


class Perplexity(Metric):
    """Exponential of the mean cross-entropy per token, in nats, over all tokens of all batches."""

    full_state_update = False
    higher_is_better = False
    loss: Tensor
    num_tokens: Tensor

    def __init__(self) -> None:
        """Start with no tokens."""
        super().__init__()
        self.add_state("loss", torch.zeros((), dtype=torch.float32), dist_reduce_fx="sum")
        self.add_state("num_tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add the logits (batch, length, vocab_size) and targets (batch, length) of a batch; a target of -100 is ignored."""
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        self.loss = self.loss + loss
        self.num_tokens = self.num_tokens + (targets != IGNORED).sum()

    def compute(self) -> Tensor:
        """Return the perplexity, a scalar of at least 1; 1 without tokens."""
        return torch.exp(self.loss / self.num_tokens.clamp(min=1))


class ExactMatch(Metric):
    """Share of the answers of which every token is predicted correctly.

    An answer is a sequence of neighbouring targets that count. Each token is predicted from the correct ones before it.
    If all predictions are right, generating the likeliest token again and again would give exactly this answer.
    """

    full_state_update = False
    higher_is_better = True
    right: Tensor
    num_answers: Tensor

    def __init__(self) -> None:
        """Start with no answers."""
        super().__init__()
        self.add_state("right", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("num_answers", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, predicted: Tensor, targets: Tensor) -> None:
        """Add the predicted tokens and targets of a batch, both (batch, length); a target of -100 is ignored."""
        counted = targets != IGNORED
        begins = counted & ~F.pad(counted, (1, -1))
        answer = begins.flatten().cumsum(0).reshape_as(targets)  # numbers the answers from 1
        num_answers = begins.sum()
        wrong = torch.unique(answer[counted & (predicted != targets)])
        self.right = self.right + num_answers - len(wrong)
        self.num_answers = self.num_answers + num_answers

    def compute(self) -> Tensor:
        """Return the share, a scalar from 0 to 1; 0 without answers."""
        return self.right / self.num_answers.clamp(min=1)
