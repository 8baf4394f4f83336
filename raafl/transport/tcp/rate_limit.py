"""Limit how often each client may connect: a few times at once, then one connection per interval."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

AT_ONCE = 10
EVERY_S = 2.0


class TokenBucket:
    """Rate limiter with a token bucket for each client id; thread-safe."""

    def __init__(
        self, at_once: int = AT_ONCE, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Give each client up to ``at_once`` tokens, one more every ``every_s`` seconds."""
        self._at_once, self._every_s, self._clock = at_once, every_s, clock
        self._left: dict[int, tuple[float, float]] = {}  # by client: tokens left, and the time of that count
        self._lock = threading.Lock()

    def take(self, client: int) -> bool:
        """Use up one of the client's tokens, which allow it to connect; return False if it has none left."""
        with self._lock:
            left, now = self._now(client)
            self._left[client] = (left - 1 if left >= 1 else left, now)
            return left >= 1

    def has(self, client: int) -> bool:
        """Check whether the client has a token left, so that it may connect now."""
        with self._lock:
            return self._now(client)[0] >= 1

    def _now(self, client: int) -> tuple[float, float]:
        now = self._clock()
        left, since = self._left.get(client, (float(self._at_once), now))
        return min(left + (now - since) / self._every_s, self._at_once), now
