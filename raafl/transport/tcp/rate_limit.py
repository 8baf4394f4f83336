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
        """Give each client ``at_once`` tokens, refilled by one every ``every_s`` seconds up to that number."""
        self._at_once, self._every_s, self._clock = at_once, every_s, clock
        self._left: dict[int, tuple[float, float]] = {}  # turns left, and when that was
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
