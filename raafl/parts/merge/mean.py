"""Average updates: the coverage-aware mean of FedAvg and FedAsync, and FedBuff's deltas.

Memory: `Mean` and `Deltas` add each update as it arrives, so that its buffer is free at once. They keep one accumulator of the
model's size, plus one count of the same size if submodels of one merge differ (two if updates also have different mixing
factors). Later merges reuse the storage, since allocating costs more than filling.

Shapes: everything is elementwise on flat buffers, one for each dtype; a sum or count has the layout of the whole model, an update
that of its submodel, and a `CopyPlan` maps between the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from raafl.core.algorithm import Merge
from raafl.core.state import GlobalState, MergeMemory
from raafl.core.types import Update
from raafl.errors import BadInput, fraction, one_of
from raafl.submodel import FlatTensors, Spec
from raafl.submodel.flat import chunks

Kind = Literal["constant", "polynomial", "hinge"]
"""Form of the factor by which a stale update counts less; see `Staleness`."""


@dataclass(frozen=True, slots=True)
class Staleness:
    """Function s(x) by which an update that is x merges late counts less.

    The forms are those of FedAsync: constant 1; polynomial (x+1)^-a; hinge 1 if x <= b, else 1/(a(x-b)+1).

    Attributes:
        kind: form of the function: constant, polynomial or hinge.
        a: exponent of the polynomial, or slope of the hinge.
        b: largest staleness that the hinge does not discount.
    """

    kind: Kind = "constant"
    a: float = 0.5
    b: float = 4.0

    def __post_init__(self) -> None:
        one_of("staleness", self.kind, Kind)
        if self.a < 0 or self.b < 0:
            raise BadInput(f"staleness_a is {self.a}, staleness_b is {self.b}: give numbers of 0 or more")
        if self.a != 0.5 and self.kind == "constant":
            raise BadInput(
                f"staleness_a is {self.a}, but staleness is constant: leave it out, or use polynomial or hinge"
            )
        if self.b != 4.0 and self.kind != "hinge":
            raise BadInput(f"staleness_b is {self.b}, but staleness is {self.kind}: leave it out, or use hinge")

    def __call__(self, staleness: float) -> float:
        """Return the factor of an update that is merged ``staleness`` merges after it was assigned; 1 for a fresh one."""
        if self.kind == "constant":
            return 1.0
        if self.kind == "polynomial":
            return float((staleness + 1.0) ** -self.a)
        return 1.0 if staleness <= self.b else 1.0 / (self.a * (staleness - self.b) + 1.0)

    def __str__(self) -> str:
        words = {"constant": "", "polynomial": f"(s+1)^-{self.a:g}", "hinge": f"hinge({self.a:g}, {self.b:g})"}
        return words[self.kind]


MOST_UNDONE = 9.0
"""Mean staleness times mixing weight above which a run is reported not to learn: 90 % of the clients' work is undone."""


def zeros_like(values: FlatTensors) -> FlatTensors:
    """Return flat tensors of zeros with the same layout and device."""
    return FlatTensors.zeros(values.layout, values.device)


@dataclass
class SumMemory(MergeMemory):
    """Running sum of a merge's updates."""

    updates: list[tuple[Spec, float]] = field(default_factory=list)  # submodel and weight of each update in ``sum``
    sum: FlatTensors | None = None  # weighted sum of the updates, of the model's size; None = there is none yet


