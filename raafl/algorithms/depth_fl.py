"""DepthFL (Kim et al., "DepthFL: Depthwise Federated Learning for Heterogeneous Clients", ICLR 2023).

A client trains the lowest blocks of the model, as many as it can, with a classifier (exit) after each. All E exits of a client
learn from the labels and from each other, in rounds t::

    L = sum_i [ CE(z_i, y) + w_t / (E - 1) sum_{j != i} KL(softmax(z_j) || softmax(z_i)) ],   w_t = exp(-5 (1 - min(t, T) / T)^2)

with T = 300; z_j gets no gradient from teaching. The objective has FedDyn's regulariser with alpha (`raafl.algorithms.fed_dyn`),
and each parameter becomes the mean over the clients that have it.

The equations are those of Flower's baseline `depthfl`, which reproduces the paper; the paper's text could not be read here.

Choices that are left open, and differences:
- Exits are copies of the model's own last layers after each block but the last, if its type is known (`raafl.submodel.add_exits`);
  the paper's have layers of their own. A model may declare its own.
- The global model is evaluated with its own last layers; the paper's result is the ensemble of all exits.
- t is the version that the client was sent. In an asynchronous run, which no paper has, a version is one update.
- A client weighs the same whatever its samples, as in FedDyn.
- The baseline adds 1e-7 to the teacher's probabilities; here they are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from raafl.algorithm import Algorithm, Hook, Mean, Merge, Rates, Sample, Select, Task, Traits, at_least, positive
from raafl.algorithms.fed_dyn import GRADIENT, Corrected, LinearTerm, Regularised
from raafl.errors import refuse_unused
from raafl.parts.local.distilled import ByExits, Exit, TrainsExits, counted, knowledge_loss
from raafl.parts.merge.variates import Variates
from raafl.parts.select.windows import LeadingBlocks
from raafl.parts.trigger import averaging

DEPTHS = [0.25, 0.5, 0.75, 1.0]
"""Shares of the blocks of the paper's four kinds of clients."""


@dataclass(frozen=True)
class MutualTraining(TrainsExits):
    """Local training in which all exits (output heads at several depths) learn from the labels and from each other.

    Attributes:
        ramp: number of rounds T until exits teach each other with full weight.
    """

    ramp: int = 300

    def hook(self, task: Task) -> Hook:
        """Return the hook that adds up the losses of all exits."""
        return Mutual(task, teaching_weight(task.assignment.version, self.ramp))

    def __str__(self) -> str:
        return f"SGD on the loss, exits teach each other, in full from version {self.ramp}"


@dataclass(frozen=True)
class RegularisedMutual(Regularised, MutualTraining):
    """Local training in which all exits learn from each other, with FedDyn's regulariser."""

    @property
    def traits(self) -> Traits:
        """What this training can do, needs, and leaves out."""
        # no CUDA graphs: each exit must draw the same random numbers again, which a captured graph cannot do
        return replace(super().traits, captures=None)

    def hook(self, task: Task) -> Hook:
        """Return the hook that adds up the losses of all exits and corrects gradients by FedDyn's regulariser."""
        return DynamicMutual(task, teaching_weight(task.assignment.version, self.ramp))

    def __str__(self) -> str:
        return f"{MutualTraining.__str__(self)}, dynamically regularised with {self.prox:g}"


class Mutual(ByExits):
    """Hook that adds to each exit's loss its mean divergence from the other exits, with a weight that grows over rounds."""

    def __init__(self, task: Task, weight: float) -> None:
        super().__init__(task)
        self.weight = weight

    def joined(self, deepest: Exit, others: Sequence[Exit], batch: object) -> Tensor:
        """Return the sum of all exits' losses, each with its divergence from the other exits.

        Args:
            deepest: the deepest exit of the submodel.
            others: all other exits.
            batch: batch of data with its labels.
        """
        exits = [*others, deepest]
        loss = exits[0].loss
        for one in exits[1:]:
            loss = loss + one.loss
        for one in exits:
            for other in exits:
                if other is not one:
                    taught = knowledge_loss(one.logits, other.logits, 1.0, counted(batch, one.logits))
                    loss = loss + self.weight / (len(exits) - 1) * taught
        return loss


class DynamicMutual(LinearTerm, Mutual):
    """Hook that lets exits (output heads) learn from each other, with the gradient correction of FedDyn's regulariser."""


def teaching_weight(version: int, ramp: int) -> float:
    """Return the weight w_t = exp(-5 (1 - min(t, T) / T)^2) of the loss by which exits learn from each other.

    Args:
        version: number t of the global model's version.
        ramp: number of rounds T until the weight is 1.
    """
    return math.exp(-5.0 * (1.0 - min(version, ramp) / ramp) ** 2)


def depth_fl(
    depths: Rates | None = None,
    ramp: int = 300,
    dyn_alpha: float = 0.1,
    alpha: float | None = None,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
) -> Algorithm:
    """Return DepthFL, whose clients train the lowest blocks, with an exit after each; the exits learn from each other.

    Args:
        depths: share of the model's blocks that a client trains: one number for all; a list, one number for each of
            clients 1, 2, ..., repeating; or a mapping from device name to number. None = the list 1/4, 1/2, 3/4, 1.
        ramp: number of rounds until the exits learn from each other with full weight (T).
        dyn_alpha: weight of FedDyn's regulariser (alpha); 0 = no regulariser, and models are averaged as in FedAvg, with
            equal weights.
        alpha: weight of each arriving update in an asynchronous run, for which dyn_alpha must be 0; None = synchronous
            rounds.
        cohort: number of clients in a round, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        submodel: rule that chooses submodels in place of the lowest blocks; leave out depths then.
    """
    positive("ramp", ramp)
    at_least("dyn_alpha", dyn_alpha, 0)
    if submodel is not None:
        refuse_unused("submodel says what each client trains", depths=(depths, None))
    if alpha is not None:
        refuse_unused("FedDyn's regulariser needs rounds: set it to 0 with alpha", dyn_alpha=(dyn_alpha, 0.0))
    trigger, mean = averaging(alpha, by_samples=False)
    local = MutualTraining(ramp) if not dyn_alpha else RegularisedMutual(ramp, prox=dyn_alpha)
    merge: Merge = mean if not dyn_alpha else Corrected(Mean(by_samples=False), Variates(GRADIENT), dyn_alpha)
    return Algorithm(
        name="depth_fl",
        paper="Kim et al. 2023",
        sample=Sample(cohort, concurrency),
        select=submodel or LeadingBlocks(list(DEPTHS) if depths is None else depths),
        local=local,
        trigger=trigger,
        merge=merge,
    )
