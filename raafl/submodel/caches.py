"""Cache what is computed once per model."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

MAX_CACHED = 512
"""Results remembered of each kind; the oldest goes first."""

_MISSING: Any = object()


class Caches:
    """Cache of results by kind and key. Threads may share it; in the worst case two compute the same result at once."""

    def __init__(self) -> None:
        """Start empty."""
        self._kept: dict[str, OrderedDict[Any, Any]] = {}
        self._lock = threading.Lock()

    def get(self, kind: str, key: Hashable, make: Callable[[], T]) -> T:
        """Return a cached result; compute and store it if it is missing."""
        cache = self._kept.setdefault(kind, OrderedDict())
        found: T = cache.get(key, _MISSING)
        if found is _MISSING:
            found = make()
            with self._lock:
                cache[key] = found
                while len(cache) > MAX_CACHED:
                    cache.popitem(last=False)
        return found

    def clear(self) -> None:
        """Delete all cached results."""
        self._kept.clear()
