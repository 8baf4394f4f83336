"""PruneFL (Jiang et al., "Model Pruning Enables Efficient Federated Learning on Edge Devices", IEEE TNNLS 2022).

FedAvg on one pruned model for all clients, whose units are chosen again and again (adaptive pruning): those that maximise the
expected decrease of the loss per second of a round, ``Gamma(M) = sum_{j in M} g_j^2 / (c + sum_{j in M} t_j)``. The squared
gradient ``g_j^2`` is the importance of a parameter, ``t_j`` its time, and c the round's fixed time. Of the parameters in use only
a share with the smallest weights may be dropped. These, and all that were dropped before, are candidates, added in descending
order of ``g_j^2 / t_j`` as long as that is at least the Gamma of those already chosen.

Here pruning is structured: j is a unit (neuron, channel, head) and ``g_j^2`` the sum over its parameters, so that the pruned model
is small and dense.

Choices that the paper leaves open, and deviations from it:
- Gradients come from the rounds 0, ``every``, 2 ``every``, ..., in which all clients train the whole model; g is the change of the
  merged model. (In the paper clients send gradients of pruned parameters in these rounds.) The first of them replaces the
  paper's pruning at one chosen client before the start.
- t_j is a unit's share of the training FLOPs, and c the FLOPs of a model with one unit on each axis: equal for all
  devices, since one model is chosen for all.
- Dropped units keep their values, and evaluation of the model includes them: a unit of zeros would never get a gradient again.
- The share that may be dropped is constant; the authors' code halves theirs every 10,000 rounds.
- `rates` bounds each client's part, as in Zhang et al.'s comparison (L-Arb: 0.5): it gets the best of the chosen units within it.
- A client whose memory is too small gets the best units that fit, and in the rounds of the whole model the largest leading
  part.

With ``every=1`` every round is one of the whole model: FedAvg, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from raafl.algorithm import (
    FULL,
    Algorithm,
    AllReported,
    BadInput,
    ClientInfo,
    GlobalState,
    Local,
    Mean,
    MergeMemory,
    Rates,
    RateSelect,
    Sample,
    Select,
    SelectContext,
    Spec,
    Submodels,
    Work,
    positive,
)
from raafl.errors import refuse_unused
from raafl.parts.select.rate_select import unit_scores
from raafl.parts.select.submodels import uncut
from raafl.parts.select.units import Budget, largest_rate


def prune_fl(
    every: int = 50,
    prunable: float = 0.3,
    rates: Rates = 1.0,
    by_samples: bool = True,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
) -> Algorithm:
    """Return PruneFL, whose clients train the units that reduce the loss most per unit of training time.

    Args:
        every: number of rounds between two choices of units; before each choice, clients train the whole model for one
            round.
        prunable: share of the units in use that one choice may drop, in (0, 1).
        rates: largest share of the model's parameters for each client: one number for all; a list, one number for each
            of clients 1, 2, ..., repeating; or a mapping from device name to number.
        by_samples: whether to weight clients by their numbers of samples |D_n|; False = equally.
        cohort: number of clients in a round, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        submodel: rule that chooses submodels in place of pruning, such as `raafl.parts.RateSelect`; leave out every,
            prunable and rates then.
    """
    if submodel is not None:
        refuse_unused(
            "submodel says what each client trains", every=(every, 50), prunable=(prunable, 0.3), rates=(rates, 1.0)
        )
    check_settings(every, prunable)
    return Algorithm(
        name="prune_fl",
        paper="Jiang et al. 2022",
        sample=Sample(cohort, concurrency),
        select=submodel or Pruned(every, rates),
        local=Local(),
        trigger=AllReported(),
        merge=ChosenMean(by_samples=by_samples, every=every, prunable=prunable),
    )


# Choose one submodel for all clients, of the units with the best ratio of importance to time (PruneFL, Jiang et al. 2022).
#
# Every ``every`` rounds the clients train the whole model, and the units of the following rounds are chosen from its change.
# ``GlobalState.memory["pruned"]`` stores the choice: the version at which it was made, and the units, best first.

Unit = tuple[str, int]
"""Name of the axis, and index of the unit on it."""

# batch size of predicted costs: FLOPs per sample do not depend on it, and batch norm needs more than one sample
_BATCH = 2


def check_settings(every: int, prunable: float) -> None:
    """Check the settings of PruneFL.

    Args:
        every: number of rounds between two choices of units.
        prunable: share of the units that one choice may drop.

    Raises:
        BadInput: ``every`` is below 1, or ``prunable`` is not in (0, 1).
    """
    positive("every", every)
    if not 0 < prunable < 1:
        raise BadInput(f"prunable is {prunable}: give a number above 0 and below 1")


@dataclass
class Choice(MergeMemory):
    """The latest choice of the units that all clients train.

    Attributes:
        version: version of the model at the time of the choice.
        order: chosen units, from the best to the worst.
    """

    key = "pruned"
    version: int
    order: list[Unit]


@dataclass(frozen=True)
class ChosenMean(Mean):
    """Weighted mean that chooses new units after each round in which clients trained the whole model.

    Attributes:
        every: number of rounds between two choices.
        prunable: share of a layer's units in use that one choice may drop; those with the smallest weights come first.
    """

    merges_means: ClassVar[bool] = False

    every: int = 50
    prunable: float = 0.3

    def apply(self, state: GlobalState) -> None:
        """Merge the updates; after a round of the whole model, also choose the units of the following rounds."""
        if state.version % self.every:
            super().apply(state)
            return
        names = [name for name in state.submodels.parameter_names if name in state.values]
        before = {name: state.values[name].clone() for name in names}
        super().apply(state)
        # float32: squares of small half-precision changes would round to 0
        squares = {name: (state.values[name] - old).float().square() for name, old in before.items()}
        values = {name: state.values[name] for name in names}
        last = state.memory.find(Choice)
        order = None if last is None else last.order
        chosen = choose(state.submodels, values, squares, self.prunable, order)
        state.memory.put(Choice(state.version, chosen))


def unit_times(submodels: Submodels) -> tuple[dict[str, float], float]:
    """Compute the FLOPs per sample of one unit (such as a neuron) in each layer, by layer, and of the smallest model.

    The smallest model has one unit in each layer.
    """

    def flops(kept: Mapping[str, range]) -> float:
        return submodels.cost(Spec.select(kept), _BATCH).flops_per_sample

    wide = {name: axis for name, axis in submodels.axes.items() if axis.size > 1}
    whole = flops({})
    times = {name: (whole - flops({name: range(1)})) / (axis.size - 1) for name, axis in wide.items()}
    return times, flops({name: range(1) for name in wide})


def choose(
    submodels: Submodels,
    values: Mapping[str, Tensor],
    squares: Mapping[str, Tensor],
    prunable: float,
    used: list[Unit] | None = None,
) -> list[Unit]:
    """Choose the units (such as neurons) of the next model: the best unit of each layer, and all others worth their cost.

    A unit's worth is its squared gradient divided by its training time in FLOPs. Units are returned best first.

    Args:
        submodels: submodels of the model.
        values: parameters by name; units with the smallest values may be dropped.
        squares: squared gradient of each parameter, up to a constant factor.
        prunable: share of each layer's present units that may be dropped.
        used: units of the present model; None = all.
    """
    times, fixed_time = unit_times(submodels)
    in_use = None if used is None else set(used)
    gains: dict[Unit, float] = {}
    stay: set[Unit] = set()
    for name in times:
        axis = submodels.axes[name]
        gains |= {(name, i): gain for i, gain in enumerate(unit_scores(axis, squares, squared=False).tolist())}
        sizes = unit_scores(axis, values).tolist()
        by_size = sorted(
            (i for i in range(axis.size) if in_use is None or (name, i) in in_use), key=lambda i: (sizes[i], i)
        )
        stay |= {(name, i) for i in by_size[int(prunable * len(by_size) + 1e-9) :]}

    def worth(unit: Unit) -> float:
        return gains[unit] / times[unit[0]]

    on_axes = {member.name for axis in submodels.axes.values() for member in axis.members}
    gain = sum(float(square.sum()) for name, square in squares.items() if name not in on_axes)
    gain += sum(gains[unit] for unit in stay)
    time = fixed_time + sum(times[name] for name, _ in stay)
    # a stable sort breaks ties by position, so that every machine chooses the same units
    order = sorted(gains, key=worth, reverse=True)
    for unit in order:
        if unit not in stay:
            if worth(unit) < gain / time:
                break
            stay.add(unit)
            gain, time = gain + gains[unit], time + times[unit[0]]
    ranked = [unit for unit in order if unit in stay]
    best = [next(unit for unit in ranked if unit[0] == name) for name in times]
    return best + [unit for unit in ranked if unit not in best]


@dataclass(frozen=True)
class Pruned(Select):
    """Rule that gives each client the best units, in the order that `ChosenMean` stores, as many as its memory and rate allow.

    Attributes:
        every: number of rounds between two choices. In the round before a choice, clients train the whole model; a
            client with too little memory trains the first units of each layer, as many as fit.
        rates: largest share of the model's parameters for each client in all other rounds.
    """

    every: int = 50
    rates: Rates = 1.0

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Assign the whole model in rounds that choose units, else those units; raise `BadInput` if nothing fits the memory."""
        chosen = fleet.state.memory.find(Choice)
        if chosen is None or fleet.state.version % self.every == 0:
            return RateSelect()(client, fleet)
        cached = fleet.cache.get(("pruned", client.id))
        if cached is None or cached[0] != chosen.version:
            cached = (chosen.version, self._spec(client, fleet, chosen.order))
            fleet.cache["pruned", client.id] = cached
        return Work(cached[1], region=client.id)

    def _spec(self, client: ClientInfo, fleet: SelectContext, order: list[Unit]) -> Spec:
        submodels, num_axes = fleet.state.submodels, len({name for name, _ in order})
        if not order:
            return FULL
        params = self._limit().rate(client) * fleet.cost(FULL).params
        budget = Budget(client.profile.memory_bytes, params=params)

        def best(number: float) -> Spec:
            kept: dict[str, list[int]] = {}
            for name, i in order[: int(number)]:
                kept.setdefault(name, []).append(i)
            whole = [name for name, units in kept.items() if len(units) == submodels.axes[name].size]
            return Spec.select({name: sorted(units) for name, units in kept.items() if name not in whole})

        number = largest_rate(
            best,
            fleet.cost,
            budget,
            rates=range(num_axes, len(order) + 1),
            who=f"client {client.id}",
        )
        return best(number)

    def _limit(self) -> RateSelect:
        return RateSelect(rates=self.rates, rate_of="parameters")

    def __post_init__(self) -> None:
        self._limit()

    def check(self, fleet: SelectContext) -> list[str]:
        """Return an error message for each client that has no rate, or too little memory for any submodel."""
        return self._limit().check(replace(fleet, cache={}))

    def notes(self, fleet: SelectContext) -> list[str]:
        """Return a warning if the model has no units that could be dropped."""
        return uncut(fleet.state.submodels, "prune")

    def forget(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Delete the cached submodels of a client that was lost, or whose memory has changed."""
        if fleet.rules.follows_memory:
            RateSelect().forget(client, fleet)  # size in rounds of the whole model
        fleet.cache.pop(("pruned", client.id), None)

    def __str__(self) -> str:
        words = f"units by squared gradient per time, chosen every {self.every} rounds"
        return words if self.rates == 1.0 else f"{words}, at most {str(self._limit()).partition('at most ')[2]}"
