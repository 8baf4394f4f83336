"""What is wrong with the fields of a device profile, in words; and reading numbers from files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_INF = math.inf
RATES = ("flops_per_s", "down_bytes_per_s", "up_bytes_per_s", "memory_bytes")


def number(field: str, value: Any) -> float:
    """Return ``value``, which may be text, as a number; raises `ValueError` that names the field."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{field} is {value!r}; it must be a number") from None


def is_number(value: object) -> bool:
    """Check whether ``value`` is a number, not a truth value and not NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def are_pairs(pairs: object) -> bool:
    """Check whether ``pairs`` is a sequence of two numbers each."""
    if not isinstance(pairs, Sequence) or isinstance(pairs, str):
        return False
    return all(isinstance(w, Sequence) and len(w) == 2 and all(map(is_number, w)) for w in pairs)


def rate_problems(profile: Any) -> Iterator[str]:
    """Yield what is wrong with rates, memory, latency and the price of a launch."""
    for field in RATES:
        value = getattr(profile, field)
        if not is_number(value) or value <= 0:
            remedy = "leave it out for no limit" if field != "flops_per_s" else "measure it with raafl plan --measure"
            yield f"{field} is {value!r}; it must be a number above 0 ({remedy})"
    traffic = profile.bytes_per_s
    if traffic is not None and (not is_number(traffic) or traffic <= 0):
        yield f"bytes_per_s is {traffic!r}; it must be a number above 0 (leave it out to go by flops_per_s alone)"
    for field in ("latency_s", "launch_s"):
        value = getattr(profile, field)
        if not is_number(value) or not 0 <= value < _INF:
            yield f"{field} is {value!r}; it must be a finite number of seconds, 0 or more"


def window_problems(profile: Any) -> Iterator[str]:
    """Yield what is wrong with the hours of availability."""
    windows, period = profile.availability, profile.period_s
    if period is not None and (not is_number(period) or not 0 < period < _INF):
        yield f"period_s is {period!r}; it must be a finite number of seconds above 0"
        return
    if windows is None:
        if period is not None:
            yield f"period_s is {period!r} but availability is not given; give the windows that repeat"
        return
    if not are_pairs(windows) or not windows:
        yield f"availability is {windows!r}; write [start, stop] pairs of seconds, or leave it out for always"
        return
    last = 0.0
    for start, stop in windows:
        if not last <= start < stop:
            yield f"availability has the window [{start}, {stop}); write windows in order, start before stop"
            return
        last = stop
    if period is not None and last > period:
        yield f"availability ends at {last} but period_s is {period}; windows must lie within the period"


def change_problems(profile: Any) -> Iterator[str]:
    """Yield what is wrong with the changes of speed."""
    changes = profile.speed_changes
    if changes is None:
        return
    if not are_pairs(changes) or not changes:
        yield f"speed_changes is {changes!r}; write [seconds, factor] pairs, or leave it out for a steady speed"
        return
    last = -1.0
    for at_s, factor in changes:
        if not last < at_s < _INF or at_s < 0 or not 0 < factor < _INF:
            yield f"speed_changes has [{at_s}, {factor}]; write increasing times, and factors above 0 (availability is for leaving)"
            return
        last = at_s


def joined(windows: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return the windows with those that touch made one."""
    found: list[tuple[float, float]] = []
    for start, stop in windows:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((float(start), float(stop)))
    return tuple(found)
