"""Select submodels by rate: each client gets its share of the model, reduced to fit its memory and a task's limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Literal

import torch
from torch import Tensor

from raafl.core.algorithm import Select, SelectContext
from raafl.core.state import MergeMemory
from raafl.core.types import Assignment, ClientInfo, Warn, Work, derive_seed
from raafl.errors import BadInput, fraction, nearest, one_of, positive, refuse_unused
from raafl.parts.select.submodels import uncut
from raafl.parts.select.units import (
    Axes,
    Budget,
    Rate,
    at_random,
    counts,
    largest_rate,
    leading,
    rolling,
    size_of,
    spec_of,
    steps,
    width_of,
)
from raafl.submodel import Axis, Spec, Stack
from raafl.submodel.flat import reals

State = Mapping[str, Tensor]
"""Tensors of the full model by name; tensors that are left out, such as running statistics, do not count."""


def magnitude(axes: Axes, rate: Rate, *, state: State | None = None, seed: int = 0, round: int = 0) -> Spec:
    """Select the units with the largest L2 norm of all their weights (for an attention head: q, k, v and o).

    Raises:
        BadInput: ``state`` is None, or lacks a parameter of an axis.
    """
    if state is None:
        raise BadInput("state is None, but units are chosen by importance: give the model's parameters")
    units = {}
    for name, number in counts(axes, rate).items():
        scores = unit_scores(axes[name], state)
        # a stable sort selects the first of equal units on every machine
        units[name] = torch.sort(scores, descending=True, stable=True).indices[:number].tolist()
    return spec_of(axes, units)


@torch.no_grad()
def unit_scores(axis: Axis | Stack, state: State, *, squared: bool = True) -> Tensor:
    """Return a score for each unit, such as a neuron: the sum of its weights' squares, shape (size,), float64, on the CPU.

    Raises:
        BadInput: ``state`` has no tensor that lies on the axis.
    """
    scores = torch.zeros(size_of(axis), dtype=torch.float64)
    has_tensor = False
    if isinstance(axis, Stack):
        blocks = {axis.block(i): i for i in range(len(axis))}
        for name, tensor in state.items():
            block = next((i for path, i in blocks.items() if name.startswith(f"{path}.")), None)
            if block is not None:
                scores[block] += _sums(tensor.reshape(1, -1), squared).item()
                has_tensor = True
    else:
        for member in axis.members:
            if member.name in state:
                tensor = state[member.name].narrow(member.dim, member.offset, member.unit * axis.size)
                scores += _sums(tensor.movedim(member.dim, 0).reshape(axis.size, -1), squared)
                has_tensor = True
    if not has_tensor:
        named = axis.path if isinstance(axis, Stack) else axis.name
        raise BadInput(f"state has no tensor on the axis '{named}': give the model's parameters by name")
    return scores


def _sums(rows: Tensor, squared: bool) -> Tensor:
    # elements become float32, since squares of half precision would overflow; sums are float64, to keep small terms
    rows = reals(rows.detach()).flatten(1).float()
    return (rows.square() if squared else rows).sum(1, dtype=torch.float64).cpu()


Rates = float | list[float] | dict[str, float]
"""One number for all clients; a list that they take in turn; or a mapping from device name."""

RateOf = Literal["model", "width", "parameters"]
Rounds = Literal["client", "server"]


_NOTICED = 0.1
"""Smallest relative change of a measured ratio that changes sizes, so that not every task has another shape."""


SELECTORS: dict[str, Callable[..., Spec]] = {
    "leading": leading,
    "rolling": rolling,
    "random": at_random,
    "magnitude": magnitude,
}
"""Selectors that need only a client's rate and the global model, by their name in a config."""


@dataclass
class _RateMemory(MergeMemory):
    """Measured speeds of the present clients, relative to the predicted ones."""

    key = "rate_select"
    # by client: measured duration of its latest task divided by the predicted one; missing = as predicted
    ratio: dict[int, float] = field(default_factory=dict)
    fleet: float = 1.0  # median of ``ratio`` over the present clients when it was computed last
    num_changes: int = 0  # number of ratios that have changed since then


