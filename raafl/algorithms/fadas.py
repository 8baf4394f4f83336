"""FADAS (Wang et al., "FADAS: Towards Federated Adaptive Asynchronous Optimization", ICML 2024).

Clients work without waiting for each other, as in FedBuff. Delta_t^i is what client i trained minus *what it was sent*, so it
refers to the version from which the client started. Once M updates have arrived (Algorithm 1)::

    Delta_t = 1/M sum_i Delta_t^i
    m_t = beta_1 m_{t-1} + (1 - beta_1) Delta_t
    v_t = beta_2 v_{t-1} + (1 - beta_2) Delta_t^2,   v^_t = max(v^_{t-1}, v_t)                        (AMSGrad)
    x_{t+1} = x_t + eta_t m_t / (sqrt(v^_t) + epsilon)

With delay adaptation the step is smaller where an update of the buffer is late: tau_t is the largest staleness in the buffer, and
eta_t = eta up to tau_c. Above tau_c it is ``eta / tau_t`` (`delay` divide) or ``min(eta, 1 / tau_t)`` (cap).

The paper's text could not be read here: m, v, v^, the bias correction and "divide" are the authors' code (yujiaw98/FADAS), "cap"
and the definition of Delta_t^i are a page's account of the paper. Hence experimental.

Choices that the paper leaves open, and differences:
- The authors' simulation subtracts the *current* global model from what a late client trained: its delta then also undoes what
  others merged in the meantime. Here it is the paper's Delta_t^i.
- m, v and v^ start at 0 and are corrected for that as in the authors' code: the step is eta_t / (1 - beta_1^t), and sqrt(v^_t) is
  divided by sqrt(1 - beta_2^t), with t from 1.
- The updates in the buffer when the run ends are merged, divided by their number.
- Submodels (no paper has them): the mean is over the updates that cover an element; what none covers keeps theta, m, v and v^.
- Running statistics of norms get the plain mean, as in the authors' code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from raafl.algorithm import (
    Algorithm,
    Buffered,
    FlatTensors,
    Full,
    GlobalState,
    Local,
    Sample,
    Select,
    Spec,
    Update,
    at_least,
    one_of,
)
from raafl.parts.merge.mean import zeros_like
from raafl.parts.merge.server_optimizer import OptimizerMemory, ServerOptimizer, Step, copy_where

Delay = Literal["divide", "cap", "none"]


@dataclass
class AmsgradMemory(OptimizerMemory):
    """State of FADAS's server optimizer, AMSGrad: Adam's two moments, the largest second moment, and the updates' delays.

    Attributes:
        peak: elementwise largest value so far of Adam's second moment v; None = no merge yet.
        steps: number of merges so far.
        delays: staleness of each update that waits for the next merge.
    """

    key = "fadas"
    peak: FlatTensors | None = None
    steps: int = 0
    delays: list[int] = field(default_factory=list)

    def moments(self, state: GlobalState, tau: float) -> tuple[FlatTensors, ...]:
        """Return the first moment m, the second moment v, and v's largest value so far; all are 0 at the first call.

        Args:
            state: the global model.
            tau: ignored; the base class sets the initial v from it.
        """
        if self.m is None or self.v is None or self.peak is None:
            self.m, self.v, self.peak = (zeros_like(state.values) for _ in range(3))
        return self.m, self.v, self.peak


@dataclass(frozen=True)
class DelayAdaptive(ServerOptimizer):
    """FADAS's merge: an AMSGrad step along the mean change of several updates, made smaller if one of them is late.

    The inherited attribute ``tau`` is the constant epsilon in the step's denominator, sqrt(v) + epsilon.

    Attributes:
        delay: rule for the learning rate of a step with late updates: divide (by the largest staleness), cap (at most 1 /
            staleness) or none.
        delay_limit: largest staleness that does not make the step smaller (tau_c).
    """

    memory: ClassVar[type[OptimizerMemory]] = AmsgradMemory

    delay: Delay = "divide"
    delay_limit: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("delay", self.delay, Delay)
        at_least("delay_limit", self.delay_limit, 0)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Add the update's change to the sum, and record its staleness."""
        state.memory.of(AmsgradMemory).delays.append(staleness)
        super().receive(state, update, spec, staleness)

    def learning_rate(self, latest: int) -> float:
        """Return the learning rate eta_t of a merge whose latest update is ``latest`` versions late."""
        if self.delay == "none" or latest <= self.delay_limit:
            return self.server_lr
        return self.server_lr / latest if self.delay == "divide" else min(self.server_lr, 1.0 / latest)

    def _step_of(self, state: GlobalState) -> Step:
        memory = state.memory.of(AmsgradMemory)
        memory.steps += 1
        lr = self.learning_rate(max(memory.delays)) / (1 - self.beta1**memory.steps)
        memory.delays.clear()
        return partial(self._amsgrad, lr, math.sqrt(1 - self.beta2**memory.steps))

    def _amsgrad(
        self,
        lr: float,
        correction: float,
        theta: Tensor,
        delta: Tensor,
        moments: Sequence[Tensor],
        where: Tensor | None,
    ) -> None:
        m, v, peak = moments
        new_m = torch.add(m * self.beta1, delta, alpha=1 - self.beta1)
        new_v = torch.add(v * self.beta2, delta * delta, alpha=1 - self.beta2)
        new_peak = torch.maximum(peak, new_v)
        new_theta = torch.addcdiv(theta, new_m, (new_peak.sqrt() / correction).add_(self.tau), value=lr)
        copy_where(((m, new_m), (v, new_v), (peak, new_peak), (theta, new_theta)), where)

    def __str__(self) -> str:
        rates = {"divide": "eta / staleness", "cap": "at most 1 / staleness", "none": ""}
        late = f", {rates[self.delay]} above {self.delay_limit}" if rates[self.delay] else ""
        return f"server amsgrad, lr {self.server_lr:g}{late}"


