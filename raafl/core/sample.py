"""Answer the first of the five questions: which idle clients work now?"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from raafl.core.types import Part
from raafl.errors import positive


class IdlePool:
    """Set of idle clients. Adding, removing and drawing one at random take constant time."""

    def __init__(self) -> None:
        self._order: list[int] = []
        self._place: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, client: int) -> bool:
        return client in self._place

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def add(self, client: int) -> None:
        """Add ``client`` to the pool; adding it twice changes nothing."""
        if client not in self._place:
            self._place[client] = len(self._order)
            self._order.append(client)

    def discard(self, client: int) -> None:
        """Remove ``client`` from the pool if it is there."""
        place = self._place.pop(client, None)
        if place is None:
            return
        last = self._order.pop()
        if last != client:
            self._order[place] = last
            self._place[last] = place

    def draw(self, num: int, rng: random.Random) -> list[int]:
        """Draw ``num`` clients uniformly without replacement, remove them, and return them in the order of the draw."""
        drawn = []
        for _ in range(min(num, len(self._order))):
            client = self._order[rng.randrange(len(self._order))]
            self.discard(client)
            drawn.append(client)
        return drawn

    def take_all(self) -> list[int]:
        """Remove and return all clients of the pool, ordered by id."""
        everyone = sorted(self._order)
        self._order.clear()
        self._place.clear()
        return everyone


@dataclass(frozen=True, slots=True)
class Sample(Part):
    """Part of an algorithm that chooses the clients to start next: all idle ones, or a random cohort of them.

    Attributes:
        cohort: number of clients in a cohort, including those still at work; None = every idle client. In asynchronous
            methods, which start a client at each arrival of an update, this many are always at work.
        concurrency: largest number of clients that train at the same time; further clients of a cohort wait for one of
            them to finish. None = no limit.
    """

    cohort: int | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        positive("cohort", self.cohort, optional=True)
        positive("concurrency", self.concurrency, optional=True)

    def most_at_work(self, num_clients: int) -> int:
        """Return the largest number of clients at work at once, out of ``num_clients``."""
        return min([num_clients, *(limit for limit in (self.cohort, self.concurrency) if limit is not None)])

    def draw(self, idle: IdlePool, num_busy: int, rng: random.Random, *, rolling: bool) -> list[int]:
        """Choose the clients that start next; remove them from ``idle``, and return them.

        Args:
            idle: clients that could start.
            num_busy: number of clients at work or already drawn.
            rng: the run's random generator.
            rolling: whether clients are started one by one, as others finish (asynchronous). Then no more clients are
                drawn than may start at once, so that each free slot is filled by a uniform draw.
        """
        limit = self.cohort
        if rolling and self.concurrency is not None:
            limit = self.concurrency if limit is None else min(limit, self.concurrency)
        if limit is None:
            return idle.take_all()
        return idle.draw(max(0, limit - num_busy), rng)

    def __str__(self) -> str:
        words = "all" if self.cohort is None else f"{self.cohort} at random"
        return words if self.concurrency is None else f"{words}, at most {self.concurrency} at a time"
