"""Select the whole model, or one of a fixed set of submodels: Fed-RAA's fragments, assigned by Gre-RAA; and wrap a select."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from raafl.core.algorithm import Select, SelectContext
from raafl.core.types import Assignment, ClientInfo, Warn, Work
from raafl.devices.profiles import Profile
from raafl.errors import BadInput, one_of, positive
from raafl.parts.select.units import shared_fragments
from raafl.submodel import Spec, Submodels

# Rows of the table: negative capability, so that it ascends for searchsorted; client id; then the cost of each
# fragment.
_KEY, _CLIENT, _COSTS = 0, 1, 2


class Ranking:
    """Clients ordered by speed, fastest first, each with the seconds that it needs to train each fragment of the model.

    The order is kept up to date as clients join and leave; adding or removing one of 100,000 clients takes about
    0.1 ms. Among equally fast clients the earliest comes first.
    """

    def __init__(self, sizes: Sequence[float], clients: Iterable[tuple[int, float, Sequence[float]]]) -> None:
        """Sort clients by capability, and fragments by size, the largest first.

        Args:
            sizes: size of each fragment.
            clients: id, capability (higher is faster) and cost of each fragment, for each client.
        """
        self._fragments = sorted(range(len(sizes)), key=lambda j: -sizes[j])
        rows = sorted(clients, key=lambda row: -row[1])
        self._num = len(rows)
        self._table = np.empty((_COSTS + len(sizes), max(self._num, 1)))
        for i, (client, capability, costs) in enumerate(rows):
            self._table[:, i] = (-capability, client, *costs)

    def __len__(self) -> int:
        return self._num

    def add(self, client: int, capability: float, costs: Sequence[float]) -> None:
        """Insert a client into the ranking, after clients of equal speed.

        Args:
            client: id of the client.
            capability: speed of the client; higher means faster.
            costs: time that the client needs for each fragment, in seconds.
        """
        table, num = self._table, self._num
        if num == table.shape[1]:
            # double the table's size, so that a join takes constant time on average
            self._table = table = np.concatenate([table, np.empty_like(table)], axis=1)
        i = int(np.searchsorted(table[_KEY, :num], -capability, side="right"))
        table[:, i + 1 : num + 1] = table[:, i:num]
        table[:, i] = (-capability, client, *costs)
        self._num = num + 1

    def remove(self, client: int, capability: float) -> None:
        """Remove a client from the ranking.

        Args:
            client: id of the client.
            capability: speed with which the client was added.
        """
        table, num = self._table, self._num
        start, stop = (int(np.searchsorted(table[_KEY, :num], -capability, side=side)) for side in ("left", "right"))
        i = start + int(np.flatnonzero(table[_CLIENT, start:stop] == client)[0])
        table[:, i : num - 1] = table[:, i + 1 : num]
        self._num = num - 1

    def bound(self) -> float:
        """Return Fed-RAA's time limit K (appendix B): the longest task if large fragments of the model go to fast clients.

        Clients are ordered by speed and fragments by size, both descending. With N clients and M fragments, fragment j
        goes to clients ``(j-1) floor(N/M) + 1 .. j floor(N/M)``; remaining clients get the smallest fragment. If N < M,
        each client gets several fragments by the same rule and trains them in turn; remaining fragments go to the
        slowest client.
        """
        num, num_fragments, costs = self._num, len(self._fragments), self._table[_COSTS:]
        if num < num_fragments:
            share = num_fragments // num
            return max(float(costs[j, min(i // share, num - 1)]) for i, j in enumerate(self._fragments))
        share = num // num_fragments
        ends = [*range(share, share * num_fragments, share), num]
        return max(
            float(costs[j, i * share : end].max()) for i, (j, end) in enumerate(zip(self._fragments, ends, strict=True))
        )


TABLE_4: dict[int, tuple[float, ...]] = {
    1: (1.0,),
    2: (0.4, 0.6),
    3: (0.2, 0.3, 0.5),
    4: (0.1, 0.2, 0.3, 0.4),
    5: (0.05, 0.1, 0.2, 0.3, 0.35),
}
"""Share of the neurons in each of M fragments, by M (Fed-RAA, Table 4)."""

Choice = Literal["gre_raa", "random", "fewest_updates"]

Kind = tuple[int, int, float, bool]
"""Id of a client's profile, its training samples, its test samples, and whether steps are captured."""

MAX_KINDS = 2**18


