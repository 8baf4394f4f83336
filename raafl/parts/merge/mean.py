"""Average updates: the coverage-aware mean of FedAvg and FedAsync, FedBuff's deltas, FedOpt's server optimisers.

Memory: `Mean` and `Deltas` add each update as it arrives (its buffer is free at once) and keep one accumulator of the model's
size, plus one count of the same size when submodels of one merge differ (two when, additionally, updates have different mixing
factors). Storage is reused by later merges, since allocating costs more than filling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor

from raafl.core.algorithm import Merge
from raafl.core.state import GlobalState
from raafl.core.types import Update
from raafl.errors import BadInput, fraction, one_of, positive
from raafl.parts.merge.staleness import Staleness
from raafl.submodel import FULL, FlatTensors, Spec

CHUNK = 1 << 16
"""Elements worked on at a time on a CPU, so that what lies between two operations stays in its cache."""

MOST_UNDONE = 9.0
"""Mean staleness times mixing weight above which a run is said not to learn: nine tenths of the work are taken back."""


def zeros_like(values: FlatTensors) -> FlatTensors:
    """Return flat tensors of the same layout and device, all zero."""
    return FlatTensors.zeros(values.layout, values.device)


def chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield matching pieces of tensors of one size, as flat views; on an accelerator one piece, the whole."""
    flat = [tensor.view(-1) for tensor in tensors]
    size = CHUNK if flat[0].device.type == "cpu" else max(flat[0].numel(), 1)
    return zip(*(torch.split(tensor, size) for tensor in flat), strict=True)


class Accumulator:
    """Weighted sum of updates, and the total weight on each element."""

    def __init__(self, state: GlobalState, memory: dict[str, Any]) -> None:
        self.state, self.memory = state, memory
        self.updates: list[tuple[Spec, float]] = memory.setdefault("updates", [])

    def add(self, tensors: FlatTensors, spec: Spec, weight: float, factor: float = 1.0) -> None:
        """Add ``weight * factor * tensors`` at the elements of ``spec``, with ``weight`` on each.

        Integer tensors never travel up, and complex ones arrive as pairs of reals (`raafl.parts.merge.wide`). A first update of
        the whole model overwrites what an earlier merge left in the storage, which saves a pass; anything else is added to zeros.
        """
        plan, scale = self.state.submodels.plan(spec), weight * factor
        if not self.updates and spec.is_full:
            self.memory["sum"] = self._storage("sum", zero=False)
            plan.apply_(self.total, tensors, lambda target, source: torch.mul(source, scale, out=target))
        else:
            if not self.updates:
                self.memory["sum"] = self._storage("sum")
            plan.add_(self.total, tensors, scale)
        self.updates.append((spec, weight))

    def _storage(self, name: str, *, zero: bool = True) -> FlatTensors:
        """Take storage of the model's size out of the scratch; where no update ever lies it is zero in any case."""
        flat: FlatTensors | None = self.state.scratch.pop(name, None)
        if flat is None:
            return zeros_like(self.state.values)
        if zero:
            for buffer in flat.prefix(self.state.submodels.layout(part="trained")).buffers.values():
                buffer.zero_()
        return flat

    @property
    def total(self) -> FlatTensors:
        """The weighted sum."""
        return cast(FlatTensors, self.memory["sum"])

    @property
    def common(self) -> Spec | None:
        """The spec that all updates share; None when they differ. With it, `weight` lies on every element that the spec covers."""
        first = self.updates[0][0]
        return first if all(spec == first for spec, _ in self.updates) else None

    @property
    def weight(self) -> float:
        """The sum of all weights."""
        return math.fsum(weight for _, weight in self.updates)

    def cover(self, factors: Sequence[float] | None = None, name: str = "count") -> FlatTensors:
        """Return the weight on each element times each update's factor, in the scratch storage ``name``."""
        on_spec: dict[Spec, float] = {}
        for (spec, weight), factor in zip(self.updates, factors or [1.0] * len(self.updates), strict=True):
            on_spec[spec] = on_spec.get(spec, 0.0) + weight * factor
        count = self.state.scratch[name] = self._storage(name)
        for spec, weight in on_spec.items():
            self.state.submodels.plan(spec).cover_(count, weight)
        return count

    def clear(self) -> None:
        """Reset; the storage is kept."""
        self.updates.clear()
        self.state.scratch["sum"] = self.memory.pop("sum")


