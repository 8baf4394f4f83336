"""Device profiles: how fast a client computes, how fast its links are, how much it holds, and when it is there.

A profile is plain data and knows nothing of models: it turns FLOPs and bytes into seconds. The simulator uses it as its
cost model, selectors use it to size submodels. Times are seconds, sizes bytes, rates per second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

_INF = math.inf
_RATES = ("flops_per_s", "down_bytes_per_s", "up_bytes_per_s", "memory_bytes")
_NUMBERS = (*_RATES, "bytes_per_s", "latency_s", "period_s")

Windows = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class TaskTime:
    """Predicted duration of one task: receive the submodel, train it, send it back (seconds)."""

    down_s: float
    compute_s: float
    up_s: float

    @property
    def total_s(self) -> float:
        """Seconds from assignment to arrival."""
        return self.down_s + self.compute_s + self.up_s


@dataclass(frozen=True, slots=True)
class Profile:
    """What one client can do.

    Args:
        name: what people call this kind of device.
        flops_per_s: training FLOPs per second it sustains (not the data sheet's peak).
        down_bytes_per_s: link speed from the coordinator to the client; infinite means free.
        up_bytes_per_s: link speed from the client to the coordinator; infinite means free.
        latency_s: seconds added to each transfer, once down and once up.
        memory_bytes: memory available to training; no submodel whose predicted peak is above it is ever assigned.
        availability: windows `[start, stop)` in seconds during which the client may work; None is always.
        period_s: when given, the windows repeat every so many seconds (a day is 86400).
        bytes_per_s: memory traffic it sustains; its time then adds to that of the FLOPs, which small submodels need less of
            than of traffic. None = not looked at: ``flops_per_s`` stands for both.

    Raises:
        ValueError: a field is out of range; every bad field is named, with its value and what to write instead.
    """

    name: str = "default"
    flops_per_s: float = 1e9
    down_bytes_per_s: float = _INF
    up_bytes_per_s: float = _INF
    latency_s: float = 0.0
    memory_bytes: float = _INF
    availability: tuple[tuple[float, float], ...] | None = None
    period_s: float | None = None
    bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        """Check every field; touching windows are joined, so that each boundary is a real change."""
        problems = [*_rate_problems(self), *_window_problems(self)]
        if problems:
            raise ValueError(f"device profile {self.name!r}: " + "; ".join(problems))
        if self.availability is not None:
            object.__setattr__(self, "availability", _joined(self.availability))

    def task_time(self, flops: float, down_bytes: int, up_bytes: int, moved_bytes: float = 0.0) -> TaskTime:
        """Predict a task's duration from its training FLOPs, the bytes each way, and those its operations read and write."""
        traffic_s = 0.0 if self.bytes_per_s is None else moved_bytes / self.bytes_per_s
        return TaskTime(
            down_s=self.latency_s + down_bytes / self.down_bytes_per_s,
            compute_s=flops / self.flops_per_s + traffic_s,
            up_s=self.latency_s + up_bytes / self.up_bytes_per_s,
        )

    def available(self, at_s: float) -> bool:
        """Whether the client may work at this time."""
        if self.availability is None:
            return True
        return any(start <= at_s < stop for start, stop in self._windows_near(at_s))

    def next_change_s(self, at_s: float) -> float:
        """The first time after `at_s` at which `available` changes; infinite when it never does.

        Uses the same arithmetic as `available`, so that the change is there at exactly the time returned.
        """
        if self.availability is None or self.availability == ((0.0, self.period_s),):
            return _INF
        edges: dict[float, int] = {}
        for start, stop in self._windows_near(at_s):
            edges[start] = edges.get(start, 0) + 1
            edges[stop] = edges.get(stop, 0) - 1
        changes = [edge for edge, step in edges.items() if step != 0 and edge > at_s]
        return min(changes, default=_INF)

    def _windows_near(self, at_s: float) -> Iterator[tuple[float, float]]:
        """Windows as absolute times: all of them, or those of the cycles around `at_s` when they repeat."""
        windows = self.availability or ()
        if self.period_s is None:
            yield from windows
            return
        cycle = math.floor(at_s / self.period_s)
        for k in range(cycle - 1, cycle + 3):
            for start, stop in windows:
                # A window that ends with the period ends where the next cycle starts, to the last bit.
                end = (k + 1) * self.period_s if stop == self.period_s else k * self.period_s + stop
                yield k * self.period_s + start, end


@dataclass(frozen=True, slots=True)
class Device(Profile):
    """A profile and how many clients have it: one entry of `devices:` in a config or a device file.

    Args:
        count: number of consecutive clients with this profile.
    """

    count: int = 1

    def __post_init__(self) -> None:
        """Check the profile and the count."""
        Profile.__post_init__(self)
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"device {self.name!r}: count is {self.count!r}; it must be a whole number, 1 or more")

    @property
    def profile(self) -> Profile:
        """The profile alone."""
        return Profile(**{f.name: getattr(self, f.name) for f in fields(Profile)})


