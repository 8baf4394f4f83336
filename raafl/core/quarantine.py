"""Suspend clients whose updates are refused several times in a row, for longer each time."""

from __future__ import annotations

import statistics
from collections import Counter

FIRST_S = 10.0
"""Least seconds of the run's clock for which a client is kept out the first time; each further time doubles them."""

LONGEST_S = 3600.0
_REMEMBERED = 9
HOPELESS = 7
"""How often in a row a client was kept out before nothing is hoped of it: 21 minutes in all."""

DAMAGED = frozenset({"bad-magic", "bad-version", "bad-checksum", "bad-record", "slow"})
"""Refusals of a frame that may have been damaged on its way: they speak against a connection, not against a client."""


class RefusalBackoff:
    """Record of each client's refused updates in a row, which suspends clients that have too many.

    After ``most`` refusals in a row a client is suspended for 10 s, next time for 20 s, and so on up to an hour. For a
    client that leaves tasks unanswered the first time is the median time of these tasks, if that is longer: what waits
    for such a client waits as long. An accepted update resets the count. A client that returns from a suspension is
    suspended again at its next refusal.

    `most`: number of refusals in a row that suspends a client.
    `refused`: number of refusals in a row, by client.
    `times`: number of suspensions in a row, by client.
    `until`: end of the current suspension in seconds of the run's clock, by client.
    `unanswered_s`: seconds that the latest tasks took which a client left unanswered in a row, by client.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.refused: Counter[int] = Counter()
        self.times: Counter[int] = Counter()
        self.until: dict[int, float] = {}
        self.unanswered_s: dict[int, list[float]] = {}

    def refuse(
        self, client: int, now: float, *, excused: bool = False, unanswered_s: float | None = None
    ) -> float | None:
        """Count a refused update of ``client``; return the end of the suspension that follows, or None.

        `unanswered_s`: seconds from the assignment of a task that the client has left unanswered; None = it has
        answered.
        """
        self.refused[client] += 1
        if unanswered_s is not None:
            self.unanswered_s[client] = [*self.unanswered_s.get(client, ()), unanswered_s][-_REMEMBERED:]
        if excused or self.refused[client] < self.most:
            return None
        first_s = max(FIRST_S, statistics.median(self.unanswered_s.get(client, (0.0,))))
        self.until[client] = now + min(first_s * 2 ** min(self.times[client], 20), LONGEST_S)
        self.times[client] += 1
        return self.until[client]

    def condemn(self, client: int, now: float) -> float:
        """Suspend ``client`` at once, however few refusals it has; return the end of the suspension."""
        self.refused[client] = max(self.refused[client], self.most)
        until = self.refuse(client, now)
        assert until is not None
        return until

    def accept(self, client: int) -> None:
        """Forget the refusals and suspensions of ``client``, since an update of it was accepted."""
        for book in (self.refused, self.times, self.until, self.unanswered_s):
            book.pop(client, None)

    def keeps_out(self, client: int, now: float) -> bool:
        """Check whether ``client`` is still suspended at ``now``."""
        return now < self.until.get(client, now)

    def is_bad(self, client: int) -> bool:
        """Check whether at least the last ``most`` updates of ``client`` were refused."""
        return self.refused[client] >= self.most

    def is_hopeless(self, client: int) -> bool:
        """Check whether ``client`` was suspended so often, without an accepted update in between, that it is given up."""
        return self.times[client] >= HOPELESS

    def forgive(self) -> None:
        """Forget the refusals and suspensions of all clients."""
        for book in (self.refused, self.times, self.until, self.unanswered_s):
            book.clear()