def trained_values(state: GlobalState) -> FlatTensors:
    """Return the part of the global values that updates can change; frozen parameters keep every bit."""
    return state.values.prefix(state.submodels.layout(part="trained"))


@dataclass(frozen=True)
class Mean(Merge):
    """Mix the global model with the weighted mean of the updates that cover each element.

    For one update this is ``theta <- (1 - a) theta + a theta_new`` of FedAsync and Fed-RAA with ``a = alpha * s(t - tau)``
    (Xie et al. 2019, eq. 5; Fed-RAA, Algorithm 1). For several, with weights ``w_n`` = samples:
    ``theta <- theta + sum_n w_n a_n (theta_n - theta) / sum_n w_n`` over the n that cover the element; with alpha 1 and no
    staleness that is FedAvg's weighted mean. Elements that no update covers, or only updates of weight 0, stay unchanged, bit
    for bit.

    Attributes:
        alpha: mixing weight in (0, 1].
        staleness: s.
        by_samples: weigh by |D_n|; False = all clients equally.
    """

    alpha: float = 1.0
    staleness: Staleness = field(default_factory=Staleness)
    by_samples: bool = True
    sends: Literal["values", "delta"] = "values"

    def __post_init__(self) -> None:
        fraction("alpha", self.alpha)

    def weigh(self, update: Update, staleness: int) -> tuple[float, float]:
        """Return an update's weight w_n and its factor a_n."""
        return float(update.num_samples) if self.by_samples else 1.0, self.alpha * self.staleness(staleness)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Accept an update: a single one is mixed in by `apply` from its own tensors, several are summed first."""
        memory = state.memory.setdefault("mean", {})
        weight, factor = self.weigh(update, staleness)
        memory.setdefault("received", []).append((weight, factor))
        if len(memory["received"]) == 1 and memory.get("lone") is None:
            memory["lone"] = (update.tensors, spec)
            return
        self.detach(state)
        Accumulator(state, memory).add(update.tensors, spec, weight, factor)

    def detach(self, state: GlobalState) -> None:
        """Add a single update's values to the sum before its tensors are overwritten."""
        memory = state.memory.get("mean", {})
        if memory.get("lone") is None:
            return
        tensors, spec = memory.pop("lone")
        weight, factor = memory["received"][0]
        Accumulator(state, memory).add(tensors, spec, weight, factor)

    def apply(self, state: GlobalState) -> None:
        """Merge everything received."""
        memory = state.memory["mean"]
        received: list[tuple[float, float]] = memory.pop("received")
        lone = memory.pop("lone", None)
        if lone is not None:
            if not received[0][0]:
                return
            tensors, spec = lone
            plan = state.submodels.plan(spec)
            if received[0][1] == 1.0:
                plan.scatter_(state.values, tensors)
            else:
                plan.lerp_(state.values, tensors, received[0][1])
            return
        self._apply_sum(state, Accumulator(state, memory), received)

    def _apply_sum(self, state: GlobalState, sums: Accumulator, received: list[tuple[float, float]]) -> None:
        spec = sums.common
        if spec is None:
            self._apply_covered(state, sums, [factor for _, factor in received])
        elif sums.weight:  # one part of the model, covered by all: plain numbers do
            mixed = math.fsum(weight * factor for weight, factor in received)
            plan, whole = state.submodels.plan(spec), sums.weight
            # theta + sum w a (theta_n - theta) / W = theta (1 - sum w a / W) + (sum w a theta_n) / W, with W = sum w: one pass
            # over the model whatever the number of updates, and exactly the weighted mean where all a are 1
            keep = 1.0 - mixed / whole
            total = sums.total.prefix(plan.layout) if spec.is_full else plan.gather(sums.total)
            plan.apply_(state.values, total, lambda target, source: _mix(target, source, keep, 1.0 / whole))
        sums.clear()

    def _apply_covered(self, state: GlobalState, sums: Accumulator, factors: list[float]) -> None:
        # the same as above, with W and sum w a of each element: those of the updates that cover it. With one factor
        # for all, sum w a / W is that factor everywhere, and the second count is spared.
        whole = sums.cover()
        alike = all(factor == factors[0] for factor in factors)
        mixed = whole if alike else sums.cover(factors, "mixed")
        for dtype, theta in trained_values(state).buffers.items():
            flats = (theta, *(other.buffers[dtype][: len(theta)] for other in (sums.total, whole, mixed)))
            for old, total, on, share in chunks(*flats):
                keep = 1.0 - factors[0] if alike else 1.0 - share / on
                new = torch.addcdiv(old * keep, total, on)  # NaN, 0 / 0, where nothing covers: not taken below
                old.copy_(torch.where(on > 0, new, old))

    def too_stale(self, staleness: float) -> str | None:
        """Return a warning where hardly any of the clients' work is kept; docs/methods/fed-raa.md derives the rule.

        A fraction a of an update that arrives s merges late undoes a fraction a of what these s merges did. So of its own progress
        Delta the model keeps p = a Delta - a s p, that is a Delta / (1 + a s): about Delta / s for any a, once a s is large, and
        the model is then little more than the last few clients'.
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
    """Set ``target`` to ``keep * target + scale * source``."""
    if keep == 0.0:
        torch.mul(source, scale, out=target)
    elif target.is_contiguous():
        for old, new in chunks(target, source.contiguous()):
            old.mul_(keep).add_(new, alpha=scale)
    else:
        target.mul_(keep).add_(source, alpha=scale)


@dataclass(frozen=True)
class Deltas(Merge):
    """FedBuff: ``theta <- theta + eta_g * (1/K) sum_i s(staleness_i) Delta_i`` (Nguyen et al. 2022, Algorithm 1).

    Delta_i is the client's trained values minus the values *it* received, so it refers to the version that client started from,
    whatever was merged since. K is the number of deltas that cover an element; for whole models, the buffer's size (a remainder at
    the end of the run is divided by its own size). Floating-point buffers (running statistics) take the mean without eta_g.

    Attributes:
        server_lr: eta_g.
        staleness: s, by default 1/sqrt(1 + staleness).
    """

    server_lr: float = 1.0
    staleness: Staleness = field(default_factory=lambda: Staleness("polynomial", a=0.5))
    sends: Literal["values", "delta"] = "delta"

    def __post_init__(self) -> None:
        positive("server_lr", self.server_lr)

    def weigh(self, update: Update, staleness: int) -> tuple[float, float]:
        """Return an update's weight, 1, and its factor ``eta_g s``."""
        return 1.0, self.server_lr * self.staleness(staleness)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Add the scaled delta to the buffer's sum."""
        memory = state.memory.setdefault("deltas", {})
        Accumulator(state, memory).add(update.tensors, spec, 1.0, self.staleness(staleness))

    def apply(self, state: GlobalState) -> None:
        """Take one server step with the buffer's mean."""
        sums = Accumulator(state, state.memory["deltas"])
        if sums.common is not None:  # what it does not cover is zero in the sum
            for _, rate, theta, mine in self._pieces(state, sums.total):
                theta.add_(mine, alpha=rate / sums.weight)
        else:
            for dtype, rate, *flats in self._pieces(state, sums.total, sums.cover()):
                for old, mine, on in chunks(*flats):
                    # where nothing covers, 0 is divided by the smallest number: theta + 0 keeps its bits
                    old.addcdiv_(mine, on.clamp_min(torch.finfo(dtype).tiny), value=rate)
        sums.clear()

    def _pieces(self, state: GlobalState, *others: FlatTensors) -> Iterator[tuple[Any, ...]]:
        """Yield dtype, rate and matching pieces of values and ``others``: each buffer, cut where the rates differ."""
        for dtype, theta in trained_values(state).buffers.items():
            flats = (theta, *(other.buffers[dtype][: len(theta)] for other in others))
            start = len(theta)
            if self.server_lr != 1.0:
                buffers = (e for e in state.values.layout.entries if e.name not in state.submodels.parameter_names)
                start = min((e.offset for e in buffers if e.dtype == dtype), default=start)
            yield dtype, self.server_lr, *(flat[:start] for flat in flats)
            if start < len(theta):  # parameters that lie behind are frozen
                yield dtype, 1.0, *(flat[start:] for flat in flats)

    def __str__(self) -> str:
        stale = str(self.staleness)
        return f"mean of deltas{' x ' + stale if stale else ''}, server lr {self.server_lr:g}"


