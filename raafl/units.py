"""Format durations, sizes, shares and quantities for people, in a unit that suits the number."""

from __future__ import annotations

import math

_TIMES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def duration(seconds: float) -> str:
    """Format a duration in seconds: 0.42 s, 12.3 s, 2.0 min, 3.5 h, 1.2 d."""
    for unit, name in _TIMES:
        if seconds >= unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.1f} s" if seconds >= 9.95 else f"{seconds:.2g} s"


def size(num_bytes: float) -> str:
    """Format a number of bytes with three digits: 512 B, 30 kB, 1.5 MB; infinity as "no limit"."""
    if math.isinf(num_bytes):
        return "no limit"
    for unit, name in _SIZES:
        # 0.9995: a size just below the unit would be rounded up to 1000 of the smaller unit
        if num_bytes >= 0.9995 * unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes:.0f} B"


def percent(share: float) -> str:
    """Format a share as a percentage: 0.4 %, 25 %, 100 %; below 10 % with up to two significant digits."""
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.2g} %"


def quantity(number: int, noun: str) -> str:
    """Format a number of things, such as 0 clients, 1 client, 2 clients; ``noun`` is in the singular, with a plural in s."""
    return f"{number} {noun}" + "s" * (number != 1)
