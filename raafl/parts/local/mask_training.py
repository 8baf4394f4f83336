"""Train masks over frozen weights: scores, Bernoulli samples, straight-through gradients (Co-S2P, section IV-A, Eq. 2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from raafl.core.local import Hook, Task
from raafl.core.types import derive_seed
from raafl.parts.select.segments import Gates, Segments, cuts_of
from raafl.submodel import Layout, Spec, Submodels

SCORES = "scores"
"""The bundle of scores, one for each segment of each axis; NaN = never trained."""


def score_layout(submodels: Submodels, number: int, spec: Spec | None) -> Layout:
    """Return the layout of the mask scores that a client receives and sends back; empty if its task trains no masks.

    A mask keeps or drops segments of an axis (a dimension that can be cut, such as a layer's hidden neurons). The score
    of a segment is the logit of the probability that the mask keeps it.

    `spec`: submodel of the task; None = the layout of all scores.
    """
    if spec is not None and spec.trained != ():
        return Layout(())
    cuts = cuts_of(submodels, number).items()
    return submodels.cached("scores", number, lambda: Layout.pack((a, (len(c),), torch.float32) for a, c in cuts))


class _StraightThrough(torch.autograd.Function):
    """Autograd function that draws 0 or 1, and passes the gradient on to the probability unchanged (straight-through)."""

    @staticmethod
    def forward(ctx: object, probability: Tensor, sample: Tensor) -> Tensor:
        return sample.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def masks_of(scores: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a random mask of 0 and 1 with the probabilities sigmoid(scores); gradients pass through the draw.

    The gradient is d mask / d scores = p (1 - p) (Bengio et al. 2013). The draw happens on the CPU, so that a seed
    gives the same mask on every device.

    `scores`: logits of the probabilities, of any shape.
    """
    probability = torch.sigmoid(scores)
    if probability.is_meta:
        sample = torch.empty_like(probability)
    else:
        sample = torch.bernoulli(probability.detach().cpu(), generator=generator).to(scores.device)
    mask: Tensor = _StraightThrough.apply(probability, sample)
    return mask


def kept_share_loss(masks: Mapping[str, Tensor], rate: float) -> Tensor:
    """Return a loss that pulls the mean of each mask towards ``rate``: ``sum_l (mean(mask_l) - rate)^2`` (Co-S2P, Eq. 2).

    `masks`: masks of zeros and ones, shape (segments,), by the axis that they cut.
    """
    return torch.stack([(mask.mean() - rate).square() for mask in masks.values()]).sum()


def first_score(rate: float) -> float:
    """Return the score with which masks start: the logit of ``rate``, which is clamped to 0.01 ... 0.99 before."""
    rate = min(max(rate, 0.01), 0.99)
    return math.log(rate / (1 - rate))


def best(scores: list[float], number: int) -> list[int]:
    """Return the indices of the ``number`` largest scores, ascending; among equal scores the first ones win."""
    return sorted(sorted(range(len(scores)), key=lambda i: -scores[i])[:number])


class MaskTraining(Hook):
    """Hook that learns which units a client keeps: it trains the scores of random masks, with the weights frozen.

    A score is the logit of the probability that a segment of units is kept. The task's `Assignment.extra` names the
    axes whose scores train ("masks"), and the share of segments that a mask should keep ("rate").
    """

    def __init__(self, task: Task, segments: Mapping[str, Segments], lr: float, strength: float) -> None:
        """Load the scores that the client received, with a start value where there are none, and create their optimizer."""
        super().__init__(task)
        extra, received = task.assignment.extra, task.down[SCORES]
        device = next(task.module.parameters()).device
        self.rate, self.strength = float(extra["rate"]), strength
        self.scores = {
            axis: torch.nan_to_num(received[axis].to(device), nan=first_score(self.rate)).requires_grad_()
            for axis in extra["masks"]
        }
        self.gates = Gates(task.module, task.submodels, {axis: segments[axis] for axis in self.scores})
        self.optimizer = torch.optim.Adam(self.scores.values(), lr=lr)
        self.generator = torch.Generator().manual_seed(derive_seed(task.assignment.seed, "masks"))

    def loss(self, batch: object, index: int) -> Tensor:
        """Draw masks for this batch and return the loss of the masked model, plus `kept_share_loss` times its weight."""
        masks = {axis: masks_of(scores, self.generator) for axis, scores in self.scores.items()}
        with self.gates.set(masks):
            loss = self.task.loss(batch, index)
        return loss + self.strength * kept_share_loss(masks, self.rate)

    def update(self) -> None:
        """Make one optimizer step on the scores."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def finish(self) -> dict[str, Any]:
        """Copy the trained scores to the tensors that the client sends."""
        for axis, scores in self.scores.items():
            self.task.up[SCORES][axis].copy_(scores.detach())
        return {}