# No slots: with slots dataclass creates the class twice, and jsonargparse could not find it by its short name.
@dataclass(frozen=True)
class RateSelect(Select):
    """Select part (choice of submodels): each client gets a share of the model that fits its memory and limits on a task.

    A client's rate is the largest share that it may get. It gets the largest submodel up to that share that fits its
    memory and all given limits; ``RateSelect()`` gives every client as much as fits. A model without axes is trained
    whole.

    Attributes:
        selector: rule for choosing units: leading (HeteroFL), rolling (FedRolex), random or magnitude.
        rates: rate of a client: one number for all; a list that clients 1, 2, ... take in turn, repeating; or a mapping
            from device name.
        rate_of: quantity of which a rate is a share: model = the model's nominal size, where each axis keeps the square
            root of the rate (`width_of`); width = each axis; parameters = the number of parameters, which is counted.
        rounds: counter by which rolling windows move and random draws change: the number of a client's own merged
            updates ("client"), or the model's version ("server").
        seconds: limit on a task's predicted time, including transfers; None = no limit.
        flops: limit on a task's training FLOPs; None = no limit.
        wire_bytes: limit on the bytes that a task transfers, download and upload together; None = no limit.
        steps_within_s: seconds in which a task should finish, including transfers. The client makes as many of the
            local steps in `train` as fit, and at least 1. None = all steps.
        measured: whether ``seconds`` refers to the client's measured speed. Predicted times are then multiplied by the
            ratio of measured to predicted time of the client's last task, once it has changed by more than a tenth. With
            `overlap` nothing is measured: an update then waits until the one before is sent.
        relative: whether ``seconds`` moves with the fleet, for which `measured` must be true: it is multiplied by the median
            of that ratio over all clients, once this has changed by more than a tenth. So if all are slower than predicted,
            nobody gets a smaller submodel.
    """

    selector: Literal["leading", "rolling", "random", "magnitude"] = "leading"
    rates: Rates = 1.0
    rate_of: RateOf = "model"
    rounds: Rounds = "client"
    seconds: float | None = None
    flops: float | None = None
    wire_bytes: float | None = None
    steps_within_s: float | None = None
    measured: bool = False
    relative: bool = False

    def __post_init__(self) -> None:
        choices = {"selector": SELECTORS, "rate_of": RateOf, "rounds": Rounds}
        for name, allowed in choices.items():
            one_of(name, getattr(self, name), allowed)
        for rate in self._all_rates():
            fraction("a rate in rates", rate)
        for name in self.rates if isinstance(self.rates, dict) else ():
            if not isinstance(name, str):
                raise BadInput(
                    f"rates has the key {name}, which is no text: give names of devices, such as '{name}' in quotes"
                )
        if not self._all_rates():
            raise BadInput("rates is empty: give a number, a list of numbers, or a number for each name of device")
        for name in ("seconds", "flops", "wire_bytes", "steps_within_s"):
            positive(name, getattr(self, name), optional=True)
        if self.steps_within_s is not None:
            reason = "steps_within_s says how many steps a client makes with what its rate gives it"
            refuse_unused(reason, seconds=(self.seconds, None), flops=(self.flops, None))

        if self.measured and self.seconds is None:
            raise BadInput(
                "measured is true, but seconds, the limit that it adjusts to measured speed, is null: give seconds, or "
                "leave measured out"
            )

        if self.relative and not self.measured:
            raise BadInput(
                "relative is true, but measured is false, so clients' speeds are unknown: give measured: true, too"
            )

    def _all_rates(self) -> list[float]:
        if isinstance(self.rates, dict):
            return list(self.rates.values())
        return list(self.rates) if isinstance(self.rates, Sequence) else [self.rates]

    def rate(self, client: ClientInfo) -> float:
        """Return the largest share of the model that the config gives ``client``.

        Raises:
            BadInput: the client's device has no rate.
        """
        if not isinstance(self.rates, dict):
            rates = self._all_rates()
            return rates[(client.id - 1) % len(rates)]
        if client.profile.name not in self.rates:
            raise BadInput(
                f"client {client.id}: rates has none for its device '{client.profile.name}'; "
                f"{nearest(client.profile.name, self.rates)}"
            )
        return self.rates[client.profile.name]

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Return the client's work, with its id as the ``region``; raises `BadInput` if no size fits."""
        width = self._size(client, fleet)
        submodels, counts = fleet.state.submodels, fleet.state.counts
        round = fleet.state.version if self.rounds == "server" else counts.get(client.id, 0)
        state = None
        if self.selector == "magnitude":
            state = {name: fleet.state.values[name] for name in submodels.parameters}
        seed = derive_seed(fleet.seed, "rated", client.id)
        spec = SELECTORS[self.selector](submodels.axes, width, state=state, seed=seed, round=round)
        return Work(spec, region=client.id, num_steps=self._steps(client, spec, fleet))

    def check(self, fleet: SelectContext) -> list[str]:
        """Return a problem for each client that has no rate, or whose memory and limits allow no submodel."""
        return fleet.problems(lambda client: self._size(client, fleet))

    def forget(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Delete the cached size of the client's submodel; other clients' submodels do not depend on it."""
        fleet.cache.pop((client.id, self.rate(client)), None)

    def on_join(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Forget the client's measured speed, since it may have joined from another device."""
        if self.measured:
            fleet.state.memory.of(_RateMemory).ratio.pop(client.id, None)
        super().on_join(client, fleet)

    def on_update(self, client: ClientInfo, assignment: Assignment, seconds: float, fleet: SelectContext) -> None:
        """Update the client's ratio of measured to predicted time, if sizes depend on measured speed."""
        ratio = None if self._is_predicted(fleet) else fleet.time_ratio(client, assignment, seconds)
        if ratio is None:
            return
        memory = fleet.state.memory.of(_RateMemory)
        if abs(ratio / memory.ratio.get(client.id, 1.0) - 1) > _NOTICED:
            memory.ratio[client.id] = ratio
            self.forget(client, fleet)
            if self.relative:
                self._compare(memory, fleet)

    def _is_predicted(self, fleet: SelectContext) -> bool:
        """Check whether predicted times alone count: measured ones contain waits for the uplink with `overlap`."""
        return not self.measured or (fleet.overlap and fleet.rules.sizes_overlapped)

    def _compare(self, memory: _RateMemory, fleet: SelectContext) -> None:
        """Count a changed speed ratio, and compute the fleet's median anew once a quarter of the clients have changed."""
        memory.num_changes += 1
        if memory.num_changes * 4 < len(fleet.clients):  # a median takes a pass over all clients
            return
        memory.num_changes = 0
        median = median_low(memory.ratio.get(client, 1.0) for client in fleet.clients)
        if abs(median / memory.fleet - 1) > _NOTICED:
            memory.fleet = median
            fleet.cache.clear()

    def notes(self, fleet: SelectContext) -> list[str]:
        """Return a warning if rates have no effect, as no dimension of the model can be cut, and one if `measured` has none."""
        submodels = fleet.state.submodels
        cuts = min(self._all_rates()) < 1 and not submodels.axes
        unmeasured = self.measured and self._is_predicted(fleet)
        lines = [Warn("measured has no effect with overlap, where measured times contain waits for the uplink")]
        return (uncut(submodels, "cut by rates") if cuts else []) + (lines if unmeasured else [])

    # ---- size and steps ----

    def _steps(self, client: ClientInfo, spec: Spec, fleet: SelectContext) -> int | None:
        """Return the number of steps that fit into `steps_within_s`; None = all steps of a task fit."""
        limit_s = self.steps_within_s
        if limit_s is None or fleet.cost_s(client, Work(spec)) <= limit_s:
            return None
        one_s, two_s = (fleet.cost_s(client, Work(spec, num_steps=num)) for num in (1, 2))
        if two_s <= one_s:  # transfers take longer than computation, so another step adds no time
            return 1
        # each further step takes equally long; the small constant absorbs rounding errors
        return max(1 + math.floor((limit_s - one_s) / (two_s - one_s) + 1e-9), 1)

    def _size(self, client: ClientInfo, fleet: SelectContext) -> float:
        """Return the share of each axis's units that the client gets, 0 to 1."""
        key = (client.id, self.rate(client))
        if key not in fleet.cache:
            fleet.cache[key] = self._largest_size(client, fleet)
        size: float = fleet.cache[key]
        return size

    def _largest_size(self, client: ClientInfo, fleet: SelectContext) -> float:
        axes, budget, rate = fleet.state.submodels.axes, self._budget(client, fleet), self.rate(client)
        most = {"model": width_of(rate), "width": rate, "parameters": 1.0}[self.rate_of]
        rates = [step for step in steps(axes) if step < most] + [most] if axes else [1.0]
        if self.measured and self.seconds is not None:
            # who has become slow gets the smallest submodel, rather than being dismissed for good
            need_s = budget.needs(fleet.cost(leading(axes, rates[0])))["seconds"]
            budget = replace(budget, seconds=max(budget.seconds, min(self.seconds, need_s)))
        # selectors choose other units at the same cost, so the cheapest one stands for all
        return largest_rate(
            lambda width: leading(axes, width), fleet.cost, budget, rates=rates, who=f"client {client.id}"
        )

    def _budget(self, client: ClientInfo, fleet: SelectContext) -> Budget:
        limits = {name: getattr(self, name) for name in ("seconds", "flops", "wire_bytes")}
        if self.rate_of == "parameters" and fleet.state.submodels.axes:
            limits["params"] = self.rate(client) * fleet.cost(Spec()).params
        samples = fleet.samples(client.num_samples, Work())
        if self.measured and self.seconds is not None:
            memory = fleet.state.memory.of(_RateMemory)
            limits["seconds"] = self.seconds * memory.fleet / memory.ratio.get(client.id, 1.0)
        given = {name: limit for name, limit in limits.items() if limit is not None}
        memory_bytes, tested = client.profile.memory_bytes, fleet.tested(client)
        return Budget(memory_bytes, profile=client.profile, samples=max(samples, 1), tested=tested, **given)

    def __str__(self) -> str:
        words = f"{self.selector} units, at most {rates_in_words(self.rates)} of the {self.rate_of}"
        limits = {"s": self.seconds, "FLOPs": self.flops, "bytes on the wire": self.wire_bytes}
        words += "".join(f", {limit:g} {unit}" for unit, limit in limits.items() if limit is not None)
        words += (" as measured" + ", beside the others" * self.relative) if self.measured else ""
        return words + ("" if self.steps_within_s is None else f", only the steps that {self.steps_within_s:g} s allow")


Rated = RateSelect
"""The older name, which configs and saved runs contain."""


def rates_in_words(rates: Rates) -> str:
    """Format rates as text, such as "1, 0.5" or "phone 0.25, laptop 1"."""
    if isinstance(rates, dict):
        return ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
    return ", ".join(f"{rate:g}" for rate in (rates if isinstance(rates, Sequence) else [rates]))


def by_rate(
    submodel: Select | None,
    selector: Literal["leading", "rolling", "random", "magnitude"],
    rates: Rates | None,
    levels: Sequence[float],
    rounds: Rounds = "client",
) -> Select:
    """Return the user's own select part ``submodel`` if there is one, else a `RateSelect` with shares of the width.

    `submodel`: the user's own select part; None = select by rate.
    `rates`: share of each axis's units by client; None = ``levels``, which clients take in turn.

    Raises:
        BadInput: both ``submodel`` and ``rates`` are given.
    """
    if submodel is None:
        return RateSelect(selector, list(levels) if rates is None else rates, "width", rounds=rounds)
    refuse_unused("submodel says what each client trains", rates=(rates, None))
    return submodel
