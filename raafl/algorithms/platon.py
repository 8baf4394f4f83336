"""PLATON (Zhang et al., "PLATON: Pruning Large Transformer Models with Upper Confidence Bound of Weight Importance", ICML 2022).

Co-S2P compares with PLATON trained on each client, under FedAvg (``trigger="all"``) or FedAsync (``trigger="each"``). At each step

    I = |theta * grad|                                            sensitivity of a weight,
    Ibar <- beta1 Ibar + (1 - beta1) I                            its importance, smoothed,
    U = |I - Ibar|,   Ubar <- beta2 Ubar + (1 - beta2) U          its uncertainty, smoothed,
    S = Ibar Ubar                                                 upper confidence bound,

and the share r(t) of the weights with the highest S is kept. The share falls cubically from r(0) to r(T):
``r(t) = r(T) + (r(0) - r(T)) (1 - (t - t_i) / (T - t_f - t_i))^3`` between the warm-up t_i and the last t_f steps.

Here pruning is structured, as in Co-S2P's comparison: I of a unit (neuron, channel, head) is the sum over its parameters, and
pruned units are absent from the client's model, which is small and dense.

Choices that the paper leaves open, and deviations from it:
- Every axis keeps the same share, so that a budget holds; the paper has one threshold for all weights.
- The scores of a unit continue from task to task: a client sends them with its update, the server stores them and sends
  them back with the client's next task (two numbers for each of at most `groups` groups of units of an axis). They come from the
  client's own data only.
- In the paper pruned weights are 0, and so is their sensitivity; here other clients train them, and their score stays as it was
  last measured. Scores of kept units fall with their gradients, so that a pruned unit can return. A unit that was never
  measured (on a client without memory for the whole model) is tried first.
- t is the number of a client's tasks: its share is constant within one. r(0) is the largest share that fits its memory,
  r(T) its rate. Smoothing takes the place of the paper's averaging over the steps between two prunings.
- The default rates are HeteroFL's, 1 to 1/16 of the width.

At rate 1 everywhere it is FedAvg, or FedAsync, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from raafl.algorithm import (
    FULL,
    Algorithm,
    BadInput,
    ClientInfo,
    Cost,
    GlobalState,
    Hook,
    Kind,
    Local,
    Mean,
    Rates,
    RateSelect,
    Sample,
    Select,
    SelectContext,
    Spec,
    Staleness,
    Submodels,
    Task,
    Traits,
    Update,
    Work,
    at_least,
    leading,
    positive,
)
from raafl.algorithms.hetero_fl import LEVELS
from raafl.core.state import OneValue
from raafl.core.types import Warn
from raafl.errors import refuse_unused
from raafl.parts.select.units import Budget, count, largest_rate, spec_of, steps
from raafl.parts.trigger import all_or_each
from raafl.submodel import Axis, Member
from raafl.submodel.flat import reals


def platon(
    rates: Rates | None = None,
    warm_up: int = 1,
    rounds: int = 20,
    beta1: float = 0.85,
    beta2: float = 0.95,
    groups: int = 64,
    trigger: Literal["all", "each"] = "all",
    alpha: float | None = None,
    staleness: Kind = "constant",
    staleness_a: float = 0.5,
    staleness_b: float = 4.0,
    cohort: int | None = None,
    concurrency: int | None = None,
) -> Algorithm:
    """Return PLATON, whose clients prune the units of low score; the server merges as in FedAvg or FedAsync.

    The score of a unit, such as a neuron, is its importance times its uncertainty.

    Args:
        rates: final share of each layer's units for a client (r(T)): one number for all; a list, one number for each of
            clients 1, 2, ..., repeating; or a mapping from device name to number. None = the list 1, 1/2, 1/4, 1/8,
            1/16.
        warm_up: number of a client's first tasks in which nothing is pruned (t_i).
        rounds: number of a client's tasks over which its share falls to the final one.
        beta1: smoothing factor of the importance, in [0, 1).
        beta2: smoothing factor of the uncertainty, in [0, 1).
        groups: largest number of scores for a layer; neighbouring units of a wider layer share a score.
        trigger: time of a merge: all (when the whole round has reported, FedAvg) or each (at each arrival, FedAsync).
        alpha: weight of an arriving model for trigger each, in (0, 1]; None = 0.75.
        staleness: form of the function s(.) by which late updates count less, for trigger each: constant, polynomial or hinge.
        staleness_a: parameter a of the polynomial and hinge functions.
        staleness_b: parameter b of the hinge function.
        cohort: number of clients in a round, or at work in an asynchronous run, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
    """
    when = all_or_each(trigger)
    if trigger == "all":
        refuse_unused("trigger all waits for everyone", alpha=(alpha, None), staleness=(staleness, "constant"))
        merge = ScoredMean(groups=groups)
    else:
        mixed = 0.75 if alpha is None else alpha
        merge = ScoredMean(mixed, Staleness(staleness, staleness_a, staleness_b), by_samples=False, groups=groups)
    return Algorithm(
        name="platon",
        paper="Zhang et al. 2022, PLATON",
        sample=Sample(cohort, concurrency),
        select=BestUnits(list(LEVELS) if rates is None else rates, warm_up, rounds, groups),
        local=Sensitivity(beta1, beta2, groups),
        trigger=when,
        merge=merge,
    )


# Score units as PLATON does: clients measure scores, the server stores them by client and assigns each its best units.
#
# For each group of units of each axis a client measures two numbers, smoothed importance and smoothed uncertainty. It sends them
# in `Update.extra` as ``{"importance": {axis: [...]}, "uncertainty": {axis: [...]}}``, in order, one number for each group of
# which it has a unit. ``GlobalState.memory["platon"]`` stores them, and `Work.extra` carries them back in the same form.

KINDS = ("importance", "uncertainty")

Scores = dict[str, dict[str, list[float | None]]]
"""Kind -> axis -> one score for each group; None = never measured."""


@dataclass
class PlatonMemory(OneValue[dict[int, Scores]]):
    """Server state of PLATON: the importance and uncertainty that each client has measured for its units, by client."""

    key = "platon"
    value: dict[int, Scores] = field(default_factory=dict)


_MOST = 1e150  # largest accepted score: the product of two scores must stay finite in float64
_BYTES = 12  # bytes of a six-digit number and a comma in JSON


def cubic(t: int, initial: float, final: float, warm_up: int, rounds: int) -> float:
    """Return the share r(t) of units in use: constant during the warm-up, then falling along a cubic curve.

    Args:
        t: number of the client's tasks so far.
        initial: share of units during the warm-up, r(0).
        final: share of units at the end, r(T).
        warm_up: number of tasks before the share begins to fall.
        rounds: number of tasks over which the share falls.
    """
    if t < warm_up:
        return initial
    left = max(1.0 - (t - warm_up) / rounds, 0.0)
    return final + (initial - final) * left**3


def group_of(axis: Axis, groups: int) -> list[int]:
    """Divide the units of a layer into groups of neighbours; return each unit's group number.

    Args:
        axis: axis (dimension whose units can be pruned, such as hidden neurons) to divide.
        groups: largest number of groups, all of nearly equal size; with fewer units, each is a group of its own.
    """
    number = min(axis.size, groups)
    return [unit * number // axis.size for unit in range(axis.size)]


def _kept_groups(axis: Axis, spec: Spec, groups: int) -> list[int]:
    """List the group to which each kept unit of ``axis`` belongs, by group index, in the order of the units."""
    units = spec.indices(axis.name)
    groups_of_units = group_of(axis, groups)
    return groups_of_units if units is None else [groups_of_units[unit] for unit in units]


def _prunable(submodels: Submodels) -> Iterator[Axis]:
    return (axis for axis in submodels.axes.values() if axis.size > 1)


# ---- measure scores, on the client ----


@dataclass(frozen=True)
class Sensitivity(Local):
    """Ordinary local training that also measures how sensitive the loss is to each unit.

    In each step a unit, such as a neuron, has the sensitivity ``I = sum_j |theta_j g_j|`` over all its parameters theta_j
    with gradients g_j. Its importance Ibar and uncertainty Ubar are running means: ``Ibar <- beta1 Ibar + (1 - beta1)
    I``, ``Ubar <- beta2 Ubar + (1 - beta2) |I - Ibar|``.

    Attributes:
        beta1: smoothing factor of the importance, in [0, 1).
        beta2: smoothing factor of the uncertainty, in [0, 1).
        groups: largest number of scores for a layer; neighbouring units of a wider layer share a score.
    """

    beta1: float = 0.85
    beta2: float = 0.95
    groups: int = 64

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise BadInput(f"{name} is {getattr(self, name)}: give a number from 0 to below 1")
        positive("groups", self.groups)

    @property
    def traits(self) -> Traits:
        """What this training can do, needs, and leaves out."""
        return replace(super().traits, uses_gradients=True)

    def hook(self, task: Task) -> Hook:
        """Return the hook that measures the scores of units."""
        return MeasuredSensitivity(task, self)

    def estimate(self, submodels: Submodels, spec: Spec, batch_size: int, extra: Mapping[str, Any]) -> Cost:
        """Return the cost of training and of the measurement, which adds a product and a sum per parameter and step."""
        plain, spec = submodels.cost(spec, batch_size), submodels.normal(spec)
        layout, batch_size = submodels.layout(spec, "trained").by_name, max(batch_size, 1)
        names = {member.name for axis in _prunable(submodels) for member in axis.members} & submodels.parameter_names
        sizes = [(layout[name].numel, layout[name].dtype.itemsize) for name in names if name in layout]
        num_units = [len(spec.indices(axis.name) or range(axis.size)) for axis in _prunable(submodels)]
        score_bytes = 2 * _BYTES * sum(min(number, self.groups) for number in num_units)
        return replace(
            plain,
            flops_per_sample=plain.flops_per_sample + 2 * sum(numel for numel, _ in sizes) / batch_size,
            peak_bytes=plain.peak_bytes + max((numel * size for numel, size in sizes), default=0) + 8 * sum(num_units),
            down_bytes=plain.down_bytes + score_bytes,
            up_bytes=plain.up_bytes + score_bytes,
            moved_bytes_per_sample=plain.moved_bytes_per_sample
            + 4 * sum(numel * size for numel, size in sizes) / batch_size,
        )

    def cost_depends_on(self, extra: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return nothing: scores differ from task to task, but cost the same."""
        return {}

    def notes(self, submodels: Submodels) -> list[str]:
        """Return a message for the user: how many layers score their units in groups, or a warning if nothing can be pruned."""
        if not any(_prunable(submodels)):
            return [Warn(f"platon prunes nothing here, so it is plain averaging: {submodels.why_whole()}")]
        coarse = [axis for axis in _prunable(submodels) if axis.size > self.groups]
        if not coarse:
            return []
        return [f"platon scores {len(coarse)} axes of more than {self.groups} units by groups of neighbours"]

    def __str__(self) -> str:
        return f"{super().__str__()}, units scored by |theta g| (beta1 {self.beta1:g}, beta2 {self.beta2:g})"


