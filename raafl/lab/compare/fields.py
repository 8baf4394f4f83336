"""Read the fields of comparison files, and check the type of each value."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from raafl.config.options import direction
from raafl.errors import BadInput, nearest
from raafl.plain_yaml import read_yaml

Options = tuple[str, ...]
"""Options of `raafl simulate`, as words of a command line."""

_PLAIN: Mapping[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def read_mapping(path: Path, what: str, remedy: str) -> dict[str, Any]:
    """Read a YAML file that must be a mapping.

    Raises:
        BadInput: the file is missing, not YAML, not a mapping, or a mapping in it has a key twice.
    """
    try:
        raw = read_yaml(path, what, "is not YAML")
    except OSError as error:
        near = nearest(path.stem, [file.stem for file in path.parent.glob("*.yaml")], none="name a YAML file")
        raise BadInput(f"{what} cannot be read: {error.strerror}: {near}") from None
    if not isinstance(raw, dict):
        raise BadInput(f"{what} is not a mapping: {remedy}")
    return raw


def check_fields(given: Mapping[str, Any], kind: type, prefix: str) -> dict[str, Any]:
    """Return the fields that have a value; a field that is null has its default.

    Fields of plain types (numbers, text, true or false) are checked; the others have readers of their own.

    Raises:
        BadInput: a name is no field of the dataclass, or a value has another type than the field.
    """
    check_names(given, kind, prefix)
    hints = get_type_hints(kind)
    found = {name: value for name, value in given.items() if value is not None}
    for name, value in found.items():
        hint = hints[name]
        plain = [one for one in (get_args(hint) if isinstance(hint, UnionType) else (hint,)) if one in _PLAIN]
        if plain and not any(_is_plain(value, one) for one in plain):
            raise BadInput(f"{prefix}{name} is {value!r:.80}: give {' or '.join(_PLAIN[one] for one in plain)}")
    return found


def with_direction(given: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Return the fields with ``maximize``, which is false by default if smaller values of the metric are better."""
    return {"maximize": direction(given.get("metric", metric)) != "min", **given}


def _is_plain(value: object, kind: type) -> bool:
    return type(value) in ((int, float) if kind is float else (kind,))  # type: true is no number


def check_names(given: Mapping[str, Any], kind: type, prefix: str) -> None:
    """Raise `BadInput` if a mapping has a key that is not the name of a field of a dataclass."""
    names = [one.name for one in fields(kind)]
    for name in given:
        if name not in names:
            raise BadInput(f"{prefix}{name} is unknown: {nearest(str(name), names)}")


def check_folder_name(name: str) -> None:
    """Raise `BadInput` unless the name of a comparison can be the name of a folder."""
    if not name or "/" in name or name in (".", "..") or not name.isprintable():
        raise BadInput(
            f"name is {name!r:.80}, which is no name of a folder: leave out '/', and choose the folder by --output"
        )


def mapping(name: str, value: object) -> Mapping[str, Any]:
    """Check that the value of a field is a mapping, and return it; else raise a `BadInput` that names the field."""
    if not isinstance(value, dict):
        raise BadInput(f"{name} is {value!s:.80}: give a mapping")
    return value


def labelled(name: str, value: object) -> dict[str, Any]:
    """Check that the value of a field is a mapping, and return it with labels that are text, as those of rows are.

    `value`: value of the field; None = no entries.

    Raises:
        BadInput: the value is no mapping, or two of its labels are equal as text.
    """
    found: dict[str, Any] = {}
    for label, entry in mapping(name, {} if value is None else value).items():
        if str(label) in found:
            raise BadInput(f"{name} has '{label}' twice: give each label once")
        found[str(label)] = entry
    return found


def words(name: str, text: object) -> Options:
    """Split a text into command-line options, as a shell does; raise `BadInput` if it is not text, or a quote is not closed."""
    if text is None:
        return ()
    if isinstance(text, list) and all(isinstance(word, str | int | float) for word in text):
        return tuple(map(str, text))
    if not isinstance(text, str):
        raise BadInput(f"{name} is {text!s:.80}: give the options in one string, such as '--model.lr 0.1'")
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise BadInput(f"{name} is {text!r:.80}: {error}") from None


def seeds_of(name: str, value: object) -> tuple[int, ...]:
    """Check that the value of a field is a list of seeds, and return them; else raise a `BadInput` that names the field."""
    if not isinstance(value, list) or not all(type(seed) is int and seed >= 0 for seed in value):
        raise BadInput(f"{name} is {value!s:.80}: give a list of whole numbers from 0")
    return tuple(value)


def numbers(name: str, value: object) -> Iterator[float]:
    """Check that the value of a field is a list of numbers, and yield them; else raise a `BadInput` that names the field."""
    if not isinstance(value, list) or not all(
        type(number) in (int, float) and math.isfinite(number) for number in value
    ):
        raise BadInput(f"{name} is {value!s:.80}: give a list of numbers")
    return map(float, value)
