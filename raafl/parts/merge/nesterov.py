"""Step the global model with Nesterov momentum on the server: DiLoCo's outer step, and its delayed form for single arrivals.

Shapes: everything is elementwise on the tensors of the whole model; a sum or count has the layout of the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from raafl.core.algorithm import Merge
from raafl.core.state import GlobalState
from raafl.core.types import Update
from raafl.errors import BadInput, one_of, positive
from raafl.parts.merge.mean import (
    Accumulator,
    Staleness,
    SumMemory,
    shares_of,
    trained_pieces,
    trained_values,
    zeros_like,
)
from raafl.submodel import FlatTensors, Spec
from raafl.submodel.flat import chunks

Weights = Literal["equal", "samples", "tokens"]


@dataclass
class NesterovMemory(SumMemory):
    """State of the server's optimizer with Nesterov momentum, and the running sum of a merge's changes."""

    key = "nesterov"
    m: FlatTensors | None = None  # momentum, of the model's size; None before the first step with momentum
    # sum of the changes since the last step with momentum, for `DelayedNesterov`; None before its first use
    pending: FlatTensors | None = None
    # submodels of the latest updates, newest last, as many as `DelayedNesterov` merges between two such steps
    recent: list[Spec] = field(default_factory=list)
    num_pending: int = 0  # number of updates since the last step with momentum

    def momentum(self, state: GlobalState) -> FlatTensors:
        """Return the momentum m; create it as 0 at the first call."""
        self.m = zeros_like(state.values) if self.m is None else self.m
        return self.m


@dataclass(frozen=True)
class Nesterov(Merge):
    """DiLoCo's server step (Douillard et al. 2023, Algorithm 1): Nesterov momentum along the mean change of the clients.

    ``m <- beta m + Delta``; ``theta <- theta + eta (Delta + beta m)``, as in `torch.optim.SGD` with ``nesterov=True``
    and the gradient ``-Delta``. Delta is the mean change ``sum_n w_n s(staleness_n) Delta_n / sum_n w_n`` over the
    updates n that trained the element; each Delta_n is relative to the values that its client received. Elements that
    no update trained keep theta and m. Running statistics get the plain mean.

    Attributes:
        lr: outer learning rate (eta).
        beta: outer momentum (beta); 0 = none, which needs no storage.
        weights: weight w_n of an update: equal = 1; samples = |D_n|; tokens = number of steps. If all
            batches have the same size, this is proportional to Decoupled DiLoCo's (trained tokens)^2 / steps.
        staleness: function s by which late updates count less.
    """

    lr: float = 0.7
    beta: float = 0.9
    weights: Weights = "equal"
    staleness: Staleness = field(default_factory=Staleness)
    sends: Literal["values", "delta"] = "delta"
    merges_means: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive("outer_lr", self.lr)
        if not 0 <= self.beta < 1:
            raise BadInput(f"outer_momentum is {self.beta}: give a number from 0 to below 1")
        one_of("weights", self.weights, Weights)

    def weigh(self, update: Update) -> float:
        """Return an update's weight in the mean change, by `weights`: 1, its number of samples, or its number of steps."""
        return float(
            {"equal": update.num_updates, "samples": update.num_samples, "tokens": update.num_steps}[self.weights]
        )

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Return "no-steps" if updates are weighted by their steps and this one made none."""
        return "no-steps" if self.weights == "tokens" and update.num_steps < 1 else None

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Add the update's change, times its weight and staleness factor, to the sum."""
        sums = Accumulator(state, state.memory.of(NesterovMemory))
        sums.add_shares(update.tensors, spec, shares_of(update, spec, self.weigh), self.staleness(staleness))

    def apply(self, state: GlobalState) -> None:
        """Make one server step along the mean change."""
        memory = state.memory.of(NesterovMemory)
        sums = Accumulator(state, memory)
        count = None if _is_whole(sums) else sums.cover()
        others = [sums.total, *([] if count is None else [count]), *([memory.momentum(state)] if self.beta else [])]
        for is_parameter, flats in trained_pieces(state, *others):
            for old, total, *more in chunks(*flats):
                weight = sums.weight if count is None else more.pop(0)
                # 0 / tiny = 0 where no update covers an element
                delta = total / (weight if isinstance(weight, float) else weight.clamp_min(_tiny(old)))
                where = weight > 0 if isinstance(weight, Tensor) else None
                m, lr = (next(iter(more), None), self.lr) if is_parameter else (None, 1.0)
                self._step(old, delta, m, where, lr)
        sums.clear()

    def _step(self, theta: Tensor, delta: Tensor, m: Tensor | None, where: Tensor | None, lr: float) -> None:
        if m is not None:
            new = torch.add(delta, m, alpha=self.beta)
            m.copy_(new if where is None else torch.where(where, new, m))
            # where no update covers an element, m has its old momentum, which must not move theta
            moved = m if where is None else torch.where(where, m, 0.0)
            delta = torch.add(delta, moved, alpha=self.beta)
        theta.add_(delta, alpha=lr)

    def __str__(self) -> str:
        words = "mean of deltas" + ("" if self.weights == "equal" else f" weighted by {self.weights}")
        words += f" x {self.staleness}" if str(self.staleness) else ""
        return f"{words}, Nesterov lr {self.lr:g}, momentum {self.beta:g}"