def _members_of(submodels: Submodels, spec: Spec) -> Iterator[tuple[Axis, Member, int]]:
    """Yield (axis, member, kept units) for each tensor dimension on a prunable axis.

    A member's offset is where the axis begins in the submodel's tensor, which lacks the dropped units of the axes
    before it.
    """
    num_kept = {axis.name: len(spec.indices(axis.name) or range(axis.size)) for axis in submodels.axes.values()}
    dropped: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for axis in submodels.axes.values():
        for member in axis.members:
            num_dropped = member.unit * (axis.size - num_kept[axis.name])
            dropped.setdefault((member.name, member.dim), []).append((member.offset, num_dropped))
    for axis in _prunable(submodels):
        for member in axis.members:
            before = sum(
                num_dropped for offset, num_dropped in dropped[member.name, member.dim] if offset < member.offset
            )
            yield axis, replace(member, offset=member.offset - before), num_kept[axis.name]


class MeasuredSensitivity(Hook):
    """Hook that measures importance and uncertainty of each unit at every optimizer step, from unclipped gradients.

    Attributes:
        importance: importance of each unit in the client's submodel, by name of the axis (layer); shape (units,).
        uncertainty: uncertainty of each of these importances, by name of the axis; shape (units,).
    """

    def __init__(self, task: Task, local: Sensitivity) -> None:
        """Load the scores that the server sent with the assignment; they start at 0 if it sent none."""
        super().__init__(task)
        self.local = local
        self.importance: dict[str, Tensor] = {}
        self.uncertainty: dict[str, Tensor] = {}
        spec = task.submodels.normal(task.assignment.spec)
        parameters = dict(task.module.named_parameters())
        # by axis: for each kept unit the position of its group in the client's list of groups
        self._positions: dict[str, list[int]] = {}
        self._members: dict[str, tuple[nn.Parameter, list[tuple[str, Member, int]]]] = {}
        device = next((p.device for p in parameters.values()), torch.device("cpu"))
        for axis in _prunable(task.submodels):
            groups = _kept_groups(axis, spec, local.groups)
            positions = {group: i for i, group in enumerate(dict.fromkeys(groups))}
            self._positions[axis.name] = [positions[group] for group in groups]
            for kind in KINDS:
                received = task.assignment.extra.get(kind, {}).get(axis.name, [0.0] * len(positions))
                start = torch.tensor([received[i] for i in self._positions[axis.name]], device=device)
                getattr(self, kind)[axis.name] = start
        for axis, member, size in _members_of(task.submodels, spec):
            if member.name in parameters:
                _, on_axes = self._members.setdefault(member.name, (parameters[member.name], []))
                on_axes.append((axis.name, member, size))

    def update(self) -> None:
        """Measure the scores, then make the optimizer's step."""
        self._measure()
        super().update()

    @torch.no_grad()
    def _measure(self) -> None:
        sensitivities = {name: torch.zeros_like(smoothed) for name, smoothed in self.importance.items()}
        for parameter, members in self._members.values():
            if parameter.grad is None:
                continue
            worth = (reals(parameter) * reals(parameter.grad)).abs_()
            # sum in float32 at least: in half precision, small terms added to a large sum would be lost
            sums = torch.promote_types(worth.dtype, torch.float32)
            for name, member, size in members:
                part = worth.narrow(member.dim, member.offset, member.unit * size)
                sensitivities[name] += (
                    part.movedim(member.dim, 0).reshape(size, -1).sum(1, dtype=sums).to(sensitivities[name].dtype)
                )
        beta1, beta2 = self.local.beta1, self.local.beta2
        for name, measured in sensitivities.items():
            smooth = self.importance[name].mul_(beta1).add_(measured, alpha=1 - beta1)
            self.uncertainty[name].mul_(beta2).add_((measured - smooth).abs_(), alpha=1 - beta2)

    def finish(self) -> dict[str, Any]:
        """Return the mean importance and uncertainty of each group of units, rounded to six digits."""
        return {kind: {name: self._means(name, kind) for name in self._positions} for kind in KINDS if self._positions}

    def _means(self, name: str, kind: str) -> list[float]:
        positions, values = self._positions[name], getattr(self, kind)[name].tolist()
        sums, counts = [0.0] * (positions[-1] + 1), [0] * (positions[-1] + 1)
        for position, value in zip(positions, values, strict=True):
            sums[position] += value
            counts[position] += 1
        return [float(f"{total / number:.6g}") for total, number in zip(sums, counts, strict=True)]


