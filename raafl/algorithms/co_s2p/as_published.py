"""Do what Co-S2P's published code does where it differs from the paper: windows, masks and distillation of `as_published`.

The merge is in `published_merge`. docs/methods/co-s2p.md lists all differences, with those that are not repeated here.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raafl.core.types import derive_seed
from raafl.parts.local.distilled import Distilled, Exit, counted, knowledge_loss
from raafl.parts.local.mask_training import MaskTraining, best, masks_of
from raafl.parts.select.segments import stack_of
from raafl.parts.select.windows import RollingWindows
from raafl.submodel import Submodels

FIRST_DISTILLED = 10
"""Global version from which clients distil."""
KNOWLEDGE_WEIGHT = 0.5
DRAWS = 100
"""Draws of a mask until one keeps a segment; then the segment with the largest score is kept."""


@dataclass(frozen=True)
class LeadingDraws(RollingWindows):
    """Choice of submodels as in Co-S2P's published code: a client trains the lowest blocks, narrowed by randomly drawn masks.

    A client of rate r trains the lowest ``int(r L)`` of L blocks, at least one. In them it keeps each segment (a
    group of units, such as neurons) with a learned probability, drawn anew for each task; on average it keeps the share
    r of the width. Whether a submodel fits the client's memory is checked for this average size.
    """

    def starts(self, submodels: Submodels, num_blocks: int, depth: float) -> tuple[int, ...]:
        """Return the possible indices of the first block that a client trains: only 0, since it trains the lowest blocks."""
        return (0,)

    def _shape(self, submodels: Submodels, rate: float) -> tuple[float, int, float]:
        stack = stack_of(submodels)
        return rate, 1 if stack is None else max(1, int(rate * len(stack))), rate

    def _kept(
        self, submodels: Submodels, stop: int, width: float, scores: Mapping[str, list[float]], seed: int
    ) -> dict[str, list[int]]:
        """Return the kept units of each axis below ``stop`` and outside all blocks."""
        units = super()._kept(submodels, stop, width, scores, seed)
        for name, cut in self._cuts(submodels).items():
            if name in units and name in scores and self._is_trained(cut):
                units[name] = cut.units(sample_segments(scores[name], random.Random(derive_seed(seed, name))))
        return units

    def __str__(self) -> str:
        return "lowest blocks, Bernoulli draws of trained masks, as published"


def sample_segments(scores: Sequence[float], source: random.Random) -> list[int]:
    """Draw the segments (groups of units) to keep, each with probability sigmoid(score); at least one is kept.

    Args:
        scores: mask score of each segment.
        source: random generator to draw from.
    """
    probabilities = torch.sigmoid(torch.tensor(scores, dtype=torch.float64)).tolist()
    for _ in range(DRAWS):
        chosen = [index for index, p in enumerate(probabilities) if source.random() < p]
        if chosen:
            return chosen
    return best(list(scores), 1)


class PublishedMaskTraining(MaskTraining):
    """Hook that trains mask scores with the penalty and gradient of Co-S2P's published code.

    The penalty is ``|mean of all masks - r_w|``, times its weight lambda; r_w is the share of the width that the client
    should keep. The gradient of a score is ``p^2 (1 - p)``, where p = sigmoid(score) is the probability that the mask
    is 1; a straight-through gradient would be ``p (1 - p)``.
    """

    def loss(self, batch: object, index: int) -> Tensor:
        """Return the loss of a batch with randomly masked units, plus the weighted penalty on the share of units kept."""
        masks = {}
        for axis, scores in self.scores.items():
            mask, p = masks_of(scores, self.generator), torch.sigmoid(scores.detach())
            masks[axis] = mask.detach() + p * (mask - mask.detach())
        with self.gates.set(masks):
            loss = self.task.loss(batch, index)
        return loss + self.strength * (torch.cat(list(masks.values())).mean() - self.rate).abs()


class PublishedDistillation(Distilled):
    """Hook that adds the self-distillation of Co-S2P's published code to the loss.

    The loss sums the cross entropies of all exits (output heads after several blocks). From version 10 of the global
    model on, each exit also learns from the deepest one: ``0.5 T^2 KL`` is added, with the temperature T and the
    Kullback-Leibler divergence KL of their outputs. Unlike Eq. 3 of the paper, KL is also divided by the number of classes.
    """

    def joined(self, deepest: Exit, others: Sequence[Exit], batch: object) -> Tensor:
        """Return the summed loss of all exits (output heads), with distillation from the deepest exit to the others."""
        loss = deepest.loss
        for one in others:
            loss = loss + one.loss
            if self.task.assignment.version >= FIRST_DISTILLED:
                knowledge = knowledge_loss(one.logits, deepest.logits, self.temperature, counted(batch, one.logits))
                loss = loss + KNOWLEDGE_WEIGHT * knowledge / one.logits.shape[-1]
        return loss
