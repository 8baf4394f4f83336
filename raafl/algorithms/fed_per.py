"""FedPer (Arivazhagan et al., "Federated Learning with Personalization Layers", 2019), and LG-FedAvg.

Each client has layers of its own, which no other client's training touches; the others are averaged as in FedAvg
(Algorithm 1): ``theta_B = sum_j gamma_j theta_B,j``, gamma_j = n_j / n, and theta_P,j stays client j's. FedPer's own layers are the
last ones, ``local: head``; LG-FedAvg (Liang et al., "Think Locally, Act Globally", 2020) is its mirror, ``local: body``.

The paper leaves open, and this does:
- A client's layers are kept by the server, for this client alone, so that it may come back anywhere and a run replays: they
  travel with its tasks, as state of its own. They are merged with nobody's and sent to nobody else. Where the server may not see
  them either, this is not the method.
- The head is the last linear layer; `layers` names others. Personal are parameters; running statistics are averaged.
- The global model has the layers that it began with, and so have clients that are new: what it scores says little. Each client
  measures its own model on its own test part (`partition.test_share`).
- Submodels: own layers are cut as the submodel is. Empty `layers` are FedAvg, bit for bit.
- With `alpha` it is asynchronous: the shared layers of each arrival are mixed in as in FedAsync.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from raafl.core.algorithm import Algorithm, Local, Select
from raafl.core.payload import Bundles
from raafl.core.sample import Sample
from raafl.core.state import GlobalState
from raafl.core.types import Update, Warn
from raafl.errors import nearest, one_of
from raafl.parts.local.capture import linear_in
from raafl.parts.merge.averaging import averaging
from raafl.parts.merge.client_values import load_, store_
from raafl.parts.merge.wrapped import Wrapped
from raafl.parts.select.submodels import Full
from raafl.submodel import FlatTensors, Spec, Submodels
from raafl.submodel.declared import within

OWN = "own layers"
Place = Literal["head", "body"]


def fed_per(
    local: Place = "head", layers: Sequence[str] | None = None, by_samples: bool = True, alpha: float | None = None,
    cohort: int | None = None, concurrency: int | None = None, submodel: Select | None = None,
) -> Algorithm:  # fmt: skip
    """Make FedPer.

    Args:
        local: a client's own layers: head (FedPer) or body, all but the head (LG-FedAvg).
        layers: paths of the modules or parameters that are the head; None = the last linear layer.
        by_samples: weigh by |D_j| (gamma_j); False = every client alike.
        alpha: mixing weight of each arrival, asynchronously; None = rounds.
        cohort: clients in a round, drawn uniformly; None = all.
        concurrency: how many of them work at a time; None = no cap.
        submodel: what each client trains, such as `raafl.parts.RateSelect`; None = the whole model.
    """
    one_of("local", local, Place)
    trigger, mean = averaging(alpha, by_samples)
    return Algorithm(
        name="fed_per",
        paper="Arivazhagan et al. 2019",
        sample=Sample(cohort, concurrency),
        select=submodel or Full(),
        local=Local(),
        trigger=trigger,
        merge=Personal(mean, local, None if layers is None else tuple(layers)),
    )


@dataclass(frozen=True)
class Personal(Wrapped):
    """Merge of the shared layers; each client's own layers are stored for it."""

    local: Place = "head"
    layers: tuple[str, ...] | None = None
    by_client: ClassVar[bool] = True

    def own(self, submodels: Submodels) -> frozenset[str]:
        """Return the parameters of a client's own layers."""
        return submodels.cached("own layers", (self.local, self.layers), lambda: self._own(submodels))

    def _own(self, submodels: Submodels) -> frozenset[str]:
        head = (linear_in(submodels.module)[0],) if self.layers is None else self.layers
        names = submodels.parameter_names & submodels.layout(part="trained").by_name.keys()
        return frozenset(name for name in names if within(name, head) == (self.local == "head"))

    def check(self, state: GlobalState) -> list[str]:
        """Return a problem for each path that the model does not have."""
        names = state.submodels.parameter_names
        wrong = [path for path in self.layers or () if not any(within(name, (path,)) for name in names)]
        problems = [f"layers has '{path}', where the model has no parameters: {nearest(path, names)}" for path in wrong]
        return super().check(state) + problems

    def notes(self, state: GlobalState, num_clients: int) -> list[str]:
        """Return a note if no layer is shared."""
        trained = state.submodels.parameter_names & state.submodels.layout(part="trained").by_name.keys()
        alone = [] if trained - self.own(state.submodels) else [Warn("nothing is shared: each client trains alone")]
        return super().notes(state, num_clients) + alone

    def personalize(self, state: GlobalState, client: int, spec: Spec, values: FlatTensors, bundles: Bundles) -> None:
        """Insert the client's own layers."""
        load_(state, OWN, client, spec, values, self.own(state.submodels))
        super().personalize(state, client, spec, values, bundles)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Store the client's own layers, and pass the update on."""
        store_(state, OWN, update.client, spec, update.tensors, self.own(state.submodels))
        super().receive(state, update, spec, staleness)

    def apply(self, state: GlobalState) -> None:
        """Merge the shared layers; leave the others unchanged."""
        before = {name: state.values[name].clone() for name in self.own(state.submodels)}
        super().apply(state)
        for name, values in before.items():
            state.values[name].copy_(values)

    def report(self, state: GlobalState) -> dict[str, Any]:
        """Return under "own_parameters" how many of a client's parameters are its own."""
        layout = state.submodels.layout().by_name
        return {**super().report(state), "own_parameters": sum(layout[n].numel for n in self.own(state.submodels))}

    def __str__(self) -> str:
        return f"{self.inner}, but for each client's own {self.local}"
