"""FedNova (Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS 2020).

In FedAvg a client that makes more local steps moves the model further. FedNova divides each client's change by its amount of
local work ||a_i||_1, averages, and multiplies by the mean amount of work tau_eff (eq. 10 with eq. 4; section 4)::

    d_i = (x_i - x) / ||a_i||_1,   tau_eff = sum_i p_i ||a_i||_1,   x <- x + tau_eff sum_i p_i d_i,   p_i = n_i / n

a_i holds the weights of the gradients of a client's tau_i steps (section 3.1). For SGD ``||a_i||_1 = tau_i``; with momentum rho
``(tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho)``; with a proximal term mu ``(1 - (1 - eta mu)^tau) / (eta mu)``.

Choices that the paper leaves open:
- Every client makes the steps that `train` and its data, or `submodel`, give it.
- The client measures ||a_i||_1: it runs its optimizer on one scalar whose gradient is always 1, and divides the distance by the
  base learning rate, which is the same for all clients: before the module's scheduler and `train.lr_schedule`. For SGD, momentum
  and the proximal term this gives the paper's sums, and it covers dampening and learning rate schedules too. Adaptive optimizers
  are treated as SGD: tau_i.
- Submodels: p_i and tau_eff of an element are over the clients that have it. Running statistics are averaged.
- A client reports its own ||a_i||_1, and tau_eff multiplies everybody's updates; so a value counts as at most `LIMIT` times the
  lower median of its merge.
- n sums over the clients of the round that made a step; one whose batches were all skipped has no weight. With equal numbers
  of steps it equals FedAvg up to rounding.
- With a `buffer_size` it is asynchronous: K differences make a merge, each against the model that its client received, with
  weights p_i s(staleness), s = 1/sqrt(1 + staleness).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any, ClassVar, Literal

import torch

from raafl.algorithm import (
    Algorithm,
    AllReported,
    Buffered,
    Full,
    GlobalState,
    Hook,
    Local,
    Merge,
    Sample,
    Select,
    Spec,
    Staleness,
    Task,
    Traits,
    Update,
)
from raafl.parts.merge.mean import Accumulator, SumMemory, trained_pieces
from raafl.submodel.flat import chunks

DONE = "done"
"""Key of ||a_i||_1, the amount of local work, in `Update.extra`."""


@dataclass
class _NovaMemory(SumMemory):
    """Merge state: the weighted sum of the updates, and for each update its amount of local work, the L1 norm of a_i."""

    key = "fed_nova"
    done: list[float] = field(default_factory=list)


LIMIT = 100.0
"""Largest amount of work that one client may claim, as a multiple of the lower median of its merge."""


def fed_nova(
    prox: float = 0.0,
    by_samples: bool = True,
    cohort: int | None = None,
    concurrency: int | None = None,
    buffer_size: int | None = None,
    submodel: Select | None = None,
) -> Algorithm:
    """Return FedNova, which divides each client's change by its amount of local work, so that no client dominates.

    Args:
        prox: weight of a proximal term (mu), at least 0.
        by_samples: whether to weight clients by their numbers of samples |D_i| (p_i); False = equally.
        cohort: number of clients in a round, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        buffer_size: number of updates in a merge of an asynchronous run; None = synchronous rounds.
        submodel: rule that chooses each client's submodel, such as `raafl.parts.RateSelect`; None = the whole model for
            every client.
    """
    return Algorithm(
        name="fed_nova",
        paper="Wang et al. 2020",
        sample=Sample(cohort, concurrency),
        select=submodel or Full(),
        local=Counted(prox=prox),
        trigger=AllReported() if buffer_size is None else Buffered(buffer_size),
        merge=Normalised(by_samples),
    )


@dataclass(frozen=True)
class Counted(Local):
    """Ordinary local training that also reports its amount of work: for plain SGD, the number of local steps."""

    @property
    def traits(self) -> Traits:
        """What this training can do, needs, and leaves out."""
        return replace(super().traits, captures=())

    def hook(self, task: Task) -> Hook:
        """Return the hook that measures the amount of local work: the number of plain SGD steps that it equals."""
        return _Steps(task, self.prox)


class _Steps(Hook):
    """Training hook that measures a client's local work: it steps an extra scalar with gradient 1 by the optimizer's rule."""

    def __init__(self, task: Task, prox: float) -> None:
        super().__init__(task)
        self._prox, self._moved, self._velocity, self._unit = prox, 0.0, 0.0, 0.0
        self._num = 0
        self._by_base = task.submodels.rules.works_by_base_rate

    def stepped(self) -> None:
        """Step the extra scalar once, with the learning rate, momentum and proximal term of the optimizer.

        The distance that the scalar moves is the amount of local work a_i.
        """
        # options are read at each step, since learning rate schedules change them; the first parameter group stands for
        # all
        options = self.task.optimizer.param_groups[0]
        lr, rho = float(options["lr"]), float(options.get("momentum", 0.0))
        gradient = 1.0 - self._prox * self._moved
        damped = gradient * (1.0 - float(options.get("dampening", 0.0))) if self._num else gradient
        self._velocity = rho * self._velocity + damped if rho else gradient
        # a scheduler stores the rate from which it begins; of a warm-up the first step's own rate depends on the task's length
        base = float(options.get("initial_lr") or lr) / (self.task.assignment.lr_scale or 1.0)
        self._unit = self._unit or (base if self._by_base else lr)
        self._num += 1
        step = gradient + rho * self._velocity if options.get("nesterov") else self._velocity
        self._moved += lr * step

    def finish(self) -> dict[str, Any]:
        """Return the local work in units of one plain SGD step; if the learning rate is 0, the number of steps."""
        return {DONE: self._moved / self._unit if self._moved else float(self._num)}


@dataclass(frozen=True)
class Normalised(Merge):
    """FedNova's merge: ``theta <- theta + tau_eff sum_i p_i d_i``, for each element over the clients i that trained it.

    d_i is a client's change divided by its amount of local work, p_i its weight, tau_eff the mean amount of work.

    Attributes:
        by_samples: whether to weight clients by their numbers of samples |D_i|; False = equally.
        staleness: function s by which late updates count less; an update has the weight p_i s.
    """

    by_samples: bool = True
    staleness: Staleness = field(default_factory=lambda: Staleness("polynomial", a=0.5))
    sends: Literal["values", "delta"] = "delta"
    by_client: ClassVar[bool] = True

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Refuse an update with the reason "bad-extra" unless its amount of work is plausible: positive, or 0 without steps."""
        done = update.extra.get(DONE)
        is_idle = done == 0 and update.num_steps == 0
        return None if isinstance(done, float) and (is_idle or 1e-6 < done < 1e9) else "bad-extra"

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Divide the update by its amount of local work, in place, and add it to the sum; without work it has no weight."""
        memory, done = state.memory.of(_NovaMemory), float(update.extra[DONE])
        weight = (float(update.num_samples) if self.by_samples else 1.0) * self.staleness(staleness) if done else 0.0
        for name, tensor in update.tensors.items():
            if name in state.submodels.parameter_names:
                tensor.div_(done or 1.0)
        Accumulator(state, memory).add(update.tensors, spec, weight)
        memory.done.append(done)

    def apply(self, state: GlobalState) -> None:
        """Move the model by the mean of the updates per unit of work, times the mean amount of work of the clients."""
        memory = state.memory.of(_NovaMemory)
        sums = Accumulator(state, memory)
        # clients report their own amounts of work: without this limit one client could make the step tau_eff
        # arbitrarily large
        most = LIMIT * median_low([done for done in memory.done if done] or [0.0])
        covered, work = sums.cover(), sums.cover([min(done, most) for done in memory.done], "mixed")
        for is_parameter, flats in trained_pieces(state, sums.total, covered, work):
            for theta, total, weight, steps in chunks(*flats):
                # running statistics are averaged without tau_eff, since they do not grow with the number of steps
                tau_eff = steps / weight if is_parameter else 1.0
                theta.copy_(torch.where(weight > 0, theta + total / weight * tau_eff, theta))
        sums.clear()
        memory.done.clear()

    def __str__(self) -> str:
        return f"mean of deltas by step, {'weighted by samples' if self.by_samples else 'unweighted'}"
