"""SCAFFOLD (Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020).

The server has a control variate c, and each client i one of its own, c_i; all start at 0. A client starts from x and follows
(Algorithm 1)::

    y <- y - eta_l (g_i(y) - c_i + c)                                                              (eq. 3)
    c_i^+ = g_i(x)                        option I:  the gradient at the received values
          = c_i - c + (x - y) / (K eta_l) option II: K steps of eta_l                              (eq. 4)
    x <- x + eta_g / |S| sum_S (y_i - x),   c <- c + 1/N sum_S (c_i^+ - c_i)                       (eq. 5)

Clients receive the submodel, c and c_i, and send the differences of the submodel and of c_i, all cut alike. The server stores
c_i.

Choices that the paper leaves open:
- Option II computes the mean of the gradients g_i(y) of all steps. For SGD with one learning rate that equals eq. 4. It also holds
  for schedules, momentum and clipping, which eq. 4 would count as part of the variate. The correction is added to the
  gradients before the model's own optimizer uses them.
- Option I computes the gradient at x over the task's batches, which doubles the computation.
- Submodels: c is a mean that leaves out clients that do not train an element (`raafl.parts.merge.variates`); for whole models
  it is over N.
- Clients count equally in both means, as in the paper. `by_samples` weights both by |D_n|; with other weights for x than for c
  the corrections of a round would not cancel. Where all clients take part in a round this is what Flower's niid_bench does. In
  c a client keeps the weight of its first update, and those never heard have the mean weight.
- With a `buffer_size` it is asynchronous: K differences make a merge, each against the model and the c that its client received,
  weighted by s(staleness) = 1/sqrt(1 + staleness) as in FedBuff; c_i^+ is stored when it arrives, and c changes at the merge.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from raafl.algorithm import (
    Algorithm,
    AllReported,
    BadInput,
    Buffered,
    Cost,
    Deltas,
    Full,
    Hook,
    Local,
    Sample,
    Select,
    Spec,
    Staleness,
    Submodels,
    Task,
    Traits,
)
from raafl.parts.local.swap_parameters import with_parameters
from raafl.parts.merge.variates import Variates, WithVariates

SERVER, CLIENT = "c", "c_i"
"""Bundles of the control variates."""


def scaffold(
    option: Literal[1, 2] = 2,
    server_lr: float = 1.0,
    cohort: int | None = None,
    concurrency: int | None = None,
    buffer_size: int | None = None,
    submodel: Select | None = None,
    by_samples: bool = False,
) -> Algorithm:
    """Return SCAFFOLD, in which control variates keep the clients' steps from drifting apart.

    A control variate is an estimate of a client's gradient. Each step of a client subtracts its own, and adds the mean
    of all clients'.

    Args:
        option: rule for a client's new control variate: 1 (its gradient at the received model x) or 2 (mean gradient of
            its steps).
        server_lr: global step size (eta_g).
        cohort: number of clients in a round, drawn uniformly (S); None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        buffer_size: number of updates in a merge of an asynchronous run; None = synchronous rounds.
        submodel: rule that chooses each client's submodel, such as `raafl.parts.RateSelect`; None = the whole model for
            every client.
        by_samples: whether to weight clients by their numbers of samples |D_n|, in the model and in c; False = equally.
    """
    if option not in (1, 2):
        raise BadInput(f"option is {option}: give 1 or 2")
    return Algorithm(
        name="scaffold",
        paper="Karimireddy et al. 2020",
        sample=Sample(cohort, concurrency),
        select=submodel or Full(),
        local=Controlled(option),
        trigger=AllReported() if buffer_size is None else Buffered(buffer_size),
        merge=WithVariates(
            Deltas(server_lr, Staleness("polynomial", a=0.5), by_samples=by_samples),
            Variates(CLIENT, SERVER, by_samples),
        ),
    )


@dataclass(frozen=True)
class Controlled(Local):
    """Local training of SCAFFOLD: corrects each step by control variates, and computes the client's new one (eqs. 3, 4).

    A control variate is an estimate of a gradient: the server stores one for each client, and their mean.

    Attributes:
        option: rule for the new control variate: 1 = the gradient at the received model, 2 = the steps' mean gradient.
    """

    down: ClassVar[tuple[str, ...]] = (SERVER, CLIENT)
    up: ClassVar[tuple[str, ...]] = (CLIENT,)
    option: int = 2

    @property
    def traits(self) -> Traits:
        """What this training can do, needs, and leaves out."""
        # option 1 takes a second gradient in each step, which the processes of one client do not average
        return replace(
            super().traits,
            uses_gradients=True,
            supports_data_parallel=self.option == 2,
            captures=_READ if self.option == 2 else None,
        )

    def hook(self, task: Task) -> Hook:
        """Return the hook that corrects the steps by control variates."""
        return _Steps(task, self.option)

    def estimate(self, submodels: Submodels, spec: Spec, batch_size: int, extra: object) -> Cost:
        """Return the cost of ordinary training; option 1 doubles the FLOPs and needs memory for sums of gradients."""
        cost = submodels.cost(spec, batch_size)
        cost = replace(cost, peak_bytes=cost.peak_bytes + submodels.layout(spec, "trained").single_copy_bytes)
        return cost if self.option == 2 else replace(cost, flops_per_sample=2 * cost.flops_per_sample)

    def __str__(self) -> str:
        return f"SGD with control variates, option {'I' * self.option}"


_READ = ("_mean", "_correction")
"""Attributes of the hook with tensors of a task that each step reads or changes."""


class _Steps(Hook):
    """Training hook that adds the correction c - c_i to each gradient, and averages the gradients of which the new c_i consists."""

    def __init__(self, task: Task, option: int) -> None:
        super().__init__(task)
        self._option, self._num_gradients, up = option, 0, task.up[CLIENT]
        c, self._variate = (task.down[name].to(up.device) for name in (SERVER, CLIENT))
        self._named = [(n, p) for n, p in task.module.named_parameters() if n in up and p.requires_grad]
        # sum in the bundle that is sent, without a copy; in float32 if the bundle is half precision, where a long sum
        # loses terms
        self._mean = {n: up[n] if up[n].dtype.itemsize > 2 else up[n].float() for n, _ in self._named}
        self._correction = {name: c[name] - self._variate[name] for name, _ in self._named}

    def loss(self, batch: object, index: int) -> torch.Tensor:
        """Return the loss of a batch; with option 1, first add the batch's gradient at the received model x to the sum."""
        if self._option == 1:
            with with_parameters(self.task.module, self.task.received):
                loss = self.task.loss(batch, index)
                self._num_gradients += 1
                self._add(torch.autograd.grad(loss, [p for _, p in self._named], allow_unused=True))
        return super().loss(batch, index)

    def stepped(self) -> None:
        """With option 2, count the step's gradient, which `update` has added to the sum."""
        self._num_gradients += self._option == 2

    def _add(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Add one gradient for each parameter to the running sums; None counts as 0."""
        for (name, _), gradient in zip(self._named, gradients, strict=True):
            if gradient is not None:
                self._mean[name].add_(gradient)

    def update(self) -> None:
        """Correct the gradient by c - c_i and step the optimizer; with option 2, add the uncorrected gradient to the sum first."""
        if self._option == 2:
            # sum before the correction, which is not part of the gradient g_i(y)
            self._add([p.grad for _, p in self._named])
        for name, parameter in self._named:
            correction = self._correction[name]
            parameter.grad = correction.clone() if parameter.grad is None else parameter.grad.add_(correction)
        super().update()

    def finish(self) -> dict[str, Any]:
        """Write the change of the client's control variate, the mean gradient minus c_i, into the update."""
        if not self._num_gradients:  # all batches were skipped: the variate stays
            return {}
        for name, _ in self._named:
            self.task.up[CLIENT][name].copy_(
                self._mean[name].div_(max(self._num_gradients, 1)).sub_(self._variate[name])
            )
        return {}