def assign(devices: Sequence[Profile], num_clients: int, seed: int | None = None) -> list[Profile]:
    """Give each client a profile; entry `i - 1` belongs to client `i`.

    The devices, each repeated `count` times, form a pattern. It is dealt in order and starts again when it is used up;
    of a pattern longer than the number of clients the first ones are taken. With a seed the pattern is shuffled first,
    which draws a random cohort from a long list of devices.

    Raises:
        ValueError: no devices or no clients; or, without a seed, counts above 1 that add up to more clients than there
            are, where taking the first ones would quietly drop whole kinds of device.
    """
    if num_clients < 1:
        raise ValueError(f"num_clients is {num_clients}; there must be at least 1 client")
    if not devices:
        raise ValueError("devices is empty; name at least one device, or leave it out")
    pattern: list[Profile] = []
    for device in devices:
        pattern += [device.profile] * device.count if isinstance(device, Device) else [device]
    counted = any(isinstance(device, Device) and device.count > 1 for device in devices)
    if counted and seed is None and len(pattern) > num_clients:
        raise ValueError(
            f"the counts in devices add up to {len(pattern)} but num_clients is {num_clients}; "
            f"lower the counts or set num_clients to {len(pattern)}"
        )
    if seed is not None:
        pattern = [pattern[i] for i in _permutation(len(pattern), seed)]
    return [pattern[i % len(pattern)] for i in range(num_clients)]


def two_classes(
    num_clients: int,
    share_slow: float,
    slow_flops_per_s: float = 1e9,
    fast_flops_per_s: float = 3e9,
    *,
    down_bytes_per_s: float = _INF,
    up_bytes_per_s: float = _INF,
    latency_s: float = 0.0,
    slow_memory_bytes: float = _INF,
    fast_memory_bytes: float = _INF,
    seed: int | None = None,
) -> list[Profile]:
    """Two classes of client, as in the experiments of Fed-RAA: extremely low (1) and low (3) capability.

    Args:
        num_clients: N.
        share_slow: beta, the share of class 1; `beta * N` is rounded to the nearest client, halves up.
        slow_flops_per_s: speed of class 1.
        fast_flops_per_s: speed of class 3; by default three times the other, the ratio of the two class numbers.
        down_bytes_per_s: link speed to every client.
        up_bytes_per_s: link speed from every client.
        latency_s: seconds added to each transfer.
        slow_memory_bytes: memory of class 1.
        fast_memory_bytes: memory of class 3.
        seed: the paper does not say which clients are slow. Without a seed the first ones are, which reads well in
            tables; give a seed to scatter them (a partition that hands out data in client order would otherwise go
            together with speed).

    Raises:
        ValueError: `share_slow` is outside 0..1, or a profile field is out of range.
    """
    if num_clients < 1:
        raise ValueError(f"num_clients is {num_clients}; there must be at least 1 client")
    if not 0.0 <= share_slow <= 1.0:
        raise ValueError(f"share_slow is {share_slow}; it is a share of the clients, from 0 to 1")
    links = (down_bytes_per_s, up_bytes_per_s, latency_s)
    slow = Profile("slow", slow_flops_per_s, *links, slow_memory_bytes)
    fast = Profile("fast", fast_flops_per_s, *links, fast_memory_bytes)
    num_slow = math.floor(share_slow * num_clients + 0.5)
    order = range(num_clients) if seed is None else _permutation(num_clients, seed)
    slow_clients = set(list(order)[:num_slow])
    return [slow if i in slow_clients else fast for i in range(num_clients)]