@dataclass(frozen=True)
class DelayedNesterov(Nesterov):
    """Server step with delayed Nesterov momentum, for asynchronous runs (Liu et al. 2024, Algorithm 3 with c = 0).

    Each client's change Delta moves the model at once: ``theta <- theta + eta Delta / N``. Only after N changes is
    their mean added to the momentum m, which then also moves the model: ``m <- beta m + sum Delta / N``; ``theta <-
    theta + eta beta m``. So changes do not enter the momentum N times as often as in rounds. N changes from the same
    start give the same result as one step of `Nesterov`. N = 1 is momentum at each arrival, the naive asynchronous form.

    With submodels, N is counted for each element: how many of the last N updates trained it. So an element that few
    clients have moves as far as one that all have. Until N updates have arrived, the missing ones count as if they
    trained everything.

    Attributes:
        every: number of updates from one step with momentum to the next (N); None = the number of clients in the run.
    """

    every: int | None = None
    merges_means: ClassVar[bool] = False  # false, since N counts single updates
    counts_updates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("delay", self.every, optional=True)

    def period(self, state: GlobalState) -> int:
        """Return the number of updates from one step with momentum to the next (N)."""
        return self.every or state.num_clients

    def apply(self, state: GlobalState) -> None:
        """Move the model by the received changes; once every N updates (`period`) also by the momentum."""
        memory = state.memory.of(NesterovMemory)
        sums, every = Accumulator(state, memory), self.period(state)
        memory.recent = [*memory.recent, *(spec for spec, _ in sums.updates)][-every:]
        memory.num_pending += len(sums.updates)
        is_due = memory.num_pending >= every
        count = self._count(state, memory, every)
        others = [sums.total, *([] if count is None else [count])]
        if self.beta:
            memory.pending = zeros_like(state.values) if memory.pending is None else memory.pending
            others += [memory.pending, memory.momentum(state)]
        for is_parameter, flats in trained_pieces(state, *others):
            for old, total, *more in chunks(*flats):
                num = every if count is None else more.pop(0)
                delta = total / (num if isinstance(num, int) else num.clamp_min(1.0))
                old.add_(delta, alpha=self.lr if is_parameter else 1.0)
                where = num > 0 if isinstance(num, Tensor) else None
                self._delay(old, delta, more if is_parameter else [], is_due, where)
        memory.num_pending = 0 if is_due else memory.num_pending
        sums.clear()

    def _delay(self, theta: Tensor, delta: Tensor, state: Sequence[Tensor], is_due: bool, where: Tensor | None) -> None:
        """Add a delta to the pending sum and, if momentum is due, update m by this sum and theta by m, where ``where`` holds."""
        if not state:
            return
        pending, m = state
        pending.add_(delta)
        if not is_due:
            return
        new = torch.add(pending, m, alpha=self.beta)
        m.copy_(new if where is None else torch.where(where, new, m))
        theta.add_(m if where is None else torch.where(where, m, 0.0), alpha=self.lr * self.beta)
        pending.zero_()

    def _count(self, state: GlobalState, memory: NesterovMemory, every: int) -> FlatTensors | None:
        """Count for each element how many of the last N updates cover it; None = all N cover every element."""
        if all(spec.is_full for spec in memory.recent):
            return None
        count: FlatTensors = state.scratch.setdefault("recent", zeros_like(state.values))
        for buffer in trained_values(state).buffers:
            count.buffers[buffer].fill_(every - len(memory.recent))
        for spec in set(memory.recent):
            state.submodels.plan(spec).cover_(count, float(memory.recent.count(spec)))
        return count

    def __str__(self) -> str:
        every = "as many as clients" if self.every is None else str(self.every)
        stale = f" x {self.staleness}" if str(self.staleness) else ""
        return f"deltas{stale}, Nesterov lr {self.lr:g}, momentum {self.beta:g} delayed to every {every}"


def _is_whole(sums: Accumulator) -> bool:
    return sums.common is not None and sums.common.is_full


def _tiny(theta: Tensor) -> float:
    return torch.finfo(theta.dtype).tiny
