"""FedNova (Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS 2020).

Clients that make more steps would count for more. So what each has done is divided by how much it has done, ||a_i||_1, and the
model moves by the mean of that, as far as all together have moved (eq. 10 with eq. 4; section 4)::

    d_i = (x_i - x) / ||a_i||_1,   tau_eff = sum_i p_i ||a_i||_1,   x <- x + tau_eff sum_i p_i d_i,   p_i = n_i / n

a_i weighs the gradients of a client's tau_i steps (section 3.1): of SGD ``||a_i||_1 = tau_i``; with momentum rho
``(tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho)``; with a proximal term mu ``(1 - (1 - eta mu)^tau) / (eta mu)``.

The paper leaves open, and this does:
- Every client makes the steps that `train` and its data give it, or that `submodel` asks of it.
- ||a_i||_1 is what the model's own optimizer makes of gradients that are all 1, as the client finds by making its steps on one
  number, per unit of learning rate at the first step: for SGD, momentum and the proximal term the paper's sums, and it holds for
  schedules, too. Adaptive optimizers are taken for SGD: tau_i.
- Submodels: p_i and tau_eff of an element are over the clients that have it. Running statistics are averaged.
- tau_eff moves everybody's updates by what each client says of itself, so of a merge's ||a_i||_1 none counts as more than
  `LIMIT` times their lower median.
- n is of the clients in the round. With equal steps it is FedAvg but for rounding.
- With a `buffer_size` it is asynchronous: K differences make a merge, each against the model that its client was sent, and each
  weighs p_i s(staleness), s = 1/sqrt(1 + staleness).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, ClassVar, Literal

import torch

from raafl.core.algorithm import Algorithm, Hook, Local, Merge, Select, Task
from raafl.core.sample import Sample
from raafl.core.state import GlobalState
from raafl.core.types import Update
from raafl.parts.merge.mean import Accumulator, trained_values
from raafl.parts.merge.staleness import Staleness
from raafl.parts.select.submodels import Full
from raafl.parts.trigger import AllReported, Buffered
from raafl.submodel import Spec

DONE = "done"
"""Key in `Update.extra` of ||a_i||_1."""

LIMIT = 100.0
"""Times the lower median of a merge that one client is believed to have done."""


def fed_nova(
    prox: float = 0.0, by_samples: bool = True, cohort: int | None = None, concurrency: int | None = None,
    buffer_size: int | None = None, submodel: Select | None = None,
) -> Algorithm:  # fmt: skip
    """Make FedNova.

    Args:
        prox: weight of a proximal term (mu), 0 or more.
        by_samples: p_i by |D_i|; False = every client alike.
        cohort: clients in a round, drawn uniformly; None = all.
        concurrency: how many of them work at a time; None = no cap.
        buffer_size: updates in a merge, asynchronously; None = rounds.
        submodel: what each client trains, such as `raafl.parts.RateSelect`; None = the whole model.
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
    """Plain local training that reports its amount of work tau_i."""

    def hook(self, task: Task) -> Hook:
        """Return the steps."""
        return _Steps(task, self.prox)


class _Steps(Hook):
    """Hook that runs the optimizer in parallel on a constant gradient of 1."""

    def __init__(self, task: Task, prox: float) -> None:
        super().__init__(task)
        self._prox, self._moved, self._velocity, self._first = prox, 0.0, 0.0, 0.0
        self._num = 0

    def update(self) -> None:
        """Make a step, and the same step on one number."""
        options = self.task.optimizer.param_groups[0]
        lr, rho = float(options["lr"]), float(options.get("momentum", 0.0))
        gradient = 1.0 - self._prox * self._moved
        self._velocity = rho * self._velocity + gradient
        self._first = self._first or lr
        self._num += 1
        step = gradient + rho * self._velocity if options.get("nesterov") else self._velocity
        self._moved += lr * step
        super().update()

    def finish(self) -> dict[str, Any]:
        """Return tau_i, the way of a gradient of 1; at a learning rate of 0, where nothing moves, the number of steps."""
        return {DONE: self._moved / self._first if self._first else float(self._num)}


@dataclass(frozen=True)
class Normalised(Merge):
    """``theta <- theta + tau_eff sum_i p_i d_i`` over the clients that have an element.

    Attributes:
        by_samples: weigh by |D_i|.
        staleness: s.
    """

    by_samples: bool = True
    staleness: Staleness = field(default_factory=lambda: Staleness("polynomial", a=0.5))
    sends: Literal["values", "delta"] = "delta"
    by_client: ClassVar[bool] = True

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Return a reason if the reported work is not a positive number."""
        done = update.extra.get(DONE)
        return None if isinstance(done, float) and 1e-6 < done < 1e9 else "bad-extra"

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Divide an update by its tau_i, in place, and add it to the sum."""
        memory, done = state.memory.setdefault("fed_nova", {"done": []}), float(update.extra[DONE])
        weight = (float(update.num_samples) if self.by_samples else 1.0) * self.staleness(staleness)
        for name, tensor in update.tensors.items():
            if name in state.submodels.parameter_names:
                tensor.div_(done)
        Accumulator(state, memory).add(update.tensors, spec, weight)
        memory["done"].append(done)

    def apply(self, state: GlobalState) -> None:
        """Move each element by the mean normalised update times tau_eff."""
        memory = state.memory["fed_nova"]
        sums = Accumulator(state, memory)
        most = LIMIT * median_low(memory["done"])
        on, done = sums.cover(), sums.cover([min(one, most) for one in memory["done"]], "mixed")
        for name, theta in trained_values(state).items():
            far = done[name] / on[name] if name in state.submodels.parameter_names else 1.0
            theta.copy_(torch.where(on[name] > 0, theta + sums.total[name] / on[name] * far, theta))
        sums.clear()
        memory["done"].clear()

    def __str__(self) -> str:
        return f"mean of deltas by step, {'weighted by samples' if self.by_samples else 'unweighted'}"
