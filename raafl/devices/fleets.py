"""Look up whole fleets (the devices of all clients) by name, such as `fleet:gpus` or `fleet:phones/1000/100`.

The bundled fleets lie in `fleets.yaml`. A number behind a name divides the speeds of all devices, a second one those of their
links: so that a small model takes as long as a large one would, and devices differ as they do with that.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import statistics
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from raafl.devices import catalog
from raafl.devices.checks import MOST_SPREAD
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
        return phone_rows(*parse_flhetbench(text.removeprefix(FLHETBENCH)))
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
    return benchmark_files(*parse_flhetbench(text.removeprefix(FLHETBENCH)))


def _entries(row: Mapping[str, Any]) -> Rows:
    """Expand one row of a fleet's file to device entries: `drawn: N` stands for N random devices with the seeds 0 to N - 1."""
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
    """Divide a device entry's computing speed by ``speed`` and its link speed by ``link``.

    If the entry asks for a random device, that is drawn first, and its figures are divided.
    """
    name = entry["name"]
    known = catalog.figures(name)
    if catalog.is_drawn(name):
        known = catalog.draw(catalog.catalogue()["generators"][name], entry.get("seed", 0), 0)
    if speed != 1:  # its small model stands for a large one, whose steps do not wait for kernel launches
        entry = {**entry, "host_op_s": 0.0, "host_product_s": 0.0, "bandwidth_bytes_per_s": math.inf}
    divisors = {"flops_per_s": speed, "bytes_per_s": speed, "down_bytes_per_s": link, "up_bytes_per_s": link}
    return {
        field: value / divisors[field] if field in divisors else value for field, value in {**known, **entry}.items()
    }


# Read the sixteen environments of FLHetBench (Zhang et al., CVPR 2024) from a copy of github.com/Carkham/FLHetBench. An
# environment combines one of four lists of phones' links (MobiPerf) with one of four lists of phones' hours (FLASH).
# raafl contains only digests of these files, since the repository has no licence. A phone's link was measured several
# times, in kbit/s: FLHetBench draws a measurement for each transfer, raafl's profile has their mean as rate and the
# standard deviation of their logarithm as jitter. Hours are windows within several days, which repeat. The files have
# no computing speeds, and FLHetBench draws them independently of the phone: here all devices have the speed of FLASH's
# median phone.

_BYTES_PER_KBIT = 125.0
_MOST_BYTES = 16 << 20
_SAMPLES, _TIMERS = Path("bench/cached_sample_data"), Path("data/cached_timers.json")
DIGESTS = {
    "bench/cached_sample_data/device/case1.json": "20cfd1187a470ae4e97380792b354d2e2bb3682b925b8ad49f94c2b35c9d20ed",
    "bench/cached_sample_data/device/case2.json": "c0e4e08537b7c2358e22e7085968a3749d33e2dd341e190398ee3a00c074a199",
    "bench/cached_sample_data/device/case3.json": "ebc58fe9774a8974d6c125a7e1db7b2c83b1e4511c0587647db846ac9c9260eb",
    "bench/cached_sample_data/device/case4.json": "f1de5e2736c389ecb0ba991f9a04b122de08f13ff53a85a73d3272e081de5bf4",
    "bench/cached_sample_data/state/case1.json": "66e6f4cce29cd9faa465bcbfccf4023afc4bbdfa3d8d681e27ee67273f96028a",
    "bench/cached_sample_data/state/case2.json": "c4646fd311dc4080a8740006ee819313a1fbed4cbe6fbaecf1d05194c91eb437",
    "bench/cached_sample_data/state/case3.json": "65b93b415d6a605c7a73d69a0094128301642c601312abe797a3ba5d923e7680",
    "bench/cached_sample_data/state/case4.json": "4ec17510d4db09f9857af49040d647022a219941bf20e52529146c126829db83",
    "data/cached_timers.json": "a4b0f08431e07174abfc86ce01d07904877880fa069a7deae52ae9b13141ef98",
}
"""SHA-256 of the files of the published copy (2026-11)."""

_log = logging.getLogger(__name__)


