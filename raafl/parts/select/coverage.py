"""Schedule which clients train which regions in each round (RA-Fed, Wang et al., sections 4 and 6).

The neurons are split into K regions; in round q client n trains ``m_n`` of them. Three numbers determine convergence, and hold in
every round: ``S* = min_q |S_q|``, the least number of regions that are trained; ``Gamma* = min |N_q^i|``, the least number of
clients that train a trained region (eq. 3); and ``tau_q = max tau_{q,n}^i``, the largest number of consecutive rounds in which a
client has not trained a region (Assumption 6).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from raafl.core.types import derive_seed
from raafl.errors import BadInput, at_least, one_of
from raafl.parts.select.units import Axes, shared_fragments, size_of, spec_of
from raafl.submodel import Axis, Spec

Level = Literal["L-Arb", "S-Arb", "MIX-Arb"]
LEVELS: tuple[Level, ...] = ("L-Arb", "S-Arb", "MIX-Arb")

Taken = tuple[tuple[int, ...], ...]
"""Indices of the regions that each client trains, from 0."""


def mask_level(level: Level, num_clients: int, seed: int = 0) -> tuple[int, ...]:
    """Return the number of regions (quarters of the model) that each client trains, for a setting of the RA-Fed paper.

    The settings (section 6.2 there) are called L-Arb: every client trains 2 regions; S-Arb: 1 region; and MIX-Arb: one
    half of the clients trains 2 regions, the other half 1.

    Raises:
        BadInput: the setting is unknown, or there is no client.
    """
    one_of("mask level", level, LEVELS)
    at_least("num_clients", num_clients, 1)
    if level != "MIX-Arb":
        return (2 if level == "L-Arb" else 1,) * num_clients
    large = set(random.Random(derive_seed(seed, level)).sample(range(num_clients), num_clients // 2))
    return tuple(2 if n in large else 1 for n in range(num_clients))


@dataclass(frozen=True, slots=True)
class RegionCoverage:
    """Schedule that says which client trains which regions (parts of the model's width) in each round.

    The schedule follows from the seed alone. The attributes ``rest`` and ``hold`` choose one of three kinds:

    - without them, each round is drawn independently of the others;
    - if ``rest`` is set, the regions of a client change from round to round, so that it has trained all of them after
      ``period`` rounds; the larger ``rest`` is, the more random is their order;
    - if ``hold`` is true, all rounds are the same: ``trained`` regions are trained in each of them, the others never.

    In the last two kinds, the region that the fewest clients train is trained by exactly ``coverage`` clients.

    While some of a run's clients are away (``is_whole`` is false), ``coverage`` and ``rest`` hold as far as the others reach.
    """

    takes: tuple[int, ...]  # by client n: number m_n of regions that it trains in a round
    regions: int = 4  # number K of regions in the model
    trained: int | None = None  # number of regions that are trained in each round (S*); None = all K
    # smallest number of clients that train a region (Gamma*); None = 1, or an even spread with ``rest`` or ``hold``
    coverage: int | None = None
    # largest number of successive rounds in which a client does not train a region (tau); None = no limit
    rest: int | None = None
    hold: bool = False  # whether a client has the same regions in all rounds
    is_whole: bool = True  # whether these are all clients, so that settings that they cannot meet are refused

    def __post_init__(self) -> None:
        object.__setattr__(self, "takes", tuple(self.takes))
        at_least("regions", self.regions, 1)
        if self.trained is not None and not 1 <= self.trained <= self.regions:
            raise BadInput(f"'trained' is {self.trained}: give 1 to {self.regions}, the number of regions")
        if not self.takes:
            raise BadInput("'takes' is empty: give the number of regions of at least one client")
        for take in self.takes:
            if not 1 <= take <= self.num_trained:
                raise BadInput(
                    f"'takes' contains {take}: give numbers from 1 to {self.num_trained} (the regions trained in a round)"
                )
        if self.is_whole:
            self._check_guarantees()

    def _check_guarantees(self) -> None:
        """Raise `BadInput` if no schedule can satisfy ``rest`` and ``coverage``."""
        most = min(sum(self.takes) // self.num_trained, len(self.takes))
        if not 1 <= self._least <= most:
            raise BadInput(
                f"coverage is {self._least}: {len(self.takes)} clients take {sum(self.takes)} regions in a round, which "
                f"cover {self.num_trained} regions {most} times: give "
                + (f"1 to {most}" if most else "fewer trained regions, or more takes")
            )
        if self.rest is not None and self.rest < self.period - 1:
            raise BadInput(
                f"rest (rounds in which a client may skip a region) is {self.rest}: a client that trains {min(self.takes)} "
                f"of {self.num_trained} regions a round needs {self.period} rounds for all {self.regions}: give at least "
                f"{self.period - 1}, or a larger takes or trained"
            )
        if self.rest is not None and self.hold:
            raise BadInput(
                f"'rest' is {self.rest}, but with 'hold' the assignment never changes: leave out 'rest' or 'hold'"
            )
        if self.rest is not None and self.rest > 2 * self.period - 2:
            raise BadInput(
                f"rest (rounds in which a client may skip a region) is {self.rest}: clients train all regions every "
                f"{self.period} rounds, so they skip none for more than {2 * self.period - 2}: give at most that, or hold: "
                "true, by which clients skip regions in the whole run"
            )
        if self.coverage is None or (self.rest is None and not self.hold):
            return
        realised = self._least_covered(self._offsets())
        if realised != self.coverage:
            raise BadInput(
                f"coverage is {self.coverage}, but the smallest number of clients that train a region in a round is {realised} "
                f"({len(self.takes)} clients train {' or '.join(map(str, sorted(set(self.takes))))} of {self.num_trained} "
                f"regions each): give {realised}, or leave out coverage"
            )

    @property
    def _least(self) -> int:
        return 1 if self.coverage is None else self.coverage

    def _offsets(self) -> list[int]:
        """Return each client's first index among the round's S regions: evenly spread, unless ``coverage`` asks for less."""
        offsets = [sum(self.takes[:n]) % self.num_trained for n in range(len(self.takes))]
        if self.coverage is None or self._least_covered(offsets) <= self.coverage:
            return offsets
        by_takes = sorted(range(len(self.takes)), key=lambda n: -self.takes[n])
        uneven = [0] * len(self.takes)
        for place, n in enumerate(by_takes[self.coverage :]):
            uneven[n] = 1 + place % max(self.num_trained - self.takes[n], 1)
        return uneven if self._least_covered(uneven) == self.coverage else offsets

    def _least_covered(self, offsets: Sequence[int]) -> int:
        covered = [0] * self.num_trained
        for offset, take in zip(offsets, self.takes, strict=True):
            for i in range(take):
                covered[(offset + i) % self.num_trained] += 1
        return min(covered)

    @property
    def num_trained(self) -> int:
        """Number of regions that are trained in a round."""
        return self.regions if self.trained is None else self.trained

    @property
    def period(self) -> int:
        """Number of rounds after which every client can have trained all regions."""
        return -(-self.regions // self.num_trained) * self._visits

    @property
    def _visits(self) -> int:
        return -(-self.num_trained // min(self.takes))

    def taken(self, round: int, seed: int = 0) -> Taken:
        """Return the regions that each client trains in a round, ascending."""
        if self.hold:
            taken = self._turn(random.Random(derive_seed(seed, "hold")), 0, 0)
        else:
            taken = self._drawn(round, seed) if self.rest is None else self._in_turn(round, seed, self.rest)
        return tuple(tuple(sorted(regions)) for regions in taken)

    def _drawn(self, round: int, seed: int) -> list[list[int]]:
        """Draw each client's regions: in turn until each region has ``coverage`` clients, then at random."""
        rng = random.Random(derive_seed(seed, "coverage", round))
        open_now = rng.sample(range(self.regions), self.num_trained)
        taken: list[list[int]] = [[] for _ in self.takes]
        position = 0
        for n in rng.sample(range(len(self.takes)), len(self.takes)):
            if position < self._least * self.num_trained:
                taken[n] = [open_now[(position + i) % self.num_trained] for i in range(self.takes[n])]
                position += self.takes[n]
            else:
                taken[n] = rng.sample(open_now, self.takes[n])
        return taken

    def _in_turn(self, round: int, seed: int, rest: int) -> list[list[int]]:
        """Return each client's regions in ``round``; over the rounds no client goes more than ``rest`` without any one region."""
        cycle, step = divmod(round, self.period)
        # any order will do if clients may skip 2 * period - 2 rounds, from the first step of a cycle to the last of the
        # next
        is_free = rest >= 2 * self.period - 2
        length = self.period if is_free else max(rest - self.period + 2, 1)
        start = step - step % length
        steps = range(start, min(start + length, self.period))
        order = random.Random(derive_seed(seed, "order", cycle, start)).sample(steps, len(steps))
        window, visit = divmod(order[step - start], self._visits)
        return self._turn(random.Random(derive_seed(seed, "ring", cycle if is_free else 0)), window, visit)

    def _turn(self, rng: random.Random, window: int, visit: int) -> list[list[int]]:
        """Return each client's regions in the step that trains the group ``window`` of S regions for the ``visit``-th time."""
        ring = rng.sample(range(self.regions), self.regions)
        clients = rng.sample(range(len(self.takes)), len(self.takes))
        open_now = [ring[(window * self.num_trained + i) % self.regions] for i in range(self.num_trained)]
        one = replace(self, takes=tuple(self.takes[n] for n in clients))
        taken: list[list[int]] = [[] for _ in self.takes]
        for n, offset in zip(clients, one._offsets(), strict=True):
            position = visit * min(self.takes) + offset
            taken[n] = [open_now[(position + i) % self.num_trained] for i in range(self.takes[n])]
        return taken


def topped_up(taken: Taken, takes: Sequence[int], rng: random.Random) -> Taken:
    """Give clients more regions in a round, drawn from those that other clients already train.

    The set of trained regions stays the same, so no guarantee of the schedule gets worse.
    """
    open_now = sorted({i for regions in taken for i in regions})
    more = []
    for regions, take in zip(taken, takes, strict=True):
        others = [i for i in open_now if i not in regions]
        more.append(tuple(sorted([*regions, *rng.sample(others, min(take - len(regions), len(others)))])))
    return tuple(more)


def of_regions(axes: Axes, taken: Iterable[int], regions: int) -> Spec:
    """Return the submodel that consists of the given regions, where a region is an equal range of the units of every axis.

    If an axis has fewer units than there are regions, neighbouring regions share a unit.
    """
    parts = shared_fragments(axes, [1.0] * regions)
    chosen = [parts[i] for i in taken]
    units = {}
    for name, axis in axes.items():
        selected = [dict(part.kept if isinstance(axis, Axis) else part.blocks).get(name) for part in chosen]
        units[name] = sorted(
            {i for indices in selected for i in (range(size_of(axis)) if indices is None else indices)}
        )
    return spec_of(axes, units)
