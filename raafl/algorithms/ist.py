"""IST (Yuan et al., "Distributed Learning of Fully Connected Neural Networks using Independent Subnet Training", VLDB 2022).

In each round every hidden neuron is assigned at random to exactly one of S sites (section 3.1); all sites share inputs and
outputs. A weight between two hidden neurons of one site is trained by that site alone, for T local steps; a weight between
neurons of two sites is not trained in this round. Then trained weights are copied back, and the neurons are assigned anew.

Choices that the paper leaves open, and deviations from it:
- Parameters that several sites have (the output bias, norms over an uncut width) become their unweighted mean.
- S is the number of clients in the round, unless `subnets` says otherwise.
- Any axis is partitioned: channels and heads, too. If it has fewer units than sites, each site has one unit, and some share it.
- Sites get equal numbers of neurons, whatever the clients' devices can do (Zhang et al. call it "uniformly assigned").

With one subnet this is unweighted FedAvg, bit for bit.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from raafl.algorithm import (
    Algorithm,
    AllReported,
    BadInput,
    ClientInfo,
    Local,
    Mean,
    MergeMemory,
    Sample,
    Select,
    SelectContext,
    Spec,
    Work,
    derive_seed,
    positive,
)
from raafl.errors import refuse_unused
from raafl.parts.select.submodels import uncut
from raafl.parts.select.units import Axes, shared_fragments, spec_of
from raafl.submodel import Axis


def ist(
    subnets: int | None = None,
    rescale: bool = False,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
) -> Algorithm:
    """Return IST: in each round the model's units are divided at random, and each client trains a subnet of its own.

    Args:
        subnets: number of disjoint subnets in a round (S); if there are more clients, several of them train the same
            subnet. None = one for each client of the round.
        rescale: multiply the activations of a narrowed layer by 1 / (kept share of its units) while training.
        cohort: number of clients in a round, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        submodel: rule that chooses submodels in place of the subnets, such as `raafl.parts.RateSelect`; leave out
            subnets then.
    """
    if submodel is not None:
        refuse_unused("submodel says what each client trains", subnets=(subnets, None))
    positive("subnets", subnets, optional=True)
    return Algorithm(
        name="ist",
        paper="Yuan et al. 2022",
        sample=Sample(cohort, concurrency),
        select=submodel or DisjointUnits(subnets, cohort),
        local=Local(rescale=rescale),
        trigger=AllReported(),
        merge=Mean(by_samples=False),
    )


def deal(axes: Axes, shares: int, seed: int, round: int) -> tuple[Spec, ...]:
    """Divide the model's units (such as neurons or heads) at random into disjoint submodels of equal size.

    If a layer has fewer units than there are submodels, each submodel gets one unit and some units are used twice.

    Args:
        axes: the model's axes (dimensions whose units can be divided), by name; an axis of whole blocks is not divided.
        shares: number of submodels.
        seed: seed of all divisions in the run.
        round: number of the round, which has a division of its own.
    """
    parts: list[dict[str, Sequence[int]]] = [{} for _ in range(shares)]
    for name, axis in axes.items():
        if not isinstance(axis, Axis):
            continue
        # one generator for each axis, so that an axis's partition does not depend on which other axes the model has
        order = random.Random(derive_seed(seed, round, name)).sample(range(axis.size), axis.size)
        for part, positions in zip(parts, shared_fragments({name: axis}, [1.0] * shares), strict=True):
            part[name] = [order[i] for i in positions.indices(name) or range(axis.size)]
    return tuple(spec_of(axes, part) for part in parts)


def _of_each_size(specs: Sequence[Spec]) -> Collection[Spec]:
    """Return one of the submodels of each size; shares of an axis differ by a unit, and the larger may be any of them."""
    return {tuple((name, len(units)) for name, units in spec.kept): spec for spec in specs}.values()


@dataclass
class Round(MergeMemory):
    """State of one round: how many of its submodels have been assigned to clients.

    Attributes:
        version: version of the model at the start of the round.
        shares: number of submodels in the round.
        next: number of the submodel that the next client gets.
    """

    key = "dealt"
    version: int = -1
    shares: int = 1
    next: int = 0


@dataclass(frozen=True, slots=True)
class DisjointUnits(Select):
    """Rule that gives the clients of a round submodels of disjoint random units (IST, Yuan et al. 2022, section 3.1).

    Clients that start from the same version of the model get the first submodel, the second, and so on; after the last,
    the first again.

    Attributes:
        shares: number of submodels in a round; None = one for each client present, at most ``cohort``.
        cohort: number of clients in a round; None = all.
    """

    shares: int | None = None
    cohort: int | None = None

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Assign the next subnet of this round to the client; raise `BadInput` if it does not fit the client's memory."""
        version, round = fleet.state.version, fleet.state.memory.of(Round)
        if round.version != version:
            round.version, round.shares, round.next = version, self._num_fitting(version, fleet), 0
        specs = self._specs(round.version, round.shares, fleet)
        spec = specs[round.next % len(specs)]
        if not fleet.fits(client, spec):
            raise BadInput(self._problem(client, fleet, spec))
        round.next += 1
        return Work(spec, region=client.id)

    def _specs(self, version: int, shares: int, fleet: SelectContext) -> tuple[Spec, ...]:
        if fleet.cache.get("dealt") != (version, shares):
            seed = derive_seed(fleet.seed, "dealt")
            fleet.cache["dealt"] = (version, shares)
            fleet.cache["specs"] = deal(fleet.state.submodels.axes, shares, seed, version)
        specs: tuple[Spec, ...] = fleet.cache["specs"]
        return specs

    def _num_fitting(self, version: int, fleet: SelectContext) -> int:
        """Return the number of submodels in a round: more than usual while clients are away and the others lack memory."""
        least = self._num_shares(fleet)
        most = max((axis.size for axis in fleet.state.submodels.axes.values() if isinstance(axis, Axis)), default=least)
        by_memory = {client.profile.memory_bytes: client for client in fleet.clients.values()}.values()

        def fits(shares: int) -> bool:
            specs = _of_each_size(self._specs(version, shares, fleet))
            return all(fleet.fits(client, spec) for spec in specs for client in by_memory)

        if self.shares is not None or fits(least) or not fits(most):
            return least
        return bisect_left(range(most), True, lo=least, key=fits)

    def _num_shares(self, fleet: SelectContext) -> int:
        present = len(fleet.clients)
        return self.shares or min(present, self.cohort or present)

    def forget(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Do nothing: a lost client's submodel is not trained by anybody else in this round."""

    def check(self, fleet: SelectContext) -> list[str]:
        """Return an error message for each client whose memory is too small for the largest submodel."""
        specs = _of_each_size(deal(fleet.state.submodels.axes, self._num_shares(fleet), 0, 0))
        largest = max(specs, key=lambda spec: fleet.cost(spec).peak_bytes)
        return [self._problem(c, fleet, largest) for c in fleet.clients.values() if not fleet.fits(c, largest)]

    def notes(self, fleet: SelectContext) -> list[str]:
        """Return a warning for the user if the model has no layer whose units could be divided among the clients."""
        return uncut(fleet.state.submodels, "deal out")

    def _problem(self, client: ClientInfo, fleet: SelectContext, spec: Spec) -> str:
        other = "more subnets" if fleet.state.submodels.axes else "a smaller model"
        return (
            f"client {client.id}: memory_bytes is {client.profile.memory_bytes:.4g}, one of {self._num_shares(fleet)} equal shares "
            f"needs {fleet.cost(spec).peak_bytes:.4g} to train: raise memory_bytes, use a smaller batch, or {other}"
        )

    def __str__(self) -> str:
        return "disjoint shares of all units, " + ("as many as clients" if self.shares is None else str(self.shares))