def parse_flhetbench(text: str) -> tuple[Path, str, str]:
    """Parse the name of an environment of FLHetBench, `DEVICES-STATES:FOLDER`, such as `2-3:FLHetBench`.

    Returns:
        FOLDER, which has a copy of the benchmark; DEVICES and STATES, 1 to 4, which select one of the benchmark's four
        files of phones' link speeds, and one of its four files of hours in which phones are available.
    """
    match = re.fullmatch(r"([1-4])-([1-4]):(.+)", text)
    if match is None:
        raise ValueError(
            f"devices is 'flhetbench:{text}': write flhetbench:DEVICES-STATES:FOLDER with numbers from 1 to 4, such as "
            "flhetbench:2-3:FLHetBench"
        )
    return Path(match[3]), match[1], match[2]


def benchmark_files(folder: Path, devices: str, states: str) -> list[Path]:
    """Return the paths of the benchmark's three files: link speeds, hours of availability, and recorded times."""
    samples = folder / _SAMPLES
    return [samples / "device" / f"case{devices}.json", samples / "state" / f"case{states}.json", folder / _TIMERS]


def phone_rows(folder: Path, devices: str, states: str) -> list[dict[str, Any]]:
    """Return the phones of the benchmark FLHetBench, with their link speeds and hours, as entries of a device file.

    Raises:
        ValueError: a file is missing or has another form.
    """
    paths = benchmark_files(folder, devices, states)
    for path in paths:
        known = DIGESTS[path.relative_to(folder).as_posix()]
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() != known:
            _log.warning("%s differs from the published copy of FLHetBench: results will too", path)
    phones, users, timers = map(_load, paths)
    speed = catalog.figures("flash-phones")["flops_per_s"]
    if not isinstance(phones, list) or not isinstance(users, list) or not isinstance(timers, dict) or not phones:
        raise ValueError(f"{paths[0].parent.parent} has no lists of phones and users: give a copy of FLHetBench")
    return [
        {
            "name": f"flhetbench-{number}",
            "flops_per_s": speed,
            **_link(phone, f"{paths[0]}: entry {number}"),
            **_hours(timers.get(str(user)), f"{paths[2]}: user {str(user)[:20]}"),
        }
        for number, (phone, user) in enumerate(zip(phones, users, strict=False), start=1)
    ]


def _link(phone: Any, where: str) -> dict[str, float]:
    """Compute the mean rate of a phone's link, used for both directions, and the jitter, from its measurements."""
    measured = phone.get("tcp_speed_results") if isinstance(phone, dict) else None
    if not isinstance(measured, list) or not measured or not all(map(_above_0, measured)):
        raise ValueError(f"{where} has no tcp_speed_results above 0: use FLHetBench's files unchanged")
    rate = statistics.fmean(measured) * _BYTES_PER_KBIT
    spread = statistics.stdev(map(math.log, measured)) if len(measured) > 1 else 0.0
    return {"down_bytes_per_s": rate, "up_bytes_per_s": rate, "link_jitter": min(spread, MOST_SPREAD)}


def _hours(timer: Any, where: str) -> dict[str, Any]:
    """Convert a user's recorded hours to windows in seconds from the trace's start, and the period after which they repeat."""
    try:
        begin, end = float(timer["trace_start"]), float(timer["trace_end"])
        pairs = [(float(start) - begin, float(stop) - begin) for start, stop in timer["ready_time"]]
    except (TypeError, KeyError, ValueError):
        raise ValueError(
            f"{where} has no trace_start, trace_end and ready_time: use FLHetBench's files unchanged"
        ) from None
    windows = [(start, stop) for start, stop in pairs if start != stop]
    if not windows:
        raise ValueError(f"{where} is available at no time (ready_time is empty): use FLHetBench's files unchanged")
    return {"availability": windows, "period_s": end - begin}


def _above_0(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _load(path: Path) -> Any:
    try:
        size = path.stat().st_size
        stamp = path.stat().st_mtime_ns
    except OSError:
        raise ValueError(f"{path} is missing: give a copy of github.com/Carkham/FLHetBench") from None
    if size > _MOST_BYTES:
        raise ValueError(f"{path} has {size} bytes; at most {_MOST_BYTES} are read: use FLHetBench's file unchanged")
    return _parsed(path, stamp)


@lru_cache(maxsize=16)
def _parsed(path: Path, _changed_ns: int) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{path} is not JSON: use FLHetBench's file unchanged") from None
