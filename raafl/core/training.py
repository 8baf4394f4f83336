"""Define the run's setting of local work; importing it does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from raafl.data.epochs import batches_of_epoch, samples_of
from raafl.errors import BadInput

LrShape = Literal["constant", "linear", "cosine", "step"]
_WARMUP_FROM = 0.1
"""Factor at the beginning of a warm-up: with 0 the first tasks would train nothing."""

_LARGEST = 1_000
"""Largest factor on a learning rate; beyond it a mistake is likelier than an intention."""


class Amount(Protocol):
    """Interface of objects that state the length of a task; `raafl.core.types.Work` implements it."""

    @property
    def num_epochs(self) -> int | None:
        """Number of local epochs; None = the run's own setting."""

    @property
    def num_steps(self) -> int | None:
        """Number of local steps; None = the run's own setting."""


@dataclass(frozen=True, slots=True)
class Training:
    """Settings of local training for every client; an assignment may override its length.

    Attributes:
        num_epochs: number of passes E over the client's data in a task.
        num_steps: number of batches T in a task, instead of epochs; takes precedence if both are given. Each is an optimiser
            step, unless ``fabric.accumulate_grad_batches`` adds up the gradients of several.
        batch_size: local batch size; None = that of the datamodule.
        lr_schedule: shape in which the learning rate changes over the run. A task multiplies its optimizer's own rate
            by the factor at the time of assignment; a scheduler of the module itself restarts in each task. "step"
            multiplies the factor by ``lr_final`` after each span, as `torch.optim.lr_scheduler.StepLR` does.
        lr_versions: number of versions over which the factor falls from 1 to ``lr_final``; None = use ``lr_time_s``.
        lr_time_s: seconds of the run's clock over which the factor falls from 1 to ``lr_final``; None = use
            ``lr_versions``.
        lr_warmup: fraction of that span at its start in which the factor rises linearly from 0.1 to 1.
        lr_final: factor at the end of that span and from then on, at most 1,000; for step, factor of each further span
            relative to the one before, at most 1.
    """

    num_epochs: int | None = 1
    num_steps: int | None = None
    batch_size: int | None = None
    lr_schedule: LrShape = "constant"
    lr_versions: int | None = None
    lr_time_s: float | None = None
    lr_warmup: float = 0.0
    lr_final: float = 0.0

    def __post_init__(self) -> None:
        """Check the schedule.

        Raises:
            BadInput: a field is out of range, or the schedule's length is missing or given twice.
        """
        if self.lr_schedule not in get_args(LrShape):
            raise BadInput(f"train.lr_schedule is '{self.lr_schedule}': give {', '.join(get_args(LrShape))}")
        if not 0 <= self.lr_warmup < 1:
            raise BadInput(f"train.lr_warmup is {self.lr_warmup}: give a number from 0 to below 1")
        # for "step" the factor is raised to a power, which must not overflow
        most = 1 if self.lr_schedule == "step" else _LARGEST
        if not 0 <= self.lr_final <= most:
            raise BadInput(f"train.lr_final is {self.lr_final}: give a number from 0 to {most}")
        given = [name for name in ("lr_versions", "lr_time_s") if getattr(self, name) is not None]
        if self.lr_schedule == "constant":
            unused = [*given, *(name for name in ("lr_warmup", "lr_final") if getattr(self, name))]
            if unused:
                raise BadInput(
                    f"train.{unused[0]} has no effect with a constant lr_schedule: set train.lr_schedule to linear, cosine "
                    f"or step, or leave train.{unused[0]} out (at {'null' if unused[0] in given else 0})"
                )
        elif len(given) != 1:
            raise BadInput(
                f"train.lr_schedule is {self.lr_schedule}, which needs a length: give either train.lr_versions or "
                f"train.lr_time_s, not {'both' if given else 'neither'}"
            )
        if self.lr_schedule == "step" and not self.lr_final:
            raise BadInput(
                "train.lr_final is 0, so that nothing is trained after the first step: give 0.1, for example"
            )
        if self.lr_time_s is not None and not 0 < self.lr_time_s < math.inf:
            raise BadInput(f"train.lr_time_s is {self.lr_time_s}: give seconds above 0")

    def lr_scale(self, version: int, now_s: float) -> float:
        """Return the factor on the learning rate of a task that is assigned now; 1 without a schedule.

        Args:
            version: version of the global model.
            now_s: time in seconds of the run's clock.
        """
        if self.lr_schedule == "constant":
            return 1.0
        done = version / self.lr_versions if self.lr_versions is not None else now_s / (self.lr_time_s or 1.0)
        if done < self.lr_warmup:
            return _WARMUP_FROM + (1 - _WARMUP_FROM) * done / self.lr_warmup
        if self.lr_schedule == "step":
            return float(self.lr_final ** math.floor(done))
        share = min((done - self.lr_warmup) / (1 - self.lr_warmup), 1.0)
        left = (1 + math.cos(math.pi * share)) / 2 if self.lr_schedule == "cosine" else 1 - share
        return self.lr_final + (1 - self.lr_final) * left

    def trained_samples(self, work: Amount, num_samples: int, batch_size: int, drop_last: bool) -> int:
        """Return the number of samples that a task trains on, as the client's batches have them.

        Args:
            work: length of the task in epochs or batches; if it has neither, ``num_epochs`` or ``num_steps`` of this
                object.
            num_samples: number of training samples of the client.
            batch_size: local batch size.
            drop_last: whether an epoch drops its last batch if it is smaller than the others and not the only one.
        """
        epochs, steps = work.num_epochs, work.num_steps
        if epochs is None and steps is None:
            epochs, steps = self.num_epochs, self.num_steps
        if steps is None:
            steps = (epochs or 1) * batches_of_epoch(num_samples, batch_size, drop_last)
        return samples_of(steps, num_samples, batch_size, drop_last)

    def nominal_samples(self, work: Amount, num_samples: int, batch_size: int) -> int:
        """Return the number of samples of a task if all of its batches were whole, which is an upper bound.

        Runs of the first rules go by it (`raafl.rules`).

        Args:
            work: length of the task in epochs or batches; if it has neither, ``num_epochs`` or ``num_steps`` of this
                object.
            num_samples: number of training samples of the client.
            batch_size: local batch size.
        """
        steps = work.num_steps if work.num_steps is not None else self.num_steps
        if steps is not None and work.num_epochs is None:
            return steps * min(batch_size, num_samples)
        epochs = work.num_epochs if work.num_epochs is not None else self.num_epochs
        return (epochs or 1) * num_samples
