"""Step the global model with an adaptive optimizer on the server: FedAdam, FedYogi and FedAdagrad (FedOpt)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from raafl.core.algorithm import Merge
from raafl.core.state import GlobalState
from raafl.core.types import Update
from raafl.errors import BadInput, one_of, positive
from raafl.parts.merge.mean import Accumulator, Staleness, SumMemory, trained_pieces, zeros_like
from raafl.submodel import FULL, FlatTensors, Spec
from raafl.submodel.flat import chunks

ServerKind = Literal["adam", "yogi", "adagrad"]

Step = Callable[[Tensor, Tensor, Sequence[Tensor], Tensor | None], None]
"""Steps a piece of theta along its mean delta with its moments, in place, where a mask holds; None = everywhere."""


@dataclass
class OptimizerMemory(SumMemory):
    """State of the server's optimizer: running sum of a merge's changes, and moments m and v (None before the first merge)."""

    key = "fed_opt"
    m: FlatTensors | None = None
    v: FlatTensors | None = None

    def moments(self, state: GlobalState, tau: float) -> tuple[FlatTensors, ...]:
        """Return the moments m and v; at the first call create them, m as 0 and v as ``tau`` squared."""
        if self.m is None or self.v is None:
            self.m, self.v = zeros_like(state.values), zeros_like(state.values)
            for buffer in self.v.prefix(state.submodels.layout(part="trained")).buffers.values():
                buffer.fill_(tau**2)
        return self.m, self.v


@dataclass(frozen=True)
class ServerOptimizer(Merge):
    """FedOpt's merge: an adaptive optimizer of the server uses the clients' mean change as its gradient.

    Reddi et al. 2021, Algorithm 2: ``m <- beta1 m + (1 - beta1) Delta``; ``theta <- theta + eta m / (sqrt(v) + tau)``.
    v becomes, by kind: adagrad ``v + Delta^2``; yogi ``v - (1 - beta2) Delta^2 sign(v - Delta^2)``; adam ``beta2 v + (1
    - beta2) Delta^2``. v starts at tau^2, m at 0; there is no bias correction, as in the paper. Delta is the mean
    change ``sum_n w_n s(staleness_n) Delta_n / sum_n w_n`` over the updates n that trained the element, each relative
    to the version from which its client started. Elements that no update trained, or only updates of weight 0, keep
    theta, m and v. Running statistics get the plain mean.

    Attributes:
        kind: name of the optimizer: adam, yogi or adagrad.
        server_lr: server learning rate eta.
        beta1: decay of the first moment m.
        beta2: decay of the second moment v (adam, yogi).
        tau: constant added to sqrt(v), the degree of adaptivity.
        staleness: function s by which late updates count less.
        by_samples: whether clients are weighted by |D_n|; False = equally.
    """

    kind: ServerKind = "adam"
    server_lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    staleness: Staleness = field(default_factory=Staleness)
    by_samples: bool = True
    sends: Literal["values", "delta"] = "delta"
    memory: ClassVar[type[OptimizerMemory]] = OptimizerMemory

    def __post_init__(self) -> None:
        one_of("server optimizer", self.kind, ServerKind)
        positive("server_lr", self.server_lr)
        positive("tau", self.tau)
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= beta < 1:
                raise BadInput(f"{name} is {beta}: give a number from 0 to below 1")

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Add the update's change, times its weight and staleness factor, to the sum."""
        memory = state.memory.of(self.memory)
        weight = float(update.num_samples) if self.by_samples else 1.0
        Accumulator(state, memory).add(update.tensors, spec, weight, self.staleness(staleness))

    def apply(self, state: GlobalState) -> None:
        """Make one step of the server's optimizer along the mean change."""
        memory = state.memory.of(self.memory)
        sums = Accumulator(state, memory)
        if not sums.weight:
            sums.clear()
            return
        moments, step = memory.moments(state, self.tau), self._step_of(state)
        count = None if sums.common == FULL else sums.cover()
        others = [sums.total, *moments, *([] if count is None else [count])]
        for is_parameter, flats in trained_pieces(state, *others):
            for old, total, *own in chunks(*flats):
                weight = None if count is None else own.pop()
                tiny = torch.finfo(old.dtype).tiny
                delta = total / sums.weight if weight is None else total / weight.clamp_min(tiny)
                if is_parameter:
                    step(old, delta, own, None if weight is None else weight > 0)
                else:
                    old.add_(delta)
        sums.clear()

    def _step_of(self, state: GlobalState) -> Step:
        """Return the function that makes the optimizer's step in this merge; it is called once in each."""
        return self._step

    def _step(self, theta: Tensor, delta: Tensor, moments: Sequence[Tensor], where: Tensor | None) -> None:
        m, v = moments
        if where is not None:  # elements that no update trained keep their values: the step is made on copies
            news = [tensor.clone() for tensor in (theta, m, v)]
            self._step(news[0], delta, news[1:], None)
            for old, new in zip((theta, m, v), news, strict=True):
                torch.where(where, new, old, out=old)
            return
        m.mul_(self.beta1).add_(delta, alpha=1 - self.beta1)
        square = delta.mul_(delta)
        if self.kind == "adagrad":
            v.add_(square)
        # yogi changes v by at most (1 - beta2) Delta^2, whereas adam may lower it by (1 - beta2) v
        elif self.kind == "yogi":
            sign = torch.sub(v, square).sign_()
            v.sub_(square.mul_(1 - self.beta2).mul_(sign))
        else:
            v.mul_(self.beta2).add_(square, alpha=1 - self.beta2)
        theta.addcdiv_(m, torch.sqrt(v, out=delta).add_(self.tau), value=self.server_lr)

    def __str__(self) -> str:
        words = [f"server {self.kind}"]
        words += [] if self.by_samples else ["unweighted"]
        words += [f"deltas x {self.staleness}"] if str(self.staleness) else []
        return ", ".join([*words, f"lr {self.server_lr:g}"])


def copy_where(pairs: Sequence[tuple[Tensor, Tensor]], where: Tensor | None) -> None:
    """Copy the second tensor of each pair into the first, at the elements that a mask selects.

    `where`: mask of the elements to copy; None = all of them.
    """
    for old, new in pairs:
        old.copy_(new if where is None else torch.where(where, new, old))
