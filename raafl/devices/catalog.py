"""Look up the device profiles that are part of raafl, and the source of each of their figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raafl.devices.checks import LEAST_PERIOD_S

if TYPE_CHECKING:
    import numpy as np

FIGURES = ("flops_per_s", "memory_bytes", "down_bytes_per_s", "up_bytes_per_s", "latency_s")
"""Fields of a profile that a shipped one gives."""
HOST_FIGURES = ("host_op_s", "host_product_s", "bandwidth_bytes_per_s")
"""Fields that the shipped profiles of some GPUs give, too: those by which their launches are predicted."""

_FILE = Path(__file__).with_name("shipped.yaml")


@lru_cache(maxsize=1)
def catalogue() -> Mapping[str, Any]:
    """Load the file of devices that are part of raafl, with the source of each number.

    The result has ``devices`` (profiles by name) and ``generators`` (by name, distributions of random devices).
    """
    import yaml

    data: Mapping[str, Any] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return data


def figures(name: str) -> dict[str, float]:
    """Return the speed, memory and link fields of the device profile ``name``; empty if the name is unknown.

    If ``name`` means a distribution of random devices, such as flash-phones, the result is its median device.
    """
    found = catalogue()
    if name in found["devices"]:
        device = found["devices"][name]
        given = (*FIGURES, *(field for field in HOST_FIGURES if field in device))
        return {field: float(device[field]["value"]) for field in given}
    if name in found["generators"]:
        return median(found["generators"][name])
    return {}


def watts(name: str) -> float | None:
    """Return the power in watts that a device uses while it computes; None if it is not known."""
    figure = catalogue()["devices"].get(name, {}).get("watts")
    return None if figure is None else float(figure["value"])


def is_drawn(name: str) -> bool:
    """Check whether a name, such as flash-phones, means random devices: a different one is drawn for each client."""
    return name in catalogue()["generators"]


def names() -> list[str]:
    """Return all device names that a config may use: first profiles, then generators of random devices."""
    return [*catalogue()["devices"], *catalogue()["generators"]]


def rows() -> list[dict[str, Any]]:
    """Return a row for each number in the device profiles: device, field, value and source."""
    found = []
    for name, device in catalogue()["devices"].items():
        for field in (*FIGURES, "bandwidth", *(one for one in (*HOST_FIGURES, "watts") if one in device)):
            found.append(
                {"device": name, "field": field, "value": device[field]["value"], "source": device[field]["source"]}
            )
    return found


Windows = tuple[tuple[float, float], ...]
PRESENCES = ("always", "diurnal", "markov", "leaves")

DAY_S = 86400.0
MOST_DRAWN_S = 1e10
"""Largest mean number of seconds (300 years) of a stay or an absence that is drawn."""
_STAYS = 32  # number of on-off cycles in the availability of a markov device, which then repeats


def _generator(seed: int, *numbers: int) -> np.random.Generator:
    import numpy as np

    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *numbers])))


def median(law: Mapping[str, Any]) -> dict[str, float]:
    """Return the profile fields (speed, memory, link) of the median device of a random distribution of devices."""
    return _device(law, law["score"]["mean_log"], (0.0, 0.0, 0.0))


def draw(law: Mapping[str, Any], seed: int, number: int) -> dict[str, float]:
    """Draw the fields of a random device; the same seed and number always give the same device.

    The benchmark score of the device is drawn from a truncated lognormal distribution; speed and memory follow from it.
    Link speeds are lognormal and correlated with the score.
    """
    rng, score = _generator(seed, number), law["score"]
    least, most = math.log(score["least"]), math.log(score["most"])
    log_score = math.inf
    while not least <= log_score <= most:
        log_score = rng.normal(score["mean_log"], score["sd_log"])
    down, other, memory = (float(z) for z in rng.normal(size=3))
    rho = law["link_correlation"]
    return _device(law, float(log_score), (down, rho * down + math.sqrt(1 - rho * rho) * other, memory))


def _device(law: Mapping[str, Any], log_score: float, normals: tuple[float, float, float]) -> dict[str, float]:
    speed, memory, down, up = (law[k] for k in ("flops_per_s", "memory_bytes", "down_bytes_per_s", "up_bytes_per_s"))
    gigabytes = math.exp(memory["intercept"] + memory["slope"] * log_score + memory["sd_log"] * normals[2])
    return {
        "flops_per_s": math.exp(speed["intercept"] + speed["slope"] * log_score),
        "memory_bytes": memory["share"] * gigabytes * 1e9,
        "down_bytes_per_s": math.exp(down["mean_log"] + down["sd_log"] * normals[0]),
        "up_bytes_per_s": math.exp(up["mean_log"] + up["sd_log"] * normals[1]),
        "latency_s": float(law["latency_s"]),
    }


def presence(
    kind: str, on_s: float | None, off_s: float | None, seed: int, number: int
) -> tuple[Windows | None, float | None]:
    """Draw the hours in which a device is available; return time windows and the period after which they repeat.

    Both are None if the device is always available.

    `off_s`: seconds for which it is away, or their mean; None for diurnal = the rest of a day.
    """
    if kind == "always" or on_s is None:
        return None, None
    rng = _generator(seed, number, 1)
    if kind == "leaves":
        return ((0.0, float(rng.exponential(on_s))),), None
    if kind == "diurnal":
        period_s = DAY_S if off_s is None else on_s + off_s
        start = float(rng.uniform(0.0, period_s))
        over = start + on_s - period_s
        return (((start, start + on_s),) if over <= 0 else ((0.0, over), (start, period_s))), period_s
    away_s = off_s or 0.0
    windows, at = [], 0.0 if rng.uniform() < on_s / (on_s + away_s) else float(rng.exponential(away_s))
    for _ in range(_STAYS):
        stop = at + float(rng.exponential(on_s))
        windows += [(at, stop)] if stop > at else []  # equal by rounding, if on_s is tiny beside the time
        at = stop + float(rng.exponential(away_s))
    return tuple(windows), at


def presence_problems(kind: str, on_s: float | None, off_s: float | None, has_windows: bool) -> list[str]:
    """List the errors in the settings of random availability, one line each.

    `on_s`: mean seconds available; None = not given.
    `off_s`: mean seconds away; None = not given.
    """
    if kind not in PRESENCES:
        return [f"presence is {kind!r}; write {', '.join(PRESENCES[:-1])} or {PRESENCES[-1]}"]
    if kind == "always":
        given = [f"{name} is {value!r}" for name, value in (("on_s", on_s), ("off_s", off_s)) if value is not None]
        return [f"{', '.join(given)} but presence is 'always'; say diurnal, markov or leaves"] if given else []
    if has_windows:
        return [f"presence is {kind!r} but availability is given as well; leave out one of the two"]
    problems = []
    for name, value, needed in (("on_s", on_s, True), ("off_s", off_s, kind == "markov")):
        if value is None and needed:
            problems.append(f"{name} is not given; presence {kind} needs it, in seconds")
        elif value is not None and not (isinstance(value, int | float) and LEAST_PERIOD_S <= value <= MOST_DRAWN_S):
            problems.append(
                f"{name} is {value!r}; it must be a number of seconds, {LEAST_PERIOD_S:g} to {MOST_DRAWN_S:g}"
            )
    if kind == "diurnal" and not problems and off_s is None and on_s is not None and on_s >= DAY_S:
        problems.append(f"on_s is {on_s!r}, a day or more; give less, or off_s as well")
    if kind == "leaves" and off_s is not None:
        problems.append(f"off_s is {off_s!r} but presence leaves never comes back; leave it out")
    return problems
