"""ScaleFL (Ilhan et al., "ScaleFL: Resource-Adaptive Federated Learning with Heterogeneous Clients", CVPR 2023).

A client trains the lowest blocks of the model up to an exit (depth) and the leading units of each layer (width). All of its E
exits train; those inside learn from the deepest, too::

    L = 2 / (E (E + 1)) sum_{j=1}^{E} j l_j,   l_E = CE(z_E, y),
    l_j = CE(z_j, y) + gamma T^2 KL(softmax(z_E / T) || softmax(z_j / T)),   j < E

and each element becomes the mean over the clients that have it, all with the same weight.

The equations are those of the authors' code (git-disl/scale-fl); the paper's text could not be read here.

Choices that are left open, and differences:
- KL is the sum over classes, averaged over samples. The authors' code averages over the classes as well (PyTorch's default of
  `KLDivLoss`), so that their gamma is C times ours.
- The authors' code lets exits learn from the deepest after a quarter of the rounds: `kd_from`, in versions.
- Exits are copies of the model's own last layers after each block but the last, if its type is known
  (`raafl.submodel.add_exits`), not at quarters of the depth alone.
- Teaching gives the deepest exit no gradient; the authors' code lets it through.
- Running statistics are averaged over the clients that have them; the authors' code averages them over all.
- Widths of the authors' ResNet are 0.65 to 0.7, 0.7, 0.75 to 0.85 and 1 at depths 1/4, 1/2, 3/4 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from raafl.algorithm import Algorithm, Hook, Rates, Sample, Select, Task, at_least, positive
from raafl.errors import refuse_unused
from raafl.parts.local.distilled import ByExits, Exit, TrainsExits, counted, knowledge_loss
from raafl.parts.select.windows import LeadingBlocks
from raafl.parts.trigger import averaging

DEPTHS = [0.25, 0.5, 0.75, 1.0]
WIDTHS = [0.65, 0.7, 0.8, 1.0]
"""Shares of the blocks, and of each axis, of the authors' four levels, about."""


@dataclass(frozen=True)
class WeighedExits(TrainsExits):
    """Local training of all exits (output heads at several depths), in which the deepest exit teaches the others.

    Attributes:
        gamma: weight of the distillation loss.
        temperature: temperature T of the distillation.
        kd_from: version of the global model from which on the exits learn from the deepest one.
    """

    gamma: float = 1.0
    temperature: float = 3.0
    kd_from: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("gamma", self.gamma, 0)
        positive("temperature", self.temperature)
        at_least("kd_from", self.kd_from, 0)

    def hook(self, task: Task) -> Hook:
        """Return the hook that combines the losses of all exits."""
        active = task.assignment.version >= self.kd_from
        return WeighedByDepth(task, self.gamma if active else 0.0, self.temperature)

    def __str__(self) -> str:
        words = f"SGD on the loss, exits weighed by depth, distilled with {self.gamma:g}"
        return f"{words}{', activations rescaled' if self.rescale else ''}"


class WeighedByDepth(ByExits):
    """Hook that trains all exits: the j-th exit's loss has weight j, and the deepest exit teaches the others."""

    def __init__(self, task: Task, gamma: float, temperature: float) -> None:
        super().__init__(task)
        self.gamma, self.temperature = gamma, temperature

    def joined(self, deepest: Exit, others: Sequence[Exit], batch: object) -> Tensor:
        """Return the weighted mean of all exits' losses, each with its divergence from the deepest exit.

        Args:
            deepest: the deepest exit of the submodel, which is the teacher.
            others: all other exits.
            batch: batch of data with its labels.
        """
        num = len(others) + 1
        loss = num * deepest.loss
        for j, one in enumerate(others, start=1):
            own = one.loss
            if self.gamma:
                taught = knowledge_loss(one.logits, deepest.logits, self.temperature, counted(batch, one.logits))
                own = own + self.gamma * taught
            loss = loss + j * own
        return loss / (num * (num + 1) / 2)


def scale_fl(
    depths: Rates | None = None,
    widths: Rates | None = None,
    gamma: float = 1.0,
    temperature: float = 3.0,
    kd_from: int = 0,
    rescale: bool = True,
    alpha: float | None = None,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
) -> Algorithm:
    """Return ScaleFL: clients train the lowest blocks, narrowed, with an exit after each that learns from the deepest one.

    Args:
        depths: share of the model's blocks that a client trains: one number for all; a list, one number for each of
            clients 1, 2, ..., repeating; or a mapping from device name to number. None = the list 1/4, 1/2, 3/4, 1.
        widths: share of each layer's units that a client trains, in the same form as depths. None = the list 0.65, 0.7, 0.8, 1.
        gamma: weight of the distillation loss (gamma).
        temperature: temperature of the distillation (T).
        kd_from: version from which on the exits learn from the deepest one; the authors take a quarter of the rounds.
        rescale: multiply the activations of a narrowed layer by 1 / (kept share of its units) while training, as the authors' code.
        alpha: weight of each arriving update in an asynchronous run; None = synchronous rounds.
        cohort: number of clients in a round, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        submodel: rule that chooses submodels in place of the narrowed lowest blocks; leave out depths and widths then.
    """
    if submodel is not None:
        refuse_unused("submodel says what each client trains", depths=(depths, None), widths=(widths, None))
    trigger, mean = averaging(alpha, by_samples=False)
    asked = LeadingBlocks(list(DEPTHS) if depths is None else depths, list(WIDTHS) if widths is None else widths)
    return Algorithm(
        name="scale_fl",
        paper="Ilhan et al. 2023",
        sample=Sample(cohort, concurrency),
        select=submodel or asked,
        local=WeighedExits(gamma, temperature, kd_from, rescale=rescale),
        trigger=trigger,
        merge=mean,
    )