def fadas(
    buffer_size: int = 5,
    server_lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.99,
    epsilon: float = 1e-8,
    delay: Delay = "divide",
    delay_limit: int = 1,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
    clients_at_work: float | None = None,
) -> Algorithm:
    """Return FADAS: the server makes an AMSGrad step along the mean of every M updates, smaller if one of them is late.

    Args:
        buffer_size: number of updates in a merge (M).
        server_lr: server learning rate (eta); the authors use 1e-3 with delay adaptation and 1e-4 without.
        beta1: decay of the first moment (beta_1).
        beta2: decay of the second moment (beta_2).
        epsilon: constant added to the square root in the denominator.
        delay: rule for the step size if the largest staleness exceeds delay_limit (eta_t): divide (eta / staleness),
            cap (at most 1 / staleness) or none.
        delay_limit: largest staleness that does not make the step smaller (tau_c).
        cohort: number of clients that the server keeps at work at any time, drawn uniformly (the concurrency M_c); None = all.
        concurrency: upper limit on the clients at work, in case the cohort is larger; None = no limit.
        submodel: rule that chooses each client's submodel, such as `raafl.parts.RateSelect`; None = the whole model for
            every client.
        clients_at_work: mean number of clients at work for which buffer_size is meant; M then follows the measured number, from
            half of buffer_size to twice, so that the mean staleness stays. None = M never changes.
    """
    merge = DelayAdaptive(
        "adam", server_lr, beta1, beta2, epsilon, by_samples=False, delay=delay, delay_limit=delay_limit
    )
    return Algorithm(
        name="fadas",
        paper="Wang et al. 2024, FADAS",
        sample=Sample(cohort, concurrency),
        select=submodel or Full(),
        local=Local(),
        trigger=Buffered(buffer_size, clients_at_work),
        merge=merge,
    )
