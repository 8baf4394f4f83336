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
    """F1 score of each class over all samples, averaged over the classes that occur, among labels or predictions.

    A class that is neither label nor prediction of any sample counts for nothing, as in torchmetrics and scikit-learn. The
    score of a class is 2 TP / (2 TP + FP + FN).
    """

    full_state_update = False
    higher_is_better = True
    counts: Tensor

    def __init__(self) -> None:
        """Start without samples; the first ones determine the number of classes."""
        super().__init__()
        self.add_state("counts", torch.zeros(3, 0, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Count logits (batch, num_classes) and labels (batch,); a label of -100 is left out."""
        num_classes, counted = logits.shape[-1], labels != IGNORED
        predicted, labels = logits.argmax(dim=-1)[counted], labels[counted]
        found = (predicted[predicted == labels], predicted, labels)
        counts = torch.stack([torch.bincount(classes, minlength=num_classes) for classes in found])
        self.counts = self.counts + counts if self.counts.numel() else counts

    def compute(self) -> Tensor:
        """Return the score, a scalar from 0 to 1; 0 where there are no samples."""
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
        """Add up logits (batch, length, vocab_size) and targets (batch, length); a target of -100 is left out."""
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        self.loss = self.loss + loss
        self.num_tokens = self.num_tokens + (targets != IGNORED).sum()

    def compute(self) -> Tensor:
        """Return the perplexity, a scalar of at least 1; 1 where there are no tokens."""
        return torch.exp(self.loss / self.num_tokens.clamp(min=1))


class ExactMatch(Metric):
    """Share of the answers that are predicted completely.

    An answer is a run of targets that count, in one text. Where each token is the likeliest after those before it as they should
    be, writing the likeliest token again and again after the prompt gives exactly these answers: once one token is wrong the rest
    does not matter, and up to there both see the same.
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
        """Count predicted tokens and targets, both (batch, length); a target of -100 is left out."""
        counted = targets != IGNORED
        begins = counted & ~F.pad(counted, (1, -1))
        answer = begins.flatten().cumsum(0).reshape_as(targets)  # numbers the answers from 1
        num_answers = begins.sum()
        wrong = torch.unique(answer[counted & (predicted != targets)])
        self.right = self.right + num_answers - len(wrong)
        self.num_answers = self.num_answers + num_answers

    def compute(self) -> Tensor:
        """Return the share, a scalar from 0 to 1; 0 where there are no answers."""
        return self.right / self.num_answers.clamp(min=1)