# ---- store scores and choose units, on the server ----


@dataclass(frozen=True)
class ScoredMean(Mean):
    """Weighted mean that also stores the scores that each client has measured, for `BestUnits`.

    Attributes:
        groups: largest number of scores for a layer, as in `Sensitivity`.
    """

    merges_means: ClassVar[bool] = False

    groups: int = 64
    by_client: ClassVar[bool] = True

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Return "bad-scores" unless the update has one finite number, at least 0, for each group of units that the client has."""
        spec = state.submodels.normal(spec)
        wanted = {axis.name: len(set(_kept_groups(axis, spec, self.groups))) for axis in _prunable(state.submodels)}
        if not wanted:
            return None
        for kind in KINDS:
            by_axis = update.extra.get(kind)
            if not isinstance(by_axis, Mapping) or by_axis.keys() != wanted.keys():
                return "bad-scores"
            for name, number in wanted.items():
                numbers = by_axis[name]
                if not isinstance(numbers, list) or len(numbers) != number or not all(map(_is_score, numbers)):
                    return "bad-scores"
        return None

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Add the update to the mean, and store the scores that its client has measured."""
        super().receive(state, update, spec, staleness)
        spec, of_all = state.submodels.normal(spec), state.memory.of(PlatonMemory).value
        own = of_all.setdefault(update.client, {kind: {} for kind in KINDS})
        for kind in KINDS:
            for axis in _prunable(state.submodels):
                scores = own[kind].setdefault(axis.name, [None] * min(axis.size, self.groups))
                touched = dict.fromkeys(_kept_groups(axis, spec, self.groups))
                for group, score in zip(touched, update.extra[kind][axis.name], strict=True):
                    scores[group] = float(score)


