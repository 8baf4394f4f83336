"""MOON (Li et al., "Model-Contrastive Federated Learning", CVPR 2021).

FedAvg with a contrastive term in the clients' loss. It pulls the representation z of a batch, the input of the last linear
layer, towards that of the received model and away from that of the client's own previous model (eq. 3, 4; Algorithm 1)::

    l_con = -log( exp(sim(z, z_glob) / tau) / (exp(sim(z, z_glob) / tau) + exp(sim(z, z_prev) / tau)) ),   sim: cosine
    l = l_sup + mu l_con

The server stores each client's previous model, which is its last update. Clients receive the submodel and their previous model,
and send the submodel alone.

Choices that the paper leaves open:
- In a client's first task the previous model is the received one: z_prev = z_glob, and the term has no gradient.
- The other two models run in training mode, with their own random draws (dropout). They change neither running statistics nor
  logs.
- Submodels: the previous model is cut as the submodel is; elements that the client has never trained are as received.
- With `alpha` it is asynchronous: each arrival is mixed in as in FedAsync, and z_glob comes from the model the client received.

Shapes: z, z_glob and z_prev are (samples, features); the similarities of the contrastive term are (samples, 2).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raafl.algorithm import (
    Algorithm,
    Cost,
    FlatTensors,
    Full,
    GlobalState,
    Hook,
    Local,
    Sample,
    Select,
    Spec,
    Submodels,
    Task,
    Traits,
    Update,
    at_least,
    positive,
)
from raafl.core.payload import Bundles
from raafl.parts.local.swap_parameters import InputCapture, linear_in, requiring_layer, with_parameters
from raafl.parts.merge.remembered import load_, store_
from raafl.parts.merge.wrapped import Wrapped
from raafl.parts.trigger import averaging
from raafl.submodel.flat import reals

LAST = "last"
"""Bundle, and store of values by client, of each client's previous model."""


def moon(
    mu: float = 1.0,
    temperature: float = 0.5,
    layer: str | None = None,
    by_samples: bool = True,
    alpha: float | None = None,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
) -> Algorithm:
    """Return MOON: FedAvg with a contrastive loss, which keeps the clients' representations close to the global ones.

    Args:
        mu: weight of the contrastive term (mu), at least 0; the paper tries 0.1, 1, 5 and 10.
        temperature: temperature of the contrastive term (tau).
        layer: path of the linear layer whose input is the representation; None = the last one.
        by_samples: whether to weight clients by their numbers of samples |D_i|; False = equally.
        alpha: weight of each arriving update in an asynchronous run; None = synchronous rounds.
        cohort: number of clients in a round, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        submodel: rule that chooses each client's submodel, such as `raafl.parts.RateSelect`; None = the whole model for
            every client.
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
    """Local training with MOON's contrastive term in the loss.

    Attributes:
        mu: weight of the contrastive term.
        temperature: temperature of the contrastive term (tau).
        layer: path of the linear layer whose input is the representation; None = the last one.
    """

    down: ClassVar[tuple[str, ...]] = (LAST,)
    mu: float = 1.0
    temperature: float = 0.5
    layer: str | None = None

    def prepare(self, module: nn.Module) -> nn.Module:
        """Check that the model has the layer that the attribute `layer` names; return the model unchanged.

        Raises:
            BadInput: the model has no such layer.
        """
        linear_in(module, self.layer)
        return module

    @property
    def traits(self) -> Traits:
        """What this training can do, needs, and leaves out."""
        return replace(super().traits, captures=("received", "last"))

    def trial(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context at whose end a `BadInput` is raised if the tried step does not use the layer."""
        return requiring_layer(module, self.layer)

    def hook(self, task: Task) -> Hook:
        """Return the hook that adds the contrastive term to the loss."""
        return _Steps(task, self)

    def estimate(self, submodels: Submodels, spec: Spec, batch_size: int, extra: object) -> Cost:
        """Return the cost of ordinary training plus two forward passes, which add two thirds of its FLOPs."""
        cost = submodels.cost(spec, batch_size)
        return replace(cost, flops_per_sample=cost.flops_per_sample * 5 / 3)

    def __str__(self) -> str:
        return f"SGD on the loss + contrastive term {self.mu:g}, temperature {self.temperature:g}"


class _Steps(Hook):
    """Training hook that adds MOON's contrastive loss.

    The loss compares what the last linear layer receives in the model that trains, in the received global model, and in
    the client's model after its previous task.
    """

    def __init__(self, task: Task, local: Contrastive) -> None:
        super().__init__(task)
        self._local, self._capture = local, InputCapture(task.module, local.layer)
        self.received, self.last = task.received, task.down[LAST]

    def _representation(self, values: FlatTensors, batch: object, index: int) -> Tensor:
        # no gradients: the other models' representations are constants of the contrastive loss
        with with_parameters(self.task.module, values), torch.no_grad():
            self.task.loss(batch, index)
        return self._capture.seen

    def loss(self, batch: object, index: int) -> Tensor:
        """Return the loss of a batch plus the weighted contrastive term."""
        others = [self._representation(flat, batch, index) for flat in (self.received, self.last)]
        loss, z = super().loss(batch, index), self._capture.seen
        z, *others = (reals(inputs).flatten(1) for inputs in (z, *others))
        sims = torch.stack([F.cosine_similarity(z, other, dim=1) for other in others], dim=1)
        # l_con is a cross entropy over two classes, received model (0) and previous model (1); the target is class 0
        target = torch.zeros(len(z), dtype=torch.long, device=z.device)
        return loss + self._local.mu * F.cross_entropy(sims / self._local.temperature, target)

    def close(self) -> None:
        """Remove the hook that captures the inputs of the last linear layer."""
        self._capture.close()


@dataclass(frozen=True)
class WithLastModels(Wrapped):
    """Merge that also stores each client's latest model, which the client receives again as its previous model."""

    by_client: ClassVar[bool] = True

    def personalize(self, state: GlobalState, client: int, spec: Spec, values: FlatTensors, bundles: Bundles) -> None:
        """Send the client its previous model, besides the global one; elements it has never trained get the global values."""
        bundles[LAST].copy_(values.prefix(bundles[LAST].layout))
        load_(state, LAST, client, spec, bundles[LAST])

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Store the model that the client has trained, and take it into the next average."""
        store_(state, LAST, update.client, spec, update.tensors)
        super().receive(state, update, spec, staleness)
