"""MOON (Li et al., "Model-Contrastive Federated Learning", CVPR 2021).

FedAvg whose clients keep what they see of a batch near what the model that they received sees, and away from what their own last
model saw (eq. 3, 4; Algorithm 1), with z the representation that enters the last linear layer::

    l_con = -log( exp(sim(z, z_glob) / tau) / (exp(sim(z, z_glob) / tau) + exp(sim(z, z_prev) / tau)) ),   sim: cosine
    l = l_sup + mu l_con

The server keeps each client's last model, which is what it has received; down go the submodel and that, up the submodel alone.

The paper leaves open, and this does:
- A client's first last model is the one that it receives: z_prev = z_glob, and the term has no gradient.
- The other two models look at a batch in training mode, draw (dropout) as the first does, and leave no trace in statistics or logs.
- Submodels: the last model is cut as the submodel is; what the client has never trained of it is as received.
- With `alpha` it is asynchronous: each arrival is mixed in as in FedAsync; z_glob is of the model that the client was sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from raafl.core.algorithm import Algorithm, Hook, Local, Select, Task
from raafl.core.payload import Bundles
from raafl.core.sample import Sample
from raafl.core.state import GlobalState
from raafl.core.types import Update
from raafl.errors import at_least, positive
from raafl.parts.local.capture import InputCapture, linear_in
from raafl.parts.local.swap_parameters import at
from raafl.parts.merge.averaging import averaging
from raafl.parts.merge.client_values import load_, store_
from raafl.parts.merge.wrapped import Wrapped
from raafl.parts.select.submodels import Full
from raafl.submodel import Cost, FlatTensors, Spec, Submodels
from raafl.submodel.flat import reals

LAST = "last"


def moon(
    mu: float = 1.0, temperature: float = 0.5, layer: str | None = None, by_samples: bool = True,
    alpha: float | None = None, cohort: int | None = None, concurrency: int | None = None, submodel: Select | None = None,
) -> Algorithm:  # fmt: skip
    """Make MOON.

    Args:
        mu: weight of the contrastive term (mu), 0 or more; the paper tries 0.1, 1, 5 and 10.
        temperature: temperature of the contrastive term (tau).
        layer: path of the linear layer whose input is the representation; None = the last one.
        by_samples: weigh by |D_i|; False = every client alike.
        alpha: mixing weight of each arrival, asynchronously; None = rounds.
        cohort: clients in a round, drawn uniformly; None = all.
        concurrency: how many of them work at a time; None = no cap.
        submodel: what each client trains, such as `raafl.parts.RateSelect`; None = the whole model.
    """
    at_least("mu", mu, 0)
    positive("temperature", temperature)
    trigger, mean = averaging(alpha, by_samples)
    return Algorithm(
        name="moon",
        paper="Li et al. 2021",
        sample=Sample(cohort, concurrency),
        select=submodel or Full(),
        local=Contrastive(mu, temperature, layer) if mu else Local(),
        trigger=trigger,
        merge=WithLastModels(mean) if mu else mean,
    )


@dataclass(frozen=True)
class Contrastive(Local):
    """SGD on the loss and the contrastive term."""

    down: ClassVar[tuple[str, ...]] = (LAST,)
    mu: float = 1.0
    temperature: float = 0.5
    layer: str | None = None

    def prepare(self, module: Any) -> Any:
        """Return the model as it is; raises `BadInput` where it has no such layer."""
        linear_in(module, self.layer)
        return module

    def hook(self, task: Task) -> Hook:
        """Return the steps."""
        return _Steps(task, self)

    def cost(self, submodels: Submodels, spec: Spec, batch_size: int, extra: object) -> Cost:
        """Return the cost of a plain step, of which forward is a third, and of two more forward passes."""
        cost = submodels.cost(spec, batch_size)
        return replace(cost, flops_per_sample=cost.flops_per_sample * 5 / 3)

    def __str__(self) -> str:
        return f"SGD on the loss + contrastive term {self.mu:g}, temperature {self.temperature:g}"


class _Steps(Hook):
    """Compares what enters the last linear layer in three models."""

    def __init__(self, task: Task, local: Contrastive) -> None:
        super().__init__(task)
        self._local, self._entering = local, InputCapture(task.module, local.layer)

    def _seen_at(self, values: FlatTensors, batch: object, index: int) -> Tensor:
        with at(self.task.module, values), torch.no_grad():
            self.task.loss(batch, index)
        return self._entering.seen

    def loss(self, batch: object, index: int) -> Tensor:
        """Return l_sup + mu l_con."""
        others = [self._seen_at(flat, batch, index) for flat in (self.task.received, self.task.down[LAST])]
        loss, z = super().loss(batch, index), self._entering.seen
        z, *others = (reals(seen).flatten(1) for seen in (z, *others))
        sims = torch.stack([F.cosine_similarity(z, other, dim=1) for other in others], dim=1)
        first = torch.zeros(len(z), dtype=torch.long, device=z.device)
        return loss + self._local.mu * F.cross_entropy(sims / self._local.temperature, first)

    def close(self) -> None:
        """Take the hook off the layer."""
        self._entering.close()


@dataclass(frozen=True)
class WithLastModels(Wrapped):
    """Keeps the values that each client has sent last."""

    by_client: ClassVar[bool] = True

    def personalize(self, state: GlobalState, client: int, spec: Spec, values: FlatTensors, bundles: Bundles) -> None:
        """Fill in the client's last model."""
        bundles[LAST].copy_(values.prefix(bundles[LAST].layout))
        load_(state, LAST, client, spec, bundles[LAST])

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Keep the values, and pass them on."""
        store_(state, LAST, update.client, spec, update.tensors)
        super().receive(state, update, spec, staleness)