def _is_score(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST


@dataclass(frozen=True)
class BestUnits(Select):
    """Rule that keeps the units with the highest scores, and ever fewer of them.

    The score of a unit, such as a neuron, is its importance times its uncertainty, as measured by the client itself. A
    unit without a score ranks highest, so that it is tried first. The share of units kept falls along a cubic curve with
    the number of the client's merged updates.

    Attributes:
        rates: final share r(T) of each layer's units, by client (see `RateSelect.rates`).
        warm_up: number of tasks before pruning starts; until then a client has the largest share that fits its memory.
        rounds: number of tasks over which the share falls to the final one.
        groups: largest number of scores for a layer, as in `Sensitivity`.
    """

    rates: Rates = 1.0
    warm_up: int = 1
    rounds: int = 20
    groups: int = 64

    @property
    def needs_last_update(self) -> bool:
        """Whether the server must have a client's last update before it plans the next task: yes, it needs the new scores."""
        return True

    def __post_init__(self) -> None:
        self._limit()
        at_least("warm_up", self.warm_up, 0)
        positive("rounds", self.rounds)

    def _limit(self) -> RateSelect:
        return RateSelect(rates=self.rates, rate_of="width")

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Assign the submodel of the client's best-scored units; raise `BadInput` if no submodel fits its memory."""
        submodels, t = fleet.state.submodels, fleet.state.counts.get(client.id, 0)
        if not submodels.axes:
            return Work(region=client.id)
        fits = self._fits(client, fleet)
        final = min(self._limit().rate(client), fits)
        share = cubic(t, fits, final, self.warm_up, self.rounds)
        scores = fleet.state.memory.of(PlatonMemory).value.get(client.id)
        best_units: dict[str, list[int] | range] = {}
        for axis in submodels.axes.values():
            best_units[axis.name] = self._best(axis, count(axis.size, share), scores)
        spec = submodels.normal(spec_of(submodels.axes, best_units))
        return Work(spec, region=client.id, extra={} if scores is None else self._sent_scores(submodels, spec, scores))

    def _best(self, axis: Axis, number: int, scores: Scores | None) -> list[int] | range:
        if scores is None or axis.size == 1 or number == axis.size:
            return range(number)
        bounds = [
            math.inf if importance is None or uncertainty is None else importance * uncertainty
            for importance, uncertainty in zip(*(scores[kind][axis.name] for kind in KINDS), strict=True)
        ]
        groups = group_of(axis, self.groups)
        ranked = sorted(range(axis.size), key=lambda unit: (-bounds[groups[unit]], unit))
        return ranked[:number]

    def _sent_scores(self, submodels: Submodels, spec: Spec, scores: Scores) -> dict[str, dict[str, list[float]]]:
        sent: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
        for axis in _prunable(submodels):
            touched = list(dict.fromkeys(_kept_groups(axis, spec, self.groups)))
            for kind in KINDS:
                of_groups = scores[kind][axis.name]
                sent[kind][axis.name] = [of_groups[group] or 0.0 for group in touched]
        return sent

    def _fits(self, client: ClientInfo, fleet: SelectContext) -> float:
        """Find the largest share of all axes whose submodel fits the client's memory; cached by client."""
        if client.id not in fleet.cache:
            axes, budget = fleet.state.submodels.axes, Budget(client.profile.memory_bytes)
            fleet.cache[client.id] = largest_rate(
                lambda rate: leading(axes, rate), fleet.cost, budget, rates=steps(axes), who=f"client {client.id}"
            )
        share: float = fleet.cache[client.id]
        return share

    def check(self, fleet: SelectContext) -> list[str]:
        """Return an error message for each client without an entry in `rates`, or with too little memory for any submodel."""

        def ask(client: ClientInfo) -> None:
            self._limit().rate(client)
            if fleet.state.submodels.axes:
                self._fits(client, fleet)
            else:
                budget = Budget(client.profile.memory_bytes)
                largest_rate(lambda _: FULL, fleet.cost, budget, rates=[1.0], who=f"client {client.id}")

        return fleet.problems(ask)

    def forget(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Delete the cached share of units that fits a lost client's memory, which may change meanwhile; keep its scores."""
        fleet.cache.pop(client.id, None)

    def __str__(self) -> str:
        limit = str(self._limit()).partition("at most ")[2]
        return f"units by upper confidence bound, down to {limit} within {self.warm_up + self.rounds} tasks"
