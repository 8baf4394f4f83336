"""Name a profile's long series, hours of availability and changes of speed, by digest: on the wire and in the journal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, MutableMapping
from typing import Any

FIELDS = ("availability", "speed_changes")
MOST_PAIRS = 100
"""Pairs of a series that are written out; a longer one is named by its digest."""

Known = Mapping[str, Any]
"""Series by digest."""


def digest(pairs: Any) -> str:
    """Return the digest of a series of pairs of numbers, however they are typed."""
    text = json.dumps([[None if one is None else float(one) for one in pair] for pair in pairs])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def long_series(profile: Mapping[str, Any]) -> dict[str, Any]:
    """Return the long series of a profile's plain data, by digest."""
    found = (profile.get(name) for name in FIELDS)
    return {digest(pairs): pairs for pairs in found if pairs is not None and len(pairs) > MOST_PAIRS}


def shortened(profile: Mapping[str, Any], but: MutableMapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a profile's plain data with each long series as ``{"digest": HEX}``.

    With ``but``, the series written out before, a new one is left as it is and added there.
    """
    short = dict(profile)
    for name in FIELDS:
        pairs = profile.get(name)
        if pairs is None or len(pairs) <= MOST_PAIRS:
            continue
        key = digest(pairs)
        if but is not None and key not in but:
            but[key] = pairs
        else:
            short[name] = {"digest": key}
    return short


def restored(profile: Mapping[str, Any], known: Known) -> dict[str, Any]:
    """Return the plain data that `shortened` was given.

    Raises:
        ValueError: a digest that is not known.
    """
    whole = dict(profile)
    for name in FIELDS:
        if isinstance(named := profile.get(name), Mapping):
            key = named.get("digest")
            if not isinstance(key, str) or key not in known:
                raise ValueError(f"{name} is a series of digest {str(key)[:32]}, which is not known here")
            whole[name] = known[key]
    return whole


def too_long(profile: Mapping[str, Any]) -> str | None:
    """Name a series with more pairs than may be written out, or None."""
    for name in FIELDS:
        pairs = profile.get(name)
        if isinstance(pairs, list) and len(pairs) > MOST_PAIRS:
            return f"{name} has {len(pairs)} pairs, at most {MOST_PAIRS} are sent"
    return None
