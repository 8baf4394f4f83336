"""Look up whole fleets (the devices of all clients) by name, such as `fleet:gpus` or `fleet:phones/1000/100`.

The bundled fleets lie in `fleets.yaml`. A number behind a name divides the speeds of all devices, a second one those of their
links: so that a small model takes as long as a large one would, and devices differ as they do with that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from raafl.devices import catalog
from raafl.errors import nearest

FLEET, FLHETBENCH = "fleet:", "flhetbench:"
FILE = Path(__file__).with_name("fleets.yaml")
_TEXT = re.compile(r"(?P<name>[^/]*)(?:/(?P<speed>[^/]+))?(?:/(?P<link>[^/]+))?")

Rows = list[dict[str, Any]]


@lru_cache(maxsize=1)
def bundled() -> Mapping[str, Any]:
    """Load the fleets (named sets of client devices) that are part of raafl: description, source and devices, by name."""
    import yaml

    data: Mapping[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return data


def is_fleet(text: str) -> bool:
    """Check whether a text names a fleet (set of client devices), and not a device file or a list of devices."""
    return text.startswith((FLEET, FLHETBENCH))


def rows(text: str) -> Rows:
    """Return the devices of a fleet (named set of client devices), as entries of a device file.

    Raises:
        ValueError: there is no such fleet, a number is not above 0, or the folder has no copy of FLHetBench.
    """
    if text.startswith(FLHETBENCH):
        from raafl.devices import flhetbench

        return flhetbench.rows(*flhetbench.parse(text.removeprefix(FLHETBENCH)))
    match = _TEXT.fullmatch(text.removeprefix(FLEET))
    if match is None:
        raise ValueError(f"devices is {text!r}: write fleet:NAME, or fleet:NAME/SLOWER/LINKS_SLOWER")
    if match["name"] not in bundled():
        raise ValueError(
            f"devices is {text!r}: there is no fleet {match['name']!r}; {nearest(match['name'], bundled())}"
        )
    speed, link = (_number(text, match[name]) for name in ("speed", "link"))
    found = [entry for row in bundled()[match["name"]]["devices"] for entry in _entries(row)]
    return found if speed == link == 1 else [_slowed(entry, speed, link) for entry in found]


def files(text: str) -> list[Path]:
    """Return the paths of the files that define the fleet (named set of client devices) ``text``."""
    if not text.startswith(FLHETBENCH):
        return [FILE]
    from raafl.devices import flhetbench

    return flhetbench.files(*flhetbench.parse(text.removeprefix(FLHETBENCH)))


def _entries(row: Mapping[str, Any]) -> Rows:
    """Return the entries of a row; `drawn: N` becomes one entry per seed, so that a smaller fleet gets the first devices."""
    own = {name: value for name, value in row.items() if name != "drawn"}
    return [own] if "drawn" not in row else [own | {"seed": seed} for seed in range(row["drawn"])]


def _number(text: str, digits: str | None) -> float:
    try:
        value = 1.0 if digits is None else float(digits)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"devices is {text!r}: {digits!r} is no number above 0 to divide by; write such as /1000")
    return value


def _slowed(entry: Mapping[str, Any], speed: float, link: float) -> dict[str, Any]:
    """Return an entry with computing speed and link speed divided; a random device is sampled first."""
    name = entry["name"]
    known = catalog.figures(name)
    if catalog.is_drawn(name):
        known = catalog.draw(catalog.catalogue()["generators"][name], entry.get("seed", 0), 0)
    divisors = {"flops_per_s": speed, "bytes_per_s": speed, "down_bytes_per_s": link, "up_bytes_per_s": link}
    return {
        field: value / divisors[field] if field in divisors else value for field, value in {**known, **entry}.items()
    }
