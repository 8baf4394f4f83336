"""Check the fields of a device profile, and parse numbers from files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_INF = math.inf
RATES = ("flops_per_s", "down_bytes_per_s", "up_bytes_per_s", "memory_bytes")

# rates within these bounds keep all computed times and costs within a double: the largest task has less than 1e15 FLOPs
# for each of 2**53 samples in each of 1e6 units of work
LEAST_RATE, MOST_RATE = 1e-6, 1e24
MOST_S = 1e12
"""Largest time in a profile in seconds (30,000 years)."""
LEAST_PERIOD_S = 1e-3
LEAST_FACTOR, MOST_FACTOR = 1e-6, 1e6
MOST_SPREAD = 2.0
CHANGES = ("speed_changes", "link_changes")
"""Fields of a profile that are series of times and factors."""


def problems(profile: Any) -> list[str]:
    """List the errors in a profile, one line each."""
    return [
        text for check in (rate_problems, window_problems, change_problems, spread_problems) for text in check(profile)
    ]


def number(field: str, value: Any) -> float:
    """Convert a value, which may be text, to a number; raise a `ValueError` that names the field if that fails."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{field} is {value!r}; it must be a number") from None


def _is_number(value: object) -> bool:
    """Check that a value is an int or float other than NaN, and not a boolean."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:
        return False


def _are_pairs(pairs: object) -> bool:
    """Check that a value is a sequence of pairs of numbers."""
    if not isinstance(pairs, Sequence) or isinstance(pairs, str):
        return False
    return all(isinstance(w, Sequence) and len(w) == 2 and all(map(_is_number, w)) for w in pairs)


def rate_problems(profile: Any) -> Iterator[str]:
    """Yield a message for each error in a profile's speeds, memory, latency and time per kernel launch."""
    for field in RATES:
        value = getattr(profile, field)
        if not _is_rate(value):
            remedy = "leave it out for no limit" if field != "flops_per_s" else "measure it with raafl plan --measure"
            yield f"{field} is {_shown(value)}; it must be a number above 0{_BETWEEN} ({remedy})"
    traffic = profile.bytes_per_s
    if traffic is not None and not _is_rate(traffic):
        yield (
            f"bytes_per_s is {_shown(traffic)}; it must be a number above 0{_BETWEEN} "
            "(leave it out to go by flops_per_s alone)"
        )
    if not _is_rate(profile.bandwidth_bytes_per_s):
        yield (
            f"bandwidth_bytes_per_s is {_shown(profile.bandwidth_bytes_per_s)}; it must be a number above 0{_BETWEEN} "
            "(leave it out to go by flops_per_s alone)"
        )
    for field in ("latency_s", "launch_s", "host_op_s", "host_product_s"):
        value = getattr(profile, field)
        if not _is_number(value) or not 0 <= value <= MOST_S:
            yield f"{field} is {_shown(value)}; it must be a finite number of seconds, 0 or more, at most {MOST_S:g}"


_BETWEEN = f", {LEAST_RATE:g} to {MOST_RATE:g}"


def _is_rate(value: object) -> bool:
    """Check that ``value`` is a rate or size within bounds; infinite counts as no limit."""
    return _is_number(value) and (value == _INF or LEAST_RATE <= value <= MOST_RATE)  # type: ignore[operator]


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a number of more than 20 digits"
    return text if len(text) <= 80 else text[:79] + "…"


def window_problems(profile: Any) -> Iterator[str]:
    """Yield a message for each error in the hours in which a device is available."""
    windows, period = profile.availability, profile.period_s
    if period is not None and (not _is_number(period) or not LEAST_PERIOD_S <= period <= MOST_S):
        yield f"period_s is {_shown(period)}; it must be a finite number of seconds, {LEAST_PERIOD_S:g} to {MOST_S:g}"
        return
    if windows is None:
        if period is not None:
            yield f"period_s is {period!r} but availability is not given; give the windows that repeat"
        return
    if not _are_pairs(windows) or not windows:
        yield f"availability is {_shown(windows)}; write [start, stop] pairs of seconds, or leave it out for always"
        return
    last = 0.0
    for start, stop in windows:
        if not last <= start < stop or not (stop == _INF or stop <= MOST_S):
            yield (
                f"availability has the window [{_shown(start)}, {_shown(stop)}); write windows in order, start before stop, "
                f"at most {MOST_S:g} s"
            )
            return
        last = stop
    if period is not None and last > period:
        yield f"availability ends at {last} but period_s is {period}; windows must lie within the period"


def change_problems(profile: Any) -> Iterator[str]:
    """Yield a message for each error in a profile's changes of computing and link speed over time."""
    given = [name for name in CHANGES if getattr(profile, name) is not None]
    problems = [text for name in given if (text := _pairs_problem(name, getattr(profile, name)))]
    yield from problems
    repeat_s = profile.repeat_s
    if repeat_s is None or problems:
        return
    if not _is_number(repeat_s) or not LEAST_PERIOD_S <= repeat_s <= MOST_S:
        yield f"repeat_s is {_shown(repeat_s)}; it must be a finite number of seconds, {LEAST_PERIOD_S:g} to {MOST_S:g}"
    elif not given and getattr(profile, "recorded", None) is None:
        yield f"repeat_s is {repeat_s!r} but nothing repeats; give speed_changes, link_changes or recorded"
    for name in given:
        last = getattr(profile, name)[-1][0]
        if _is_number(repeat_s) and last >= repeat_s:
            yield f"{name} has a change at {last:g} s but repeat_s is {repeat_s:g}; changes must lie before it"


def _pairs_problem(name: str, changes: Any) -> str | None:
    if not _are_pairs(changes) or not changes:
        return f"{name} is {_shown(changes)}; write [seconds, factor] pairs, or leave it out for a steady rate"
    last = -1.0
    for at_s, factor in changes:
        if not last < at_s <= MOST_S or at_s < 0 or not LEAST_FACTOR <= factor <= MOST_FACTOR:
            return (
                f"{name} has [{_shown(at_s)}, {_shown(factor)}]; write increasing times up to {MOST_S:g} s, and factors "
                f"above 0, {LEAST_FACTOR:g} to {MOST_FACTOR:g} (availability is for leaving)"
            )
        last = at_s
    return None


def spread_problems(profile: Any) -> Iterator[str]:
    """Yield a message for each error in a profile's random variation (jitter and drift)."""
    for field in ("speed_jitter", "link_jitter", "speed_drift", "link_drift"):
        value = getattr(profile, field)
        if not _is_number(value) or not 0 <= value <= MOST_SPREAD:
            yield (
                f"{field} is {_shown(value)}; it must be the standard deviation of a factor's logarithm, 0 to {MOST_SPREAD:g} "
                "(0.1 is about 10 %)"
            )
    drift_s, drifts = profile.drift_s, bool(profile.speed_drift or profile.link_drift)
    if drift_s is None and drifts:
        yield "drift_s is not given; speed_drift and link_drift need it: the seconds in which they wander, such as 600"
    elif drift_s is not None and (not _is_number(drift_s) or not LEAST_PERIOD_S <= drift_s <= MOST_S):
        yield f"drift_s is {_shown(drift_s)}; it must be a finite number of seconds, {LEAST_PERIOD_S:g} to {MOST_S:g}"
    elif drift_s is not None and not drifts:
        yield f"drift_s is {drift_s!r} but nothing drifts; give speed_drift or link_drift, or leave it out"


def merge_windows(windows: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Merge time windows that touch or overlap."""
    found: list[tuple[float, float]] = []
    for start, stop in windows:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((float(start), float(stop)))
    return tuple(found)
