"""Read a recording: a CSV file with the speed and availability of one or several devices over time.

Columns: ``time_s``, increasing for each device; any of ``speed`` and ``link`` (factors of what the profile states) and
``available`` (1 or 0); and ``device``, a label, where the file has several devices. An empty cell changes nothing. Before its
first row a device has factor 1 and is available.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from raafl.devices.checks import CHANGES, LEAST_FACTOR, MOST_FACTOR, MOST_S
from raafl.errors import no_utf8

MOST_BYTES = 64 << 20
_FACTORS = {"speed": "speed_changes", "link": "link_changes"}
_COLUMNS = ("time_s", "device", *_FACTORS, "available")
_NEEDED = "time_s and any of speed, link and available (and device, of several)"


@dataclass(slots=True)
class Recording:
    """Recorded changes of the speed, link and availability of one device."""

    last_s: float = -1.0  # seconds at the last row
    # changes of computing and link speed as pairs `[seconds, factor]`, by field of `Profile`
    series: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    # changes of availability as pairs `[seconds, whether available]`
    states: list[tuple[float, bool]] = field(default_factory=list)

    def fields(self, device: Any) -> dict[str, Any]:
        """Convert the recording to fields of the profile of ``device``, whose ``repeat_s`` is None where its last values stay.

        Raises:
            ValueError: the recording is longer than ``repeat_s``, or the device is never available.
        """
        repeat_s: float | None = device.repeat_s
        if repeat_s is not None and self.last_s >= repeat_s:
            raise ValueError(
                f"has a row at {self.last_s:g} s but repeat_s is {repeat_s:g}; give a larger repeat_s, or a shorter "
                "file"
            )
        found: dict[str, Any] = {name: tuple(pairs) for name, pairs in self.series.items()}
        if not self.series and all(getattr(device, name) is None for name in CHANGES):
            found["repeat_s"] = None  # repetition applies to speed factors only
        if not self.states:
            return found
        windows = tuple(self._windows(math.inf if repeat_s is None else repeat_s))
        if not windows:
            raise ValueError("has a device that is never available; leave it out of the file")
        return {**found, "availability": windows, "period_s": repeat_s}

    def _windows(self, end_s: float) -> Iterator[tuple[float, float]]:
        since: float | None = 0.0
        for at_s, is_there in self.states:
            if is_there and since is None:
                since = at_s
            elif not is_there and since is not None:
                if since < at_s:
                    yield since, at_s
                since = None
        if since is not None:
            yield since, end_s


def problems(device: Any) -> list[str]:
    """List the errors in a device's field ``recorded``: an unreadable file, or other fields that set the same values."""
    if device.recorded is None:
        return []
    shown = f"recorded is {device.recorded!r}"
    try:
        recordings = load(device.recorded)
        found = [recording.fields(device) for recording in recordings]
    except ValueError as error:
        return [f"{shown}, which {error}"]
    given = {name for one in found for name, value in one.items() if value is not None and name != "period_s"}
    twice = [
        name for name in (*_FACTORS.values(), "availability") if name in given and getattr(device, name) is not None
    ]
    if "availability" in given and device.presence != "always":
        twice.append("presence")
    return [f"{shown}, but {', '.join(twice)} is given as well; leave out one of the two"] if twice else []


def load(path: str) -> tuple[Recording, ...]:
    """Read the recording of each device in a file, in the order in which the devices appear.

    Raises:
        ValueError: the file is not a recording; the message, such as "has no rows; ...", is meant to be put after the
            file's name.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"is not a file; give the path of a CSV file with columns {_NEEDED}")
    stat = file.stat()
    if stat.st_size > MOST_BYTES:
        raise ValueError(f"has {stat.st_size} bytes; at most {MOST_BYTES} are read: give fewer devices or rows")
    return _read(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=64)
def _read(path: str, _changed_ns: int, _size: int) -> tuple[Recording, ...]:
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            names = list(rows.fieldnames or ())
            if "time_s" not in names or not {*_FACTORS, "available"} & set(names) or not set(names) <= set(_COLUMNS):
                raise ValueError(f"has the columns {', '.join(names)[:80]!r}; it must have {_NEEDED}")
            found: dict[str, Recording] = {}
            for row in rows:
                recording = found.setdefault(row.get("device") or "", Recording())
                _add(recording, row, f"line {rows.line_num}")
    except UnicodeDecodeError as error:
        raise ValueError(no_utf8(error)) from None
    except (OSError, csv.Error) as error:
        raise ValueError(f"cannot be read ({error}); give a CSV file that you may read") from None
    if not found:
        raise ValueError("has no rows; write at least one")
    return tuple(found.values())


def _add(recording: Recording, row: Mapping[Any, Any], where: str) -> None:
    if any(row.get(None, ())):  # a decimal comma, for instance, moves all cells behind it
        raise ValueError(f"has more cells than columns in {where}; write one for each column")
    at_s = _number(row, "time_s", where, recording.last_s, MOST_S, "increasing seconds for each device, 0 or more")
    if at_s <= recording.last_s:
        raise ValueError(
            f"has time_s {at_s:g} in {where} after {recording.last_s:g}; write increasing seconds for each device"
        )
    recording.last_s = at_s
    for column, name in _FACTORS.items():
        if row.get(column):
            factor = _number(
                row, column, where, LEAST_FACTOR, MOST_FACTOR, "a factor above 0 (available 0 is for leaving)"
            )
            recording.series.setdefault(name, []).append((at_s, factor))
    if row.get("available"):
        available = _number(row, "available", where, 0, 1, "1 or 0")
        if not available.is_integer():
            raise ValueError(f"has available {row['available']!r} in {where}; write 1 or 0")
        recording.states.append((at_s, bool(available)))


def _number(row: Mapping[str, Any], column: str, where: str, least: float, most: float, wanted: str) -> float:
    text = row.get(column)
    try:
        value = float(text or "")
    except (TypeError, ValueError):
        value = math.nan
    if not least <= value <= most or value < 0:
        raise ValueError(f"has {column} {text!r} in {where}; write {wanted}")
    return value


FIELDS = ("availability", *CHANGES)
MOST_PAIRS = 100
"""Largest number of pairs of a series that is sent in full; a longer one is sent as a digest, and a client's own never in full."""
_DIGEST = re.compile(r"[0-9a-f]{32}")

Known = Mapping[str, Any]
"""Series of changes, by digest."""


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
