"""The device profiles that raafl ships, by name, each figure with its source; and the kinds that are drawn."""

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
    """Load the bundled data file: ``devices`` and ``generators`` by name, and the source of each figure in ``shares``."""
    import yaml

    data: Mapping[str, Any] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return data


def figures(name: str) -> dict[str, float]:
    """Return the fields of a bundled profile, or of a generator's median device; empty if the name is unknown."""
    found = catalogue()
    if name in found["devices"]:
        return {field: float(found["devices"][name][field]["value"]) for field in FIGURES}
    if name in found["generators"]:
        from raafl.devices.sampling import median

        return median(found["generators"][name])
    return {}


def watts(name: str) -> float | None:
    """Return the power of a bundled device at work, in watts; None where its profile has none."""
    figure = catalogue()["devices"].get(name, {}).get("watts")
    return None if figure is None else float(figure["value"])


def is_drawn(name: str) -> bool:
    """Check whether ``name`` is a generator, which draws another device for each client."""
    return name in catalogue()["generators"]


def names() -> list[str]:
    """Return all device names that a config may use: fixed profiles, then generators."""
    return [*catalogue()["devices"], *catalogue()["generators"]]


def rows() -> list[dict[str, Any]]:
    """Return a row for each bundled figure: device, field, value and source."""
    found = []
    for name, device in catalogue()["devices"].items():
        for field in (*FIGURES, "bandwidth", *(["watts"] if "watts" in device else [])):
            found.append(
                {"device": name, "field": field, "value": device[field]["value"], "source": device[field]["source"]}
            )
    return found
