"""Look up the device profiles that are part of raafl, and the source of each of their figures."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

FIGURES = ("flops_per_s", "memory_bytes", "down_bytes_per_s", "up_bytes_per_s", "latency_s")
"""Fields of a profile that a shipped one gives."""

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
        return {field: float(found["devices"][name][field]["value"]) for field in FIGURES}
    if name in found["generators"]:
        from raafl.devices.sampling import median

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
        for field in (*FIGURES, "bandwidth", *(["watts"] if "watts" in device else [])):
            found.append(
                {"device": name, "field": field, "value": device[field]["value"], "source": device[field]["source"]}
            )
    return found