class Accumulator:
    """Running sums for a mean: the weighted sum of updates, and the total weight of each element.

    `state`: the global model, which lends storage for the sums.
    `memory`: record that holds the sum and the list of updates.
    `updates`: submodel and weight of each update in the sum.
    """

    def __init__(self, state: GlobalState, memory: SumMemory) -> None:
        self.state, self.memory, self.updates = state, memory, memory.updates

    def add(self, tensors: FlatTensors, spec: Spec, weight: float, factor: float = 1.0) -> None:
        """Add the values of an update to the sum, times ``weight * factor``.

        Complex values must be given as pairs of real ones (`raafl.parts.merge.wide`). If the first update covers the
        whole model, it overwrites the storage instead of being added to zeros, which saves time.
        """
        plan, scale = self.state.submodels.plan(spec), weight * factor
        if not self.updates and spec.is_full:
            self.memory.sum = self._storage("sum", zero=False)
            plan.apply_(self.total, tensors, lambda target, source: torch.mul(source, scale, out=target))
        else:
            if not self.updates:
                self.memory.sum = self._storage("sum")
            plan.add_(self.total, tensors, scale)
        self.updates.append((spec, weight))

    def add_shares(
        self, tensors: FlatTensors, spec: Spec, shares: Sequence[tuple[Spec, float]], factor: float = 1.0
    ) -> None:
        """Add an update that is the mean of others, times ``factor``: on each element it weighs as much as those that cover it.

        `shares`: submodel and weight of the others, as returned by `shares_of`.
        """
        if len(shares) == 1 and shares[0][0] == spec:
            self.add(tensors, spec, shares[0][1], factor)
            return
        submodels, count = self.state.submodels, zeros_like(self.state.values)
        for share, weight in shares:
            submodels.plan(share).cover_(count, weight)
        weighted = submodels.plan(spec).gather(count)
        for dtype, buffer in weighted.buffers.items():
            buffer.mul_(tensors.buffers[dtype])
        if not self.updates:
            self.memory.sum = self._storage("sum")
        submodels.plan(spec).add_(self.total, weighted, factor)
        self.updates.extend(shares)

    def _storage(self, name: str, *, zero: bool = True) -> FlatTensors:
        """Return tensors of the model's size, an earlier merge's or new ones; if ``zero`` is true, trained elements are 0."""
        flat: FlatTensors | None = self.state.scratch.pop(name, None)
        if flat is None:
            return zeros_like(self.state.values)
        if zero:
            for buffer in flat.prefix(self.state.submodels.layout(part="trained")).buffers.values():
                buffer.zero_()
        return flat

    @property
    def total(self) -> FlatTensors:
        """The weighted sum of the updates' values."""
        assert self.memory.sum is not None
        return self.memory.sum

    @property
    def common(self) -> Spec | None:
        """The submodel of all updates, if they share one, so that all of its elements have the same weight; else None."""
        first = self.updates[0][0]
        return first if all(spec == first for spec, _ in self.updates) else None

    @property
    def weight(self) -> float:
        """The sum of the updates' weights."""
        return math.fsum(weight for _, weight in self.updates)

    def cover(self, factors: Sequence[float] | None = None, name: str = "count") -> FlatTensors:
        """Return the total weight of each element: the sum of weight times factor over the updates that trained it.

        `factors`: factor of each update, in their order; None = 1 for all.
        """
        by_spec: dict[Spec, float] = {}
        for (spec, weight), factor in zip(self.updates, factors or [1.0] * len(self.updates), strict=True):
            by_spec[spec] = by_spec.get(spec, 0.0) + weight * factor
        count = self.state.scratch[name] = self._storage(name)
        for spec, weight in by_spec.items():
            self.state.submodels.plan(spec).cover_(count, weight)
        return count

    def clear(self) -> None:
        """Remove all updates; the storage of the sum is reused."""
        self.updates.clear()
        self.state.scratch["sum"], self.memory.sum = self.total, None


def shares_of(update: Update, spec: Spec, weigh: Callable[[Update], float]) -> list[tuple[Spec, float]]:
    """Return submodel and weight of each client's update that ``update`` consists of: itself, unless it is a subfederation's.

    `spec`: submodel of the update. `weigh`: returns the weight of an update.
    """
    if not update.contributions:
        return [(spec, weigh(update))]
    parts = [
        replace(update, num_samples=one.num_samples, num_steps=one.num_steps, contributions=(one,))
        for one in update.contributions
    ]
    return [(one.spec, weigh(part)) for one, part in zip(update.contributions, parts, strict=True)]


def trained_values(state: GlobalState) -> FlatTensors:
    """Return the global values that updates can change, without frozen parameters."""
    return state.values.prefix(state.submodels.layout(part="trained"))


