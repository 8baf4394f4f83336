"""How clients stand: whose updates were refused in a row, and who is kept out for it, until when."""

from __future__ import annotations

from collections import Counter

FIRST_S = 10.0
"""Seconds of the run's clock for which a client is kept out the first time; each further time doubles them."""

LONGEST_S = 3600.0
HOPELESS = 7
"""How often in a row a client was kept out before nothing is hoped of it: 21 minutes in all."""

DAMAGED = frozenset({"bad-magic", "bad-version", "bad-checksum", "bad-seal", "slow"})
"""Refusals of a frame that may have been damaged on its way: they speak against a connection, not against a client."""


class RefusalBackoff:
    """Counts each client's refusals in a row; after so many it is kept out, for longer each time.

    An update that is accepted clears the client. One that comes back from being kept out is on probation: the next
    refusal keeps it out again.

    Attributes:
        most: refusals in a row that keep a client out.
        refused: updates of each client refused in a row.
        times: how often in a row each was kept out.
        until: when each may take part again.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.refused: Counter[int] = Counter()
        self.times: Counter[int] = Counter()
        self.until: dict[int, float] = {}

    def refuse(self, client: int, now: float, *, excused: bool = False) -> float | None:
        """Count a refusal; return until when the client is kept out for it, or None; never for one that is ``excused``."""
        self.refused[client] += 1
        if excused or self.refused[client] < self.most:
            return None
        self.until[client] = now + min(FIRST_S * 2 ** min(self.times[client], 20), LONGEST_S)
        self.times[client] += 1
        return self.until[client]

    def condemn(self, client: int, now: float) -> float:
        """Count as many refusals as keep a client out; return until when it is."""
        self.refused[client] = max(self.refused[client], self.most)
        until = self.refuse(client, now)
        assert until is not None
        return until

    def accept(self, client: int) -> None:
        """Clear a client."""
        for book in (self.refused, self.times, self.until):
            book.pop(client, None)

    def keeps_out(self, client: int, now: float) -> bool:
        """Check whether the client may not take part yet."""
        return now < self.until.get(client, now)

    def is_bad(self, client: int) -> bool:
        """Check whether the client's last updates were all refused, as many as keep it out."""
        return self.refused[client] >= self.most

    def is_hopeless(self, client: int) -> bool:
        """Check whether the client was kept out again and again, with nothing accepted between."""
        return self.times[client] >= HOPELESS

    def forgive(self) -> None:
        """Clear everybody."""
        for book in (self.refused, self.times, self.until):
            book.clear()