ServerKind = Literal["adam", "yogi", "adagrad"]


@dataclass(frozen=True)
class ServerOptimizer(Merge):
    """FedOpt: an adaptive server step with the mean delta as its pseudo-gradient (Reddi et al. 2021, Algorithm 2).

    ``m <- beta1 m + (1 - beta1) Delta``; ``v`` by kind: adagrad ``v + Delta^2``, yogi
    ``v - (1 - beta2) Delta^2 sign(v - Delta^2)``, adam ``beta2 v + (1 - beta2) Delta^2``;
    ``theta <- theta + eta m / (sqrt(v) + tau)``. v starts at tau^2, m at 0; no bias correction, as in the paper.
    Floating-point buffers (running statistics) take the plain mean. Elements that no update covers, or only those that
    weigh nothing, keep theta, m and v.
    Delta is ``sum_n w_n s(staleness_n) Delta_n / sum_n w_n`` over the n that cover the element, each against the version that
    client started from.

    Attributes:
        kind: adam, yogi or adagrad.
        server_lr: eta.
        beta1: decay of m.
        beta2: decay of v (adam, yogi).
        tau: adaptivity.
        staleness: s.
        by_samples: weigh by |D_n|; False = every client alike.
    """

    kind: ServerKind = "adam"
    server_lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    staleness: Staleness = field(default_factory=Staleness)
    by_samples: bool = True
    sends: Literal["values", "delta"] = "delta"

    def __post_init__(self) -> None:
        one_of("server optimizer", self.kind, ServerKind)
        positive("server_lr", self.server_lr)
        positive("tau", self.tau)
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= beta < 1:
                raise BadInput(f"{name} is {beta}: give a number from 0 to below 1")

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Add the scaled delta to the sum."""
        memory = state.memory.setdefault("fed_opt", {})
        weight = float(update.num_samples) if self.by_samples else 1.0
        Accumulator(state, memory).add(update.tensors, spec, weight, self.staleness(staleness))

    def apply(self, state: GlobalState) -> None:
        """Take one server step."""
        memory = state.memory["fed_opt"]
        sums = Accumulator(state, memory)
        if not sums.weight:
            sums.clear()
            return
        if "m" not in memory:
            memory["m"], memory["v"] = zeros_like(state.values), zeros_like(state.values)
            for buffer in memory["v"].prefix(state.submodels.layout(part="trained")).buffers.values():
                buffer.fill_(self.tau**2)
        count = None if sums.common == FULL else sums.cover()
        for name, theta in trained_values(state).items():
            is_parameter = name in state.submodels.parameter_names
            flats = [theta, sums.total[name], memory["m"][name], memory["v"][name]]
            if count is not None:
                flats.append(count[name])
            for old, total, m, v, *on in chunks(*flats):
                delta = total / on[0].clamp_min(torch.finfo(theta.dtype).tiny) if on else total / sums.weight
                if is_parameter:
                    self._step(old, delta, m, v, on[0] > 0 if on else None)
                else:
                    old.add_(delta)
        sums.clear()

    def _step(self, theta: Tensor, delta: Tensor, m: Tensor, v: Tensor, where: Tensor | None) -> None:
        square = delta * delta
        new_m = torch.add(m * self.beta1, delta, alpha=1 - self.beta1)
        if self.kind == "adagrad":
            new_v = v + square
        elif self.kind == "yogi":  # moves v by no more than (1 - beta2) Delta^2, where adam's may fall by (1 - beta2) v
            new_v = v - (1 - self.beta2) * square * torch.sign(v - square)
        else:
            new_v = torch.add(v * self.beta2, square, alpha=1 - self.beta2)
        new_theta = torch.addcdiv(theta, new_m, new_v.sqrt().add_(self.tau), value=self.server_lr)
        for old, new in ((m, new_m), (v, new_v), (theta, new_theta)):
            old.copy_(new if where is None else torch.where(where, new, old))

    def __str__(self) -> str:
        words = [f"server {self.kind}"]
        words += [] if self.by_samples else ["unweighted"]
        words += [f"deltas x {self.staleness}"] if str(self.staleness) else []
        return ", ".join([*words, f"lr {self.server_lr:g}"])