def trained_pieces(state: GlobalState, *others: FlatTensors) -> Iterator[tuple[bool, list[Tensor]]]:
    """Yield the global values that updates can change, with matching pieces of ``others``, as flat views.

    For each dtype these are at most two pieces: first the parameters (True), then the running statistics (False).
    """
    trained, parameters = trained_values(state), state.submodels.parameter_names
    for dtype, theta in trained.buffers.items():
        statistics = (e.offset for e in trained.layout.entries if e.dtype == dtype and e.name not in parameters)
        start = min(statistics, default=len(theta))  # a layout has parameters first
        for is_parameter, part in ((True, slice(start)), (False, slice(start, len(theta)))):
            if len(theta[part]):
                yield is_parameter, [flat[part] for flat in (theta, *(other.buffers[dtype] for other in others))]


@dataclass
class _MeanMemory(SumMemory):
    """Sum of the updates that `Mean` has received since the last merge."""

    key = "mean"
    factors: list[float] = field(default_factory=list)  # staleness factor of each update in ``sum``
    # a single update (tensors, submodel, weight, factor) that `Mean.detach` will add to the sum; None = all are in it
    lone: tuple[FlatTensors, Spec, float, float] | None = None

    @classmethod
    def from_plain(cls, data: Any) -> Self:
        """Restore the sum; earlier versions of raafl stored each update's weight together with its factor."""
        received = data.get("received")
        return super().from_plain(data if received is None else {**data, "factors": [factor for _, factor in received]})


