"""FedDyn (Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021).

Each client adds a linear and a quadratic term to its loss, so that the clients' optima agree with the optimum of the whole
problem (Algorithm 1)::

    theta_k = argmin L_k(theta) - <g_k, theta> + alpha/2 ||theta - theta^{t-1}||^2
    g_k <- g_k - alpha (theta_k - theta^{t-1})                       the client's gradient at its optimum, 0 at first
    h <- h - alpha 1/m sum_{k in P_t} (theta_k - theta^{t-1})        m clients in all; h is the mean of all g_k
    theta^t = 1/|P_t| sum_{k in P_t} theta_k - h / alpha

A local step therefore follows ``grad L_k - g_k + alpha (theta - theta^{t-1})``. The server stores g_k and computes it from the
updates: clients receive the submodel and g_k, and send the submodel alone.

Choices that the paper leaves open:
- The argmin is the run's local epochs of the model's own optimizer, as in the paper's experiments.
- alpha 0 is unweighted FedAvg, bit for bit; the limit of the equations would divide 0 by 0.
- Submodels: means and h are over the clients that have an element (`raafl.parts.merge.variates`), and -h / alpha moves only
  elements that the round covers. Running statistics are averaged.
- It works in rounds alone: g_k and h are differences from the one theta^{t-1} from which all clients of a round start.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from raafl.algorithm import (
    Algorithm,
    AllReported,
    FlatTensors,
    Full,
    GlobalState,
    Hook,
    Local,
    Mean,
    Sample,
    Select,
    Spec,
    Task,
    Traits,
    Update,
    at_least,
)
from raafl.parts.merge.variates import Variates, WithVariates, plan_of

GRADIENT = "g_k"
"""Bundle, and store of variates by client, of the gradients g_k."""


def fed_dyn(
    alpha: float = 0.01, cohort: int | None = None, concurrency: int | None = None, submodel: Select | None = None
) -> Algorithm:
    """Return FedDyn, which corrects each client's training by a gradient that the server stores for it.

    Args:
        alpha: weight of the regularisation (alpha), at least 0; the paper tries 0.001, 0.01 and 0.1.
        cohort: number of clients in a round, drawn uniformly (P_t); None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        submodel: rule that chooses each client's submodel, such as `raafl.parts.RateSelect`; None = the whole model for
            every client.
    """
    at_least("alpha", alpha, 0)
    mean = Mean(by_samples=False)
    return Algorithm(
        name="fed_dyn",
        paper="Acar et al. 2021",
        sample=Sample(cohort, concurrency),
        select=submodel or Full(),
        local=Regularised(prox=alpha) if alpha else Local(),
        trigger=AllReported(),
        merge=Corrected(mean, Variates(GRADIENT), alpha) if alpha else mean,
    )


@dataclass(frozen=True)
class Regularised(Local):
    """Local training with FedDyn's loss: the module's own plus a linear and a proximal term."""

    down: ClassVar[tuple[str, ...]] = (GRADIENT,)

    @property
    def traits(self) -> Traits:
        """What this training can do, needs, and leaves out."""
        return replace(super().traits, uses_gradients=True, captures=("linear",))

    def hook(self, task: Task) -> Hook:
        """Return the hook that subtracts the client's stored gradient, which has the effect of FedDyn's linear term."""
        return LinearTerm(task)

    def __str__(self) -> str:
        return f"SGD on the loss, dynamically regularised with {self.prox:g}"


class LinearTerm(Hook):
    """Hook for FedDyn's linear term: it subtracts the client's stored gradient from the gradient of each step."""

    def __init__(self, task: Task, *others: Any) -> None:
        """Take the received gradient of FedDyn's linear term from the task; pass ``others`` to the next base class."""
        super().__init__(task, *others)
        self.linear = task.down[GRADIENT]

    def update(self) -> None:
        """Subtract the client's stored gradient from the current one, then make the optimizer's step."""
        for name, parameter in self.task.module.named_parameters():
            if parameter.grad is not None and name in self.linear:
                parameter.grad.sub_(self.linear[name].to(parameter.device))
        super().update()


@dataclass(frozen=True)
class Corrected(WithVariates):
    """FedDyn's merge: averages the clients' models and subtracts h / alpha, where h is the mean of the clients' gradients.

    The server stores one gradient for each client, and corrects it by each update of that client.

    Attributes:
        alpha: weight of the regularisation (alpha).
    """

    alpha: float

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Correct the client's stored gradient by the change of its model, and add that model to the mean."""
        # no merge has happened since the round began, so these values are theta^{t-1}, which all clients of the round
        # received
        change, received = update.tensors.clone(), state.submodels.plan(spec).gather(state.values)
        for dtype, buffer in change.buffers.items():
            buffer.sub_(received.buffers[dtype])
        for name, tensor in change.items():
            if name not in state.submodels.parameter_names:
                tensor.zero_()
        self.variates.add_(state, update.client, spec, change, -self.alpha)
        self.inner.receive(state, update, spec, staleness)

    def apply(self, state: GlobalState) -> None:
        """Set the model to the mean of the updates, minus h / alpha at all elements that were trained (Algorithm 1).

        h is the mean of the stored gradients of all clients, alpha the weight of the regularisation.
        """
        super().apply(state)
        whole = state.submodels.layout(part="trained")
        covered, h = (FlatTensors.zeros(whole, state.values.device) for _ in range(2))
        for item in state.waiting:
            plan_of(state, item.spec).cover_(covered)
        # after super().apply, which has added this round's g_k to their mean h: the order of Algorithm 1
        self.variates.mean_(state, Spec(), h)
        for name in covered.layout.by_name:
            state.values[name].sub_(torch.where(covered[name] > 0, h[name], 0.0), alpha=1 / self.alpha)

    def __str__(self) -> str:
        return f"{self.inner}, less the mean gradient / {self.alpha:g}"
