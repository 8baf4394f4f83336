"""Read device files (YAML, JSON or CSV), and write device profiles as YAML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from raafl.atomic_file import atomic_file
from raafl.devices.catalog import names
from raafl.devices.checks import CHANGES, number
from raafl.devices.profiles import Device
from raafl.errors import nearest, no_utf8
from raafl.plain_yaml import dump_yaml, load_yaml, yaml_problem

_NUMBERS = (
    "flops_per_s",
    "down_bytes_per_s",
    "up_bytes_per_s",
    "memory_bytes",
    "bytes_per_s",
    "latency_s",
    "launch_s",
    "host_op_s",
    "host_product_s",
    "bandwidth_bytes_per_s",
    "period_s",
    "on_s",
    "off_s",
    "repeat_s",
    "speed_jitter",
    "link_jitter",
    "speed_drift",
    "link_drift",
    "drift_s",
)
_WHOLE = ("count", "seed")
_PAIRS = ("availability", *CHANGES)


def read_rows(path: Path) -> list[Any]:
    """Read the entries of a device file, without checking them.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not YAML, JSON or CSV, or does not contain a list.
    """
    if not path.is_file():
        raise FileNotFoundError(no_file(str(path)))
    try:
        text = path.read_text(encoding="utf-8-sig")  # "-sig": spreadsheets begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} {no_utf8(error)}") from None
    if path.suffix == ".csv":
        return _cells(text, path)
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ValueError(f"{path}: unknown kind of device file {path.suffix!r}; use .yaml, .json or .csv")
    return _entries(text, str(path))


def _cells(text: str, path: Path) -> list[Any]:
    """Parse a CSV file to one mapping a row, from column name to text, without empty cells."""
    import csv

    rows = csv.DictReader(text.splitlines())
    names = list(rows.fieldnames or ())
    for sign, word in ((";", "semicolons"), ("\t", "tabs")):
        if len(names) == 1 and sign in names[0]:
            raise ValueError(f"{path} has {word} between its columns: save it with commas between its columns")
    return [{key: cell for key, cell in row.items() if cell} for row in rows]


def no_file(text: str) -> str:
    """Return the error message for a config's `devices` that is not the path of a file, with a suggestion."""
    if text == "auto" or text.isdecimal():
        return (
            f"devices is {text}: it says what the clients can do, by names, fields or a file, as in [{{name: "
            "a100}]; leave it out if all are equal; their number is `clients`, the hardware that is used "
            "`fabric.accelerator`"
        )
    if text in names():
        return f"no device file at {text}; to have devices of that name, give a list: [{{name: {text}}}]"
    return f"no device file at {text}; give the path of a .yaml, .json or .csv file, or a list such as [{{name: a100}}]"


def is_list(text: str) -> bool:
    """Check whether a text is itself a list of devices in YAML, and not a path."""
    return text.lstrip().startswith(("[", "{")) or "\n" in text


def read_list(text: str) -> list[Any]:
    """Parse a list of devices given as YAML text.

    Raises:
        ValueError: the text is not YAML, or does not contain a list.
    """
    return _entries(text, f"devices, given as {' '.join(text.split())!r:.100},")


def _entries(text: str, where: str) -> list[Any]:
    import yaml

    try:
        data = load_yaml(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not valid YAML: {yaml_problem(error)}") from error
    rows = data.get("devices") if isinstance(data, Mapping) else data
    if not isinstance(rows, list):
        raise ValueError(f"{where} must hold a list of devices, alone or under the key 'devices'")
    return rows


def values(row: object, known: Iterable[str]) -> dict[str, Any]:
    """Parse the fields of one entry of a device file; numbers and pairs (``start:stop;start:stop``) may be given as text.

    Raises:
        ValueError: the entry is not a mapping, has an unknown field, or has text where a number is needed.
    """
    known = list(known)
    if not isinstance(row, Mapping):
        raise ValueError(f"{row!r} is not a mapping; write fields such as name and flops_per_s")
    unknown = sorted(str(key) for key in row if key not in known)
    if unknown:
        raise ValueError(f"unknown field {', '.join(unknown)}; {nearest(unknown[0], known)}")
    found = dict(row)
    for key in _NUMBERS:
        if isinstance(found.get(key), str):
            found[key] = number(key, found[key])
    for key in _WHOLE:
        if found.get(key) is not None:
            value = number(key, found[key])
            found[key] = int(value) if value.is_integer() else value
    for key in _PAIRS:
        pairs = found.get(key)
        if isinstance(pairs, str):
            pairs = [pair.split(":") for pair in pairs.split(";")]
        if isinstance(pairs, list):
            found[key] = [_numbers(key, pair) if isinstance(pair, list) else pair for pair in pairs]
    found["name"] = "default" if found.get("name") is None else str(found["name"])
    return found


def _numbers(key: str, pair: list[Any]) -> tuple[Any, ...]:
    """Convert the texts in a pair to numbers; 1e-05, as JSON writes it, is a text in YAML, which wants a decimal point."""
    return tuple(number(key, edge) if isinstance(edge, str) else edge for edge in pair)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]], comment: str = "") -> None:
    """Write entries as a YAML device file, so that `load_devices` reads the same numbers; fields that are None are left out.

    Raises:
        OSError: the file cannot be written.
    """
    said = [{key: value for key, value in row.items() if value is not None} for row in rows]
    text = dump_yaml({"devices": said}, default_flow_style=None, width=1000, allow_unicode=True)
    with atomic_file(path) as file:
        file.write(("".join(f"# {line}\n" for line in comment.splitlines()) + text).encode())


def num_devices(devices: str | Iterable[Any]) -> int:
    """Count devices: a text for `load_devices`, or entries, of which one without a ``count`` is one device."""
    entries = load_devices(devices) if isinstance(devices, str) else devices
    counts = (getattr(entry, "count", 1) for entry in entries)
    # str and tuple have a method `count`, which is no number
    return sum(count if isinstance(count, int) else 1 for count in counts)


def load_devices(path: str | Path) -> list[Device]:
    """Read a device file: YAML, JSON or CSV, with one device per entry or row.

    In place of a path, the text may be the list itself, such as ``[{name: a100}]``, or the name of a fleet, such as
    ``fleet:gpus``.

    Keys and CSV column names are the fields of `Device`; an empty CSV cell means the default. In CSV, pairs are written
    `start:stop` or `seconds:factor`, with `;` between them.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file cannot be read as devices; the message lists every wrong entry.
    """
    from raafl.devices import fleets

    known = [f.name for f in fields(Device) if f.init]
    devices, problems = [], []
    text = path if isinstance(path, str) and is_list(path) else None
    if isinstance(path, str) and fleets.is_fleet(path):
        rows: Sequence[object] = fleets.rows(path)
    else:
        rows = read_rows(Path(path)) if text is None else read_list(text)
    path = "devices" if text is not None else path
    for place, row in enumerate(rows, start=1):
        try:
            devices.append(Device(**values(row, known)))
        except ValueError as error:
            problems.append(f"entry {place}: {error}")
    if problems:
        raise ValueError(f"{path}: " + "\n".join(problems))
    if not devices:
        raise ValueError(f"{path} holds no devices; write at least one entry")
    return devices