@dataclass(frozen=True)
class Mean(Merge):
    """Merge that mixes, for each element, the weighted mean of the updates that train it into the global model.

    A single update gives ``theta <- (1 - a) theta + a theta_new`` with ``a = alpha * s(t - tau)``, as in FedAsync and
    Fed-RAA (Xie et al. 2019, eq. 5; Fed-RAA, Algorithm 1). Several updates with weights ``w_n``, such as numbers of
    samples, give ``theta <- theta + sum_n w_n a_n (theta_n - theta) / sum_n w_n`` over the updates n that trained the
    element. With alpha 1 and no staleness this is FedAvg's weighted mean. Elements that no update trained, or only
    updates of weight 0, stay unchanged to the bit.

    Attributes:
        alpha: weight of the updates in the mix, in (0, 1].
        staleness: function s by which late updates count less.
        by_samples: whether clients are weighted by |D_n|; False = equally.
        sends: content of an update: trained values, or their change ("delta").
    """

    alpha: float = 1.0
    staleness: Staleness = field(default_factory=Staleness)
    by_samples: bool = True
    sends: Literal["values", "delta"] = "values"
    merges_means: ClassVar[bool] = True

    def __post_init__(self) -> None:
        fraction("alpha", self.alpha)

    def weigh(self, update: Update, staleness: int) -> tuple[float, float]:
        """Return an update's weight in the mean, and the factor on its change: alpha times the staleness factor s, at most 1."""
        weight = float(update.num_samples) if self.by_samples else update.num_updates
        return weight, self.alpha * self.staleness(staleness)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Add an update to the mean; the first one is not copied yet, since `apply` can mix a single one in directly."""
        memory, (weight, factor) = state.memory.of(_MeanMemory), self.weigh(update, staleness)
        is_one = [one.spec for one in update.contributions] in ([], [spec])
        if is_one and memory.lone is None and not memory.updates:
            memory.lone = (update.tensors, spec, weight, factor)
            return
        self.detach(state)
        shares = [(spec, weight)] if is_one else shares_of(update, spec, lambda one: self.weigh(one, staleness)[0])
        memory.factors += [factor] * len(shares)
        Accumulator(state, memory).add_shares(update.tensors, spec, shares, factor)

    def detach(self, state: GlobalState) -> None:
        """Add the waiting update to the sum if there is just one, before its tensors are overwritten."""
        memory = state.memory.of(_MeanMemory)
        if memory.lone is not None:
            tensors, spec, weight, factor = memory.lone
            memory.lone, memory.factors = None, [factor]
            Accumulator(state, memory).add(tensors, spec, weight, factor)

    def apply(self, state: GlobalState) -> None:
        """Mix all received updates into the model."""
        memory = state.memory.of(_MeanMemory)
        if memory.lone is None:
            factors, memory.factors = memory.factors, []
            self._apply_sum(state, Accumulator(state, memory), factors)
            return
        (tensors, spec, weight, factor), memory.lone = memory.lone, None
        plan = state.submodels.plan(spec)
        if weight and factor == 1.0:
            plan.scatter_(state.values, tensors)
        elif weight:
            plan.lerp_(state.values, tensors, factor)

    def _apply_sum(self, state: GlobalState, sums: Accumulator, factors: list[float]) -> None:
        spec = sums.common
        if spec is None:
            self._apply_covered(state, sums, factors)
        elif sums.weight:  # all updates cover the same elements, so one number is the weight of each element
            mixed = math.fsum(weight * factor for (_, weight), factor in zip(sums.updates, factors, strict=True))
            plan, weight = state.submodels.plan(spec), sums.weight
            # theta + sum w a (theta_n - theta) / W = theta (1 - sum w a / W) + (sum w a theta_n) / W, with W = sum w.
            # In this order one pass over the model suffices for any number of updates, and if all a are 1 the first
            # term is exactly 0, so that theta's rounding errors do not enter the weighted mean.
            keep = 1.0 - mixed / weight
            total = sums.total.prefix(plan.layout) if spec.is_full else plan.gather(sums.total)
            plan.apply_(state.values, total, lambda target, source: _mix(target, source, keep, 1.0 / weight))
        sums.clear()

    def _apply_covered(self, state: GlobalState, sums: Accumulator, factors: list[float]) -> None:
        # As in _apply_sum, but each element has its own W and sum w a, over the updates that cover it. If all updates
        # have one factor a, sum w a / W is a everywhere, so sum w a need not be computed.
        weights = sums.cover()
        alike = all(factor == factors[0] for factor in factors)
        mixed = weights if alike else sums.cover(factors, "mixed")
        for dtype, theta in trained_values(state).buffers.items():
            flats = (theta, *(other.buffers[dtype][: len(theta)] for other in (sums.total, weights, mixed)))
            for old, total, weight, share in chunks(*flats):
                keep = 1.0 - factors[0] if alike else 1.0 - share / weight
                # a mask takes longer than all of the arithmetic, and most pieces are covered whole; on a GPU the look
                # at the weights would be a wait
                if old.device.type == "cpu" and weight.min() > 0:
                    old.mul_(keep).addcdiv_(total, weight)
                    continue
                # 0 / 0 = NaN where no update covers an element, which the next line leaves out
                new = (old * keep).addcdiv_(total, weight)
                torch.where(weight > 0, new, old, out=old)

    def too_stale(self, staleness: float) -> str | None:
        """Return a warning if late updates undo most of the clients' work; docs/methods/fed-raa.md derives the rule.

        An update that is s merges late and mixed in with weight a undoes a share a of what these s merges changed. Of a
        client's progress Delta the model keeps ``a Delta / (1 + a s)``. For large s this is about ``Delta / s``,
        whatever a is, so the model consists of little more than the last few clients' models.

        Args:
            staleness: mean number of merges by which updates are late.
        """
        share = self.alpha * self.staleness(staleness)
        if share * staleness <= MOST_UNDONE:
            return None
        return (
            f"will hardly learn: updates come {staleness:.3g} merges late on average and are mixed in with {share:.2g}, so "
            f"{share * staleness / (1 + share * staleness):.0%} of what clients do is taken back: give a smaller alpha, staleness "
            "polynomial with a larger staleness_a (1 suits any number of clients), or a lower concurrency"
        )

    def __str__(self) -> str:
        weight = "weighted by samples" if self.by_samples else "unweighted"
        if self.alpha == 1.0 and self.staleness.kind == "constant":
            return f"coverage mean, {weight}"
        stale = str(self.staleness)
        return f"mix with alpha {self.alpha:g}" + (f" x {stale}" if stale else "")


def _mix(target: Tensor, source: Tensor, keep: float, scale: float) -> None:
    """Compute ``target = keep * target + scale * source`` in place."""
    if keep == 0.0:
        torch.mul(source, scale, out=target)
    elif target.is_contiguous():
        for old, new in chunks(target, source.contiguous()):
            old.mul_(keep).add_(new, alpha=scale)
    else:
        target.mul_(keep).add_(source, alpha=scale)
