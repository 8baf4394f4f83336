"""Schedule which clients train which regions in which round (RA-Fed, Wang et al., sections 4 and 6).

The neurons are split into K regions; in round q client n trains ``m_n`` of them. Three numbers determine convergence, and hold in
every round: ``S* = min_q |S_q|``, how many regions are trained at all; ``Gamma* = min |N_q^i|`` over the trained regions, by how
many clients (eq. 3); and ``tau_q = max tau_{q,n}^i``, for how many rounds in a row a client has not trained a region
(Assumption 6).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from raafl.core.types import derive_seed
from raafl.errors import BadInput, at_least, one_of
from raafl.parts.select.units import Axes, shared_fragments, size_of, spec_of
from raafl.submodel import Axis, Spec

Level = Literal["L-Arb", "S-Arb", "MIX-Arb"]
LEVELS: tuple[Level, ...] = ("L-Arb", "S-Arb", "MIX-Arb")

Taken = tuple[tuple[int, ...], ...]
"""Regions, from 0, of each client."""


def mask_level(level: Level, num_clients: int, seed: int = 0) -> tuple[int, ...]:
    """Return m_n of each client, of 4 regions (section 6.2): L-Arb 2, S-Arb 1, MIX-Arb 2 for half of them and 1 for the others.

    Args:
        level: L-Arb, S-Arb or MIX-Arb.
        num_clients: N.
        seed: decides which half.

    Raises:
        BadInput: unknown level, or no client.
    """
    one_of("mask level", level, LEVELS)
    at_least("num_clients", num_clients, 1)
    if level != "MIX-Arb":
        return (2 if level == "L-Arb" else 1,) * num_clients
    large = set(random.Random(derive_seed(seed, level)).sample(range(num_clients), num_clients // 2))
    return tuple(2 if n in large else 1 for n in range(num_clients))


@dataclass(frozen=True, slots=True)
class RegionCoverage:
    """Schedule of regions, a pure function of seed and round.

    Without ``rest`` each round is drawn independently. With it, the S regions of a round and a client's regions among them
    rotate, so that each client has trained all regions after ``period`` rounds; slack within ``rest`` is used to vary the order
    of rounds.

    Attributes:
        takes: m_n, regions that client n trains in a round.
        regions: K.
        trained: S*, regions trained in each round; None = all K.
        coverage: Gamma*, least number of clients that train a trained region.
        rest: tau, rounds in a row for which a client may not train a region; None = no bound.
    """

    takes: tuple[int, ...]
    regions: int = 4
    trained: int | None = None
    coverage: int = 1
    rest: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "takes", tuple(self.takes))
        at_least("regions", self.regions, 1)
        if self.trained is not None and not 1 <= self.trained <= self.regions:
            raise BadInput(f"trained is {self.trained}: give 1 to {self.regions}, the number of regions")
        if not self.takes:
            raise BadInput("takes is empty: give the number of regions of at least one client")
        for take in self.takes:
            if not 1 <= take <= self.num_trained:
                raise BadInput(f"takes has {take}: give 1 to {self.num_trained}, the regions trained in a round")
        most = min(sum(self.takes) // self.num_trained, len(self.takes))
        if not 1 <= self.coverage <= most:
            raise BadInput(
                f"coverage is {self.coverage}: {len(self.takes)} clients take {sum(self.takes)} regions in a round, which "
                f"cover {self.num_trained} regions {most} times: give "
                + (f"1 to {most}" if most else "fewer trained regions, or more takes")
            )
        if self.rest is not None and self.rest < self.period - 1:
            raise BadInput(
                f"rest is {self.rest}: it takes {self.period} rounds until a client that trains {min(self.takes)} of "
                f"{self.num_trained} regions has trained all {self.regions}: give at least {self.period - 1}, or more "
                "takes or trained regions"
            )

    @property
    def num_trained(self) -> int:
        """S: regions trained in a round."""
        return self.regions if self.trained is None else self.trained

    @property
    def period(self) -> int:
        """Rounds within which every client can train every region: ``ceil(K / S) * ceil(S / min m_n)``."""
        return -(-self.regions // self.num_trained) * self._visits

    @property
    def _visits(self) -> int:
        return -(-self.num_trained // min(self.takes))

    def taken(self, round: int, seed: int = 0) -> Taken:
        """Return the regions that each client trains in ``round``, ascending."""
        taken = self._drawn(round, seed) if self.rest is None else self._in_turn(round, seed, self.rest)
        return tuple(tuple(sorted(mine)) for mine in taken)

    def _drawn(self, round: int, seed: int) -> list[list[int]]:
        """Cover the regions of this round ``coverage`` times in turn; clients that are left over draw."""
        rng = random.Random(derive_seed(seed, "coverage", round))
        open_now = rng.sample(range(self.regions), self.num_trained)
        taken: list[list[int]] = [[] for _ in self.takes]
        at = 0
        for n in rng.sample(range(len(self.takes)), len(self.takes)):
            if at < self.coverage * self.num_trained:
                taken[n] = [open_now[(at + i) % self.num_trained] for i in range(self.takes[n])]
                at += self.takes[n]
            else:
                taken[n] = rng.sample(open_now, self.takes[n])
        return taken

    def _in_turn(self, round: int, seed: int, rest: int) -> list[list[int]]:
        """Take the steps of one period in an order in which nothing rests longer than ``rest``."""
        cycle, place = divmod(round, self.period)
        is_free = rest >= 2 * self.period - 2  # first in one cycle, last in the next: even that is allowed
        ring_rng = random.Random(derive_seed(seed, "ring", cycle if is_free else 0))
        ring = ring_rng.sample(range(self.regions), self.regions)
        clients = ring_rng.sample(range(len(self.takes)), len(self.takes))
        length = self.period if is_free else rest - self.period + 2
        start = place - place % length
        steps = range(start, min(start + length, self.period))
        order = random.Random(derive_seed(seed, "order", cycle, start)).sample(steps, len(steps))
        window, visit = divmod(order[place - start], self._visits)
        open_now = [ring[(window * self.num_trained + i) % self.regions] for i in range(self.num_trained)]
        taken: list[list[int]] = [[] for _ in self.takes]
        at = visit * min(self.takes)
        for n in clients:
            taken[n] = [open_now[(at + i) % self.num_trained] for i in range(self.takes[n])]
            at += self.takes[n]
        return taken


def topped_up(taken: Taken, takes: Sequence[int], rng: random.Random) -> Taken:
    """Return a round in which each client trains ``takes`` regions: those in ``taken``, plus regions that somebody trains already.

    The regions of the round, their coverage and the clients' rests stay the same or improve.
    """
    open_now = sorted({i for mine in taken for i in mine})
    more = []
    for mine, take in zip(taken, takes, strict=True):
        others = [i for i in open_now if i not in mine]
        more.append(tuple(sorted([*mine, *rng.sample(others, min(take - len(mine), len(others)))])))
    return tuple(more)


def of_regions(axes: Axes, taken: Iterable[int], regions: int) -> Spec:
    """Return the submodel of the regions ``taken`` out of ``regions`` equal ranges of every axis.

    On an axis with fewer units than regions, neighbouring regions share a unit.
    """
    parts = shared_fragments(axes, [1.0] * regions)
    chosen = [parts[i] for i in taken]
    kept = {}
    for name, axis in axes.items():
        found = [dict(part.kept if isinstance(axis, Axis) else part.blocks).get(name) for part in chosen]
        kept[name] = sorted({i for mine in found for i in (range(size_of(axis)) if mine is None else mine)})
    return spec_of(axes, kept)
