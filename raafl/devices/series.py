"""Replace long series in device profiles (availability, changes of speed) by digests, in messages and in the journal."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from raafl.devices.checks import CHANGES

FIELDS = ("availability", *CHANGES)
MOST_PAIRS = 100
"""Pairs of a series that are written out; a longer one is named by its digest. A client writes out no changes at all."""
_DIGEST = re.compile(r"[0-9a-f]{32}")

Known = Mapping[str, Any]
"""Series by digest."""


def digest(pairs: Iterable[Sequence[float | None]]) -> str:
    """Compute a digest by which two series of pairs of numbers can be compared; 1 and 1.0 give the same digest."""
    text = json.dumps([[None if one is None else float(one) for one in pair] for pair in pairs])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def long_series(profile: Mapping[str, Any], longer_than: int = MOST_PAIRS) -> dict[str, Any]:
    """Return a device profile's time series that have more than ``longer_than`` pairs, as a mapping from digest to series.

    A profile may have three: windows of availability, changes of computing speed, and changes of link speed.
    """
    found = (profile.get(name) for name in FIELDS)
    return {digest(pairs): pairs for pairs in found if pairs is not None and len(pairs) > longer_than}


def shortened(profile: Mapping[str, Any], but: MutableMapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a copy of a device profile in which ``{"digest": HEX}`` stands for time series of over 100 pairs.

    `but`: series that were already written in full elsewhere, by digest. Only these are replaced; any other series
    stays as it is and is added to this mapping. None = all long series are replaced.
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


def as_sent(profile: Mapping[str, Any]) -> dict[str, Any]:
    """Return a device profile in the short form that a client sends to the server, with digests in place of time series.

    Only windows of availability, up to 100 of them, are sent in full.
    """
    changes = {name: {"digest": digest(pairs)} for name in CHANGES if (pairs := profile.get(name)) is not None}
    return {**shortened(profile), **changes}


def full_profile(profile: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the full profile of a client from the short form that it sent and the profile in the server's config.

    Each digest is replaced by the server's time series with that digest. If the client sent no changes of computing or
    link speed, those of the server's profile are used.

    Raises:
        ValueError: the server's profile has no time series with a digest that the client sent.
    """
    whole = restored(profile, long_series(own, longer_than=0))
    if all(whole.get(name) is None for name in CHANGES):
        whole |= {name: own[name] for name in (*CHANGES, "repeat_s") if name in own}
    return whole


def restored(profile: Mapping[str, Any], known: Known) -> dict[str, Any]:
    """Return a device profile with time series in place of their digests; the inverse of `shortened`.

    Raises:
        ValueError: a digest is unknown.
    """
    whole = dict(profile)
    for name in FIELDS:
        if isinstance(named := profile.get(name), Mapping):
            key = named.get("digest")
            if not isinstance(key, str) or key not in known:
                raise ValueError(
                    f"{name} is a time series (digest {str(key)[:32]}) that the server's config does not have: give "
                    "client and server the same devices"
                )
            whole[name] = known[key]
    return whole


def problem_of_sent(profile: Mapping[str, Any]) -> str | None:
    """Return a message about the first error in the time series of a profile that a client sent; None = no error."""
    for name in FIELDS:
        value = profile.get(name)
        if isinstance(value, Mapping):
            if set(value) != {"digest"} or not isinstance(key := value["digest"], str) or not _DIGEST.fullmatch(key):
                return f"{name} is a mapping without a digest of 32 hexadecimal digits"
        elif name in CHANGES and value is not None:
            return f"{name} is sent in full, where only its digest is allowed"
        elif isinstance(value, list) and len(value) > MOST_PAIRS:
            return f"{name} has {len(value)} pairs, at most {MOST_PAIRS} are sent"
    return None
