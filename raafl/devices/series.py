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
    """Compute the digest of a series of pairs of numbers; equal numbers of different types give the same digest."""
    text = json.dumps([[None if one is None else float(one) for one in pair] for pair in pairs])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def long_series(profile: Mapping[str, Any], longer_than: int = MOST_PAIRS) -> dict[str, Any]:
    """Return the series of a profile that have more than ``longer_than`` pairs, by digest."""
    found = (profile.get(name) for name in FIELDS)
    return {digest(pairs): pairs for pairs in found if pairs is not None and len(pairs) > longer_than}


def shortened(profile: Mapping[str, Any], but: MutableMapping[str, Any] | None = None) -> dict[str, Any]:
    """Replace each long series in a profile by its digest, ``{"digest": HEX}``; return the new profile.

    Args:
        profile: profile as plain data.
        but: series that were already written in full, by digest; a new one is left in full and added here. None =
            replace all.
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
    """Return a profile as a client sends it: plain numbers, short availability, and digests of other series."""
    changes = {name: {"digest": digest(pairs)} for name in CHANGES if (pairs := profile.get(name)) is not None}
    return {**shortened(profile), **changes}


def as_known(profile: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the digests in a client's profile by the series in the server's profile of that client.

    If the client's profile has no changes of speed, the server's are used, since the server emulates them.

    Raises:
        ValueError: the server's profile has no series with a digest that the client sent.
    """
    whole = restored(profile, long_series(own, longer_than=0))
    if all(whole.get(name) is None for name in CHANGES):
        whole |= {name: own[name] for name in (*CHANGES, "repeat_s") if name in own}
    return whole


def restored(profile: Mapping[str, Any], known: Known) -> dict[str, Any]:
    """Replace the digests in a profile by their series; the inverse of `shortened`.

    Args:
        profile: plain data of the profile, with digests.
        known: series, by digest.

    Raises:
        ValueError: a digest is unknown.
    """
    whole = dict(profile)
    for name in FIELDS:
        if isinstance(named := profile.get(name), Mapping):
            key = named.get("digest")
            if not isinstance(key, str) or key not in known:
                raise ValueError(
                    f"{name} is a time series with the digest {str(key)[:32]}, which the server's config does not have"
                )
            whole[name] = known[key]
    return whole


def problem_of_sent(profile: Mapping[str, Any]) -> str | None:
    """Describe the error in a series of a client's profile; None = no error."""
    for name in FIELDS:
        value = profile.get(name)
        if isinstance(value, Mapping):
            if set(value) != {"digest"} or not isinstance(key := value["digest"], str) or not _DIGEST.fullmatch(key):
                return f"{name} is named by no digest"
        elif name in CHANGES and value is not None:
            return f"{name} is written out, and only its digest is sent"
        elif isinstance(value, list) and len(value) > MOST_PAIRS:
            return f"{name} has {len(value)} pairs, at most {MOST_PAIRS} are sent"
    return None
