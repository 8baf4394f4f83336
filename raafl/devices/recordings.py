"""Read a recording: a CSV file with the speed and availability of one or several devices over time.

Columns: ``time_s``, increasing for each device; any of ``speed`` and ``link`` (factors of what the profile states) and
``available`` (1 or 0); and ``device``, a label, where the file has several devices. An empty cell changes nothing. Before its
first row a device has factor 1 and is available.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from raafl.devices.checks import LEAST_FACTOR, MOST_FACTOR, MOST_S
from raafl.errors import no_utf8

MOST_BYTES = 64 << 20
_FACTORS = {"speed": "speed_changes", "link": "link_changes"}
_COLUMNS = ("time_s", "device", *_FACTORS, "available")
_NEEDED = "time_s and any of speed, link and available (and device, of several)"


@dataclass(slots=True)
class Recording:
    """Recorded changes of the speed, link and availability of one device."""

    last_s: float = -1.0  # time of the last row, in seconds
    # changes of computing and link speed, as pairs `[seconds, factor]`, by name of the field of `Profile`
    series: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    # changes of availability, as pairs `[seconds, whether the device is available]`
    states: list[tuple[float, bool]] = field(default_factory=list)

    def fields(self, repeat_s: float | None) -> dict[str, Any]:
        """Convert the recording to fields of `Profile`.

        `repeat_s`: seconds after which the recording starts again; None = its last values stay.

        Raises:
            ValueError: the recording is longer than ``repeat_s``, or the device is never available.
        """
        if repeat_s is not None and self.last_s >= repeat_s:
            raise ValueError(
                f"has a row at {self.last_s:g} s but repeat_s is {repeat_s:g}; give a larger repeat_s, or a shorter "
                "file"
            )
        found: dict[str, Any] = {name: tuple(pairs) for name, pairs in self.series.items()}
        if not self.series:
            found["repeat_s"] = None  # which is of factors alone
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
        found = [recording.fields(device.repeat_s) for recording in recordings]
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


def _add(recording: Recording, row: Mapping[str, Any], where: str) -> None:
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
        recording.states.append((at_s, bool(_number(row, "available", where, 0, 1, "1 or 0"))))


def _number(row: Mapping[str, Any], column: str, where: str, least: float, most: float, wanted: str) -> float:
    text = row.get(column)
    try:
        value = float(text or "")
    except (TypeError, ValueError):
        value = math.nan
    if not least <= value <= most or value < 0:
        raise ValueError(f"has {column} {text!r} in {where}; write {wanted}")
    return value