def load_devices(path: str | Path) -> list[Device]:
    """Read a device file: YAML or JSON (a list of mappings, alone or under `devices:`) or CSV (one device per row).

    Keys and CSV column names are the fields of `Device`; an empty CSV cell leaves the default. In CSV, availability is
    written `start:stop` with `;` between windows.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file cannot be read as devices; every bad entry is named.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no device file at {path}; give the path of a .yaml, .json or .csv file")
    rows = _read_rows(path)
    devices, problems = [], []
    for number, row in enumerate(rows, start=1):
        try:
            devices.append(_device(row))
        except ValueError as error:
            problems.append(f"entry {number}: {error}")
    if problems:
        raise ValueError(f"{path}: " + "\n".join(problems))
    if not devices:
        raise ValueError(f"{path} holds no devices; write at least one entry")
    return devices


def _read_rows(path: Path) -> list[Any]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".csv":
        import csv

        return [{key: cell for key, cell in row.items() if cell} for row in csv.DictReader(text.splitlines())]
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ValueError(f"{path}: unknown kind of device file {path.suffix!r}; use .yaml, .json or .csv")
    import yaml

    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    rows = data.get("devices") if isinstance(data, Mapping) else data
    if not isinstance(rows, list):
        raise ValueError(f"{path} must hold a list of devices, alone or under the key 'devices'")
    return rows


def _device(row: Any) -> Device:
    """One device from the mapping a file holds; numbers may be strings (YAML reads 2e9 as text)."""
    known = [f.name for f in fields(Device)]
    if not isinstance(row, Mapping):
        raise ValueError(f"{row!r} is not a mapping; write fields such as name and flops_per_s")
    unknown = sorted(str(key) for key in row if key not in known)
    if unknown:
        raise ValueError(f"unknown field {', '.join(unknown)}; the fields are {', '.join(known)}")
    values = dict(row)
    for key in _NUMBERS:
        if isinstance(values.get(key), str):
            values[key] = _number(key, values[key])
    if "count" in values:
        count = _number("count", values["count"])
        values["count"] = int(count) if count.is_integer() else count
    if isinstance(values.get("availability"), str):
        pairs = [window.split(":") for window in values["availability"].split(";")]
        values["availability"] = [tuple(_number("availability", edge) for edge in pair) for pair in pairs]
    values["name"] = str(values.get("name", "default"))
    return Device(**values)


def _number(field: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{field} is {value!r}; it must be a number") from None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def _rate_problems(profile: Profile) -> Iterator[str]:
    for field in _RATES:
        value = getattr(profile, field)
        if not _is_number(value) or value <= 0:
            remedy = "leave it out for no limit" if field != "flops_per_s" else "measure it with raafl.devices.measure"
            yield f"{field} is {value!r}; it must be a number above 0 ({remedy})"
    traffic = profile.bytes_per_s
    if traffic is not None and (not _is_number(traffic) or traffic <= 0):
        yield f"bytes_per_s is {traffic!r}; it must be a number above 0 (leave it out to go by flops_per_s alone)"
    if not _is_number(profile.latency_s) or not 0 <= profile.latency_s < _INF:
        yield f"latency_s is {profile.latency_s!r}; it must be a finite number of seconds, 0 or more"


def _window_problems(profile: Profile) -> Iterator[str]:
    windows, period = profile.availability, profile.period_s
    if period is not None and (not _is_number(period) or not 0 < period < _INF):
        yield f"period_s is {period!r}; it must be a finite number of seconds above 0"
        return
    if windows is None:
        if period is not None:
            yield f"period_s is {period!r} but availability is not given; give the windows that repeat"
        return
    if not _are_pairs(windows) or not windows:
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


def _are_pairs(windows: object) -> bool:
    if not isinstance(windows, Sequence) or isinstance(windows, str):
        return False
    return all(isinstance(w, Sequence) and len(w) == 2 and all(map(_is_number, w)) for w in windows)


def _joined(windows: Iterable[tuple[float, float]]) -> Windows:
    joined: list[tuple[float, float]] = []
    for start, stop in windows:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((float(start), float(stop)))
    return tuple(joined)


def _permutation(n: int, seed: int) -> list[int]:
    import numpy as np

    return [int(i) for i in np.random.Generator(np.random.PCG64(seed)).permutation(n)]
