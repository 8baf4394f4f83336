"""FedPer (Arivazhagan et al., "Federated Learning with Personalization Layers", 2019), and LG-FedAvg.

Each client has some layers of its own, which no other client's training changes; the others are averaged as in FedAvg
(Algorithm 1): ``theta_B = sum_j gamma_j theta_B,j``, gamma_j = n_j / n, and theta_P,j stays client j's. In FedPer the own layers
are the last ones, ``local: head``; LG-FedAvg (Liang et al., "Think Locally, Act Globally", 2020) is its mirror, ``local: body``.

Choices that the paper leaves open:
- The server stores a client's own layers and sends them with the client's tasks, so that the client may rejoin from anywhere and
  a run replays. They are merged with nobody's and sent to nobody else. If the server may not see them, do not use this method.
- The head is the last linear layer, which the training step has to use; `layers` names others. Only parameters are personal;
  running statistics are averaged. A parameter that lies in own and shared layers at once, as a tied head's, is refused.
- The global model, and a new client, has the own layers' initial values, so the global model's score says little. Each
  client evaluates its own model on its own test part (`partition.test_share`).
- Submodels: own layers are cut as the submodel is. Empty `layers` give FedAvg, bit for bit.
- With `alpha` it is asynchronous: the shared layers of each arrival are mixed in as in FedAsync.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import nn

from raafl.algorithm import (
    Algorithm,
    FlatTensors,
    Full,
    GlobalState,
    Local,
    Sample,
    Select,
    Spec,
    Submodels,
    Update,
    one_of,
)
from raafl.core.payload import Bundles
from raafl.core.types import Warn
from raafl.errors import nearest
from raafl.parts.local.swap_parameters import linear_in, requiring_layer
from raafl.parts.merge.remembered import load_, store_
from raafl.parts.merge.wrapped import Wrapped
from raafl.parts.trigger import averaging
from raafl.submodel.declared import within

OWN = "own layers"
"""Store of each client's own layers in `GlobalState.clients`."""
Place = Literal["head", "body"]


def fed_per(
    local: Place = "head",
    layers: Sequence[str] | None = None,
    by_samples: bool = True,
    alpha: float | None = None,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
) -> Algorithm:
    """Return FedPer, in which each client keeps some layers of its own, and all other layers are averaged.

    Args:
        local: layers that each client keeps for itself: head (FedPer), or body, all layers but the head (LG-FedAvg).
        layers: paths of the modules or parameters that form the head; None = the last linear layer.
        by_samples: whether to weight clients by their numbers of samples |D_j| (gamma_j); False = equally.
        alpha: weight of each arriving update in an asynchronous run; None = synchronous rounds.
        cohort: number of clients in a round, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        submodel: rule that chooses each client's submodel, such as `raafl.parts.RateSelect`; None = the whole model for
            every client.
    """
    one_of("local", local, Place)
    trigger, mean = averaging(alpha, by_samples)
    return Algorithm(
        name="fed_per",
        paper="Arivazhagan et al. 2019",
        sample=Sample(cohort, concurrency),
        select=submodel or Full(),
        local=_WithHead() if layers is None else Local(),
        trigger=trigger,
        merge=Personal(mean, local, None if layers is None else tuple(layers)),
    )


@dataclass(frozen=True)
class _WithHead(Local):
    """Ordinary local training of a model whose last linear layer is its personal head."""

    def trial(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context for a trial step, which raises `BadInput` at its end unless the step used the last linear layer."""
        return requiring_layer(module, field="layers")


@dataclass(frozen=True)
class Personal(Wrapped):
    """Merge that averages the shared layers and stores each client's own layers separately.

    Attributes:
        local: layers that each client keeps for itself: head or body.
        layers: paths of the modules or parameters that form the head; None = the last linear layer.
    """

    local: Place = "head"
    layers: tuple[str, ...] | None = None
    by_client: ClassVar[bool] = True

    def own(self, submodels: Submodels) -> frozenset[str]:
        """Return the names of the parameters in the layers that each client keeps for itself."""
        return submodels.cached("own layers", (self.local, self.layers), lambda: self._own(submodels))

    def _head(self, submodels: Submodels) -> tuple[str, ...]:
        return (linear_in(submodels.module)[0],) if self.layers is None else self.layers

    def _own(self, submodels: Submodels) -> frozenset[str]:
        head = self._head(submodels)
        names = submodels.parameter_names & submodels.layout(part="trained").by_name.keys()
        return frozenset(name for name in names if within(name, head) == (self.local == "head"))

    def check(self, state: GlobalState) -> list[str]:
        """Return an error message for each path in `layers` that the model lacks, and for each parameter that they would part."""
        submodels = state.submodels
        names, head = submodels.parameter_names | submodels.aliases.keys(), self._head(submodels)
        missing = [path for path in self.layers or () if not any(within(name, (path,)) for name in names)]
        problems = [
            f"layers has '{path}', where the model has no parameters: {nearest(path, names)}" for path in missing
        ]
        trained = submodels.layout(part="trained").by_name
        torn = [
            f"layers is {'null' if self.layers is None else list(self.layers)}, and '{alias}' is the same parameter as '{name}', "
            "of which one is a client's own and the other shared: name both in layers, or neither, or do not tie them"
            for alias, name in submodels.aliases.items()
            if name in trained and within(alias, head) != within(name, head)
        ]
        return super().check(state) + problems + (torn if submodels.rules.keeps_ties_whole else [])

    def notes(self, state: GlobalState, num_clients: int) -> list[str]:
        """Return messages for the user, with a warning if no layer is shared, so that each client trains alone."""
        trained = state.submodels.parameter_names & state.submodels.layout(part="trained").by_name.keys()
        alone = [] if trained - self.own(state.submodels) else [Warn("no layer is shared: each client trains alone")]
        return super().notes(state, num_clients) + alone

    def personalize(self, state: GlobalState, client: int, spec: Spec, values: FlatTensors, bundles: Bundles) -> None:
        """Put the client's own layers into the model that it is about to receive."""
        load_(state, OWN, client, spec, values, self.own(state.submodels))
        super().personalize(state, client, spec, values, bundles)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Store the client's own layers, and take its shared layers into the next average."""
        store_(state, OWN, update.client, spec, update.tensors, self.own(state.submodels))
        super().receive(state, update, spec, staleness)

    def apply(self, state: GlobalState) -> None:
        """Merge the shared layers; the global model's values of all other layers stay unchanged."""
        before = {name: state.values[name].clone() for name in self.own(state.submodels)}
        super().apply(state)
        for name, values in before.items():
            state.values[name].copy_(values)

    def report(self, state: GlobalState) -> dict[str, Any]:
        """Return an entry "own_parameters" for the run's summary: the number of parameters that a client keeps for itself."""
        layout = state.submodels.layout().by_name
        return {**super().report(state), "own_parameters": sum(layout[n].numel for n in self.own(state.submodels))}

    def __str__(self) -> str:
        return f"{self.inner}, but for each client's own {self.local}"
