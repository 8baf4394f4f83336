"""Refer to a profile's long series (availability, speed changes) by digest, on the wire and in the journal."""

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
    """Return the digest of a series of number pairs, independent of how the numbers are typed."""
    text = json.dumps([[None if one is None else float(one) for one in pair] for pair in pairs])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def long_series(profile: Mapping[str, Any]) -> dict[str, Any]:
    """Return the long series of a profile's plain data, by digest."""
    found = (profile.get(name) for name in FIELDS)
    return {digest(pairs): pairs for pairs in found if pairs is not None and len(pairs) > MOST_PAIRS}


def shortened(profile: Mapping[str, Any], but: MutableMapping[str, Any] | None = None) -> dict[str, Any]:
    """Replace each long series in a profile's plain data by ``{"digest": HEX}``.

    Args:
        profile: plain data.
        but: series already written out; a new one stays written out and is added here. None = replace all.
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
    """Undo `shortened`.

    Args:
        profile: plain data with digests.
        known: series by digest.

    Raises:
        ValueError: a digest is not known.
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
    """Return the name of a series with too many pairs to be written out, or None."""
    for name in FIELDS:
        pairs = profile.get(name)
        if isinstance(pairs, list) and len(pairs) > MOST_PAIRS:
            return f"{name} has {len(pairs)} pairs, at most {MOST_PAIRS} are sent"
    return None