@dataclass(frozen=True, slots=True)
class Full(Select):
    """Select part (choice of submodels) that gives every client the whole model."""

    @property
    def cuts(self) -> bool:
        """Whether a client may get less than the whole model; a subclass may give less."""
        return type(self) is not Full

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Return work on the whole model for any client."""
        return Work()

    def check(self, fleet: SelectContext) -> list[str]:
        """Return a problem for each client whose memory is too small for the whole model."""
        spec = Work().spec
        return [
            f"client {client.id}: memory_bytes is {client.profile.memory_bytes:.4g}, the full model needs "
            f"{fleet.cost(spec).peak_bytes:.4g} to train: raise memory_bytes, use a "
            "smaller batch or model, or an algorithm that assigns submodels"
            for client in fleet.clients.values()
            if not fleet.fits(client, spec)
        ]

    def __str__(self) -> str:
        return "full"


def uncut(submodels: Submodels, what: str) -> list[str]:
    """Return a warning if no dimension of the model can be cut, so that every client trains all of it; else no warning."""
    if submodels.axes:
        return []
    return [Warn(f"every client trains all of the model, which has no axes to {what}: {submodels.why_whole()}")]


def fragment_ratios(fragments: int | Sequence[float]) -> tuple[float, ...]:
    """Return the share of the model in each fragment: a row of Fed-RAA's Table 4, or the given ratios scaled to sum to 1.

    Raises:
        BadInput: Table 4 has no such row, or the list is empty or has a number that is not above 0.
    """
    if isinstance(fragments, int):
        if fragments not in TABLE_4:
            raise BadInput(
                f"fragments is {fragments}: give 1 to 5 (the splits of Fed-RAA's Table 4), "
                "or a list of ratios such as [0.2, 0.3, 0.5]"
            )
        return TABLE_4[fragments]
    ratios = tuple(float(ratio) for ratio in fragments)
    if not ratios:
        raise BadInput("fragments is an empty list: give at least one ratio")
    for ratio in ratios:
        positive("a ratio in fragments", ratio)
    return tuple(ratio / sum(ratios) for ratio in ratios)


def fragment_specs(submodels: Submodels, ratios: Sequence[float]) -> tuple[Spec, ...]:
    """Cut every axis into consecutive disjoint ranges by ``ratios``; return one submodel per range, called a fragment.

    Every fragment also contains the parameters that lie on no axis, such as the output bias. If an axis has fewer units
    than there are fragments, each fragment has one unit, and some share it (`shared_fragments`). A model without axes
    is one fragment.
    """
    return shared_fragments(submodels.axes, ratios if submodels.axes else [1.0])


class OneOf(Select):
    """Base class of select parts (choices of submodels) that assign one out of a fixed set of submodels (Fed-RAA, Algorithm 2).

    For a client n, c(n, j) is the predicted time of a task on submodel j, and q(j) is how often j was merged so far.
    ``S = {j : c(n, j) <= K}`` are the submodels that the client can train within the time K.

    - gre_raa chooses from S the submodel with the smallest q(j), at random among equals;
    - random chooses any submodel of S;
    - fewest_updates (the paper's MP) chooses the submodel with the smallest q(j), whatever its time.

    A submodel that exceeds the client's memory is never chosen. c(n, j) is `SelectContext.task_time`: the paper's
    ``|theta_j| |D_n| / cmp_n`` (training FLOPs divided by the client's FLOP/s), plus download, upload and the client's
    own evaluation.
    """

    # gre_raa: the least merged one of those that finish in time; random; or fewest_updates
    how: Choice
    bound_s: float | None  # time limit K in seconds; None = that of the present clients (`Ranking.bound`)

    @abstractmethod
    def pieces(self, submodels: Submodels) -> tuple[Spec, ...]:
        """Return all submodels of the set, in the order of their numbers j = 1, 2, ..."""

    @abstractmethod
    def what(self) -> str:
        """Describe the set of submodels in a few words, for logs."""

    def __post_init__(self) -> None:
        one_of("select", self.how, Choice)
        positive("K", self.bound_s, optional=True)
        if self.how == "fewest_updates" and self.bound_s is not None:
            raise BadInput(
                f"K is {self.bound_s}, but select 'fewest_updates' has no time limit: leave K out, or use gre_raa"
            )

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Return work on one of the submodels; raises `BadInput` if none fits the time limit K and the client's memory."""
        allowed = self.allowed(client, fleet)
        if not allowed:
            raise BadInput(self._problem(client, fleet))
        j = fleet.rng.choice(allowed)
        if self.how != "random":
            counts = fleet.state.counts
            fewest = min(counts.get(i, 0) for i in allowed)
            j = fleet.rng.choice([i for i in allowed if counts.get(i, 0) == fewest])
        return Work(self.specs(fleet)[j - 1], region=j)

    def below(self) -> Select:
        """Return `Full`, so that clients train all of the one submodel that was sent; see `Select.below`."""
        return Full()

    def specs(self, fleet: SelectContext) -> tuple[Spec, ...]:
        """Return all submodels of the set, in the order of their numbers j = 1, 2, ...; cached."""
        if "specs" not in fleet.cache:
            fleet.cache["specs"] = self.pieces(fleet.state.submodels)
        specs: tuple[Spec, ...] = fleet.cache["specs"]
        return specs

    def bound(self, fleet: SelectContext) -> float:
        """Return the time limit for a client's task in seconds: the given one, or that computed from the present clients."""
        if self.bound_s is not None:
            return self.bound_s
        cache = fleet.cache
        if "K" not in cache:
            last, K = cache.get("last K"), self._ranking(fleet).bound()
            cache["K"] = cache["last K"] = K
            if last != K:
                cache["S"] = {}
        return float(cache["K"])

    def _ranking(self, fleet: SelectContext) -> Ranking:
        if "ranking" not in fleet.cache:
            sizes = [fleet.cost(spec).params for spec in self.specs(fleet)]
            rows = ((c.id, c.profile.flops_per_s, self._costs(c, fleet)) for c in fleet.clients.values())
            fleet.cache["ranking"] = Ranking(sizes, rows)
        ranking: Ranking = fleet.cache["ranking"]
        return ranking

    def on_join(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Add the client to the ranking by speed."""
        if "ranking" in fleet.cache:
            fleet.cache["ranking"].add(client.id, client.profile.flops_per_s, self._costs(client, fleet))
        self.forget(client, fleet)

    def on_loss(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Remove the client from the ranking by speed."""
        if "ranking" in fleet.cache:
            fleet.cache["ranking"].remove(client.id, client.profile.flops_per_s)
        self.forget(client, fleet)

    def forget(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Delete the cached time limit, which depends on all clients."""
        fleet.cache.pop("K", None)

    def allowed(self, client: ClientInfo, fleet: SelectContext) -> list[int]:
        """Return the numbers, from 1, of the submodels that the client can train in its memory and the time limit; cached."""
        # K is the cost of some fragment on some client, so rounding must not exclude that one
        limit = float("inf") if self.how == "fewest_updates" else self.bound(fleet) * (1 + 1e-9)
        kind, costs = self._kind(client, fleet)
        cached: dict[Kind, list[int]] = fleet.cache.setdefault("S", {})
        if kind not in cached:
            cached[kind] = [
                j
                for j, spec in enumerate(self.specs(fleet), start=1)
                if costs[j - 1] <= limit and fleet.fits(client, spec)
            ]
        return cached[kind]

    def check(self, fleet: SelectContext) -> list[str]:
        """Return a problem for each client that can train no submodel of the set in its memory and the time limit."""
        return [self._problem(c, fleet) for c in fleet.clients.values() if not self.allowed(c, fleet)]

    def _costs(self, client: ClientInfo, fleet: SelectContext) -> tuple[float, ...]:
        return self._kind(client, fleet)[1]

    def _kind(self, client: ClientInfo, fleet: SelectContext) -> tuple[Kind, tuple[float, ...]]:
        """Return the kind of a client, on which its costs depend, and the seconds that it needs for each submodel.

        Clients with the same device and as much data share one entry: a million clients have few kinds.
        """
        kinds: dict[Kind, tuple[Profile, tuple[float, ...]]] = fleet.cache.setdefault("kinds", {})
        # the profile's id, since the hash of a recorded device would read all its series
        kind = id(client.profile), client.num_samples, fleet.tested(client), fleet.captured
        if kind not in kinds:
            if len(kinds) >= MAX_KINDS:
                kinds.clear()
                fleet.cache["S"] = {}
            costs = tuple(fleet.cost_s(client, Work(spec, j)) for j, spec in enumerate(self.specs(fleet), start=1))
            kinds[kind] = client.profile, costs  # with the profile, so that no other object gets its id
        return kind, kinds[kind][1]

    def _problem(self, client: ClientInfo, fleet: SelectContext) -> str:
        specs, costs = self.specs(fleet), self._costs(client, fleet)
        fitting = [j for j in range(len(specs)) if fleet.fits(client, specs[j])]
        if not fitting:
            need = min(fleet.cost(spec).peak_bytes for spec in specs)
            other = "more and smaller fragments" if fleet.state.submodels.axes else "a smaller model"
            return (
                f"client {client.id}: memory_bytes is {client.profile.memory_bytes:.4g}, too small for any fragment "
                f"(the smallest needs {need:.4g} to train): raise memory_bytes, use a smaller batch, or {other}"
            )
        j = min(fitting, key=lambda i: costs[i])
        return (
            f"client {client.id}: its cheapest fragment, {j + 1}, takes {costs[j]:.4g} s, more than "
            f"K = {self.bound(fleet):.4g} s: set K to at least {costs[j]:.4g}, leave it out for the offline bound, or "
            "use smaller fragments"
        )

    def __str__(self) -> str:
        if self.how == "fewest_updates":
            return f"of {self.what()} the one merged least often"
        limit = "K seconds, K set before the run" if self.bound_s is None else f"{self.bound_s:g} s"
        chosen = "any at random" if self.how == "random" else "the one merged least often"
        return f"of {self.what()} {chosen} that takes at most {limit} ({self.how})"


@dataclass(frozen=True, slots=True)
class Fragments(OneOf):
    """Select part (choice of submodels) among disjoint fragments, slices of the model's width (Fed-RAA).

    Attributes:
        ratios: share of the units in each fragment.
        how: rule for choosing: gre_raa (merged least often among those that finish in time), random, or fewest_updates.
        bound_s: time limit K in seconds; None = computed from the present clients.
    """

    ratios: tuple[float, ...]
    how: Choice = "gre_raa"
    bound_s: float | None = None

    def pieces(self, submodels: Submodels) -> tuple[Spec, ...]:
        """Return the fragments (disjoint slices) of the model."""
        return fragment_specs(submodels, self.ratios)

    def notes(self, fleet: SelectContext) -> list[str]:
        """Return a warning if no dimension of the model can be cut, so that it cannot be divided into fragments."""
        return uncut(fleet.state.submodels, "cut into fragments") if len(self.ratios) > 1 else []

    def what(self) -> str:
        """Describe in a few words, for logs, which shares of the model its fragments (disjoint slices) have."""
        return f"fragments {'/'.join(f'{100 * r:g}' for r in self.ratios)} %"


@dataclass(frozen=True)
class WrappedSelect(Select):
    """Base class of wrappers of a select part (choice of submodels): calls that a wrapper does not override are passed on."""

    inner: Select  # the wrapped select part

    @property
    def needs_last_update(self) -> bool:
        """Whether the wrapped select part (choice of submodels) must see a client's last update before it chooses again."""
        return self.inner.needs_last_update

    @property
    def names_trained(self) -> bool:
        """Whether the wrapped select part (choice of submodels) names what trains; see `Select.names_trained`."""
        return self.inner.names_trained

    def below(self) -> Select:
        """Return this wrapper around what the wrapped part returns; see `Select.below`."""
        return replace(self, inner=self.inner.below())

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Return the work that the wrapped select part assigns to the client."""
        return self.inner(client, fleet)

    def on_join(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Tell the wrapped select part (choice of submodels) that a client has joined."""
        self.inner.on_join(client, fleet)

    def on_loss(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Tell the wrapped select part (choice of submodels) that a client was lost."""
        self.inner.on_loss(client, fleet)

    def forget(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Let the wrapped select part (choice of submodels) remove what it has cached about a client."""
        self.inner.forget(client, fleet)

    def on_round_start(self, out: Sequence[ClientInfo], fleet: SelectContext) -> None:
        """Tell the wrapped select part (choice of submodels) that a round starts."""
        self.inner.on_round_start(out, fleet)

    def on_update(self, client: ClientInfo, assignment: Assignment, seconds: float, fleet: SelectContext) -> None:
        """Tell the wrapped select part (choice of submodels) that an update has arrived."""
        self.inner.on_update(client, assignment, seconds, fleet)

    def check(self, fleet: SelectContext) -> list[str]:
        """Return the problems that the wrapped select part (choice of submodels) finds before the run."""
        return self.inner.check(fleet)

    def notes(self, fleet: SelectContext) -> list[str]:
        """Return the notes of the wrapped select part (choice of submodels) for the start of the run."""
        return self.inner.notes(fleet)

    def __str__(self) -> str:
        return str(self.inner)
