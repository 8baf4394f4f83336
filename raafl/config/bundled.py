"""Find the configs that are part of the raafl package by name, so that `--config quickstart` works anywhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from raafl.config.argv import name_of
from raafl.errors import BadInput, nearest

_HERE = Path(__file__).parents[1]
_FOLDERS = (_HERE / "configs", _HERE.parent / "configs")  # where configs lie in a wheel, and in a checkout


def folder() -> Path:
    """Return the folder of the configs that are part of raafl."""
    return next((path for path in _FOLDERS if (path / "quickstart.yaml").is_file()), _FOLDERS[0])


def shipped() -> dict[str, Path]:
    """Return the paths of the configs that are part of raafl, by name."""
    return {file.stem: file for file in sorted(folder().glob("*.yaml"))}


def with_paths(argv: Sequence[str]) -> list[str]:
    """Replace the name after each `--config` (NAME or configs/NAME.yaml) by the path of raafl's own config of that name.

    A file in the current folder takes precedence.

    Raises:
        BadInput: there is neither a file nor a config of raafl with that name.
    """
    found: list[str] = []
    for item, before in zip(argv, ["", *argv], strict=False):
        option, sign, value = item.partition("=")
        if before == "--config":
            found.append(_path(item))
        elif option == "--config" and sign:
            found.append(f"{name_of(item)}={_path(value)}")
        else:
            found.append(item)
    return found


def _path(value: str) -> str:
    named = re.fullmatch(r"(?:configs/)?([\w-]+?)(\.yaml)?", value)
    if named is None or value.startswith("-") or Path(value).exists():
        return value
    known = shipped()
    if named[1] in known:
        return str(known[named[1]])
    if named[2] or "/" in value:
        return value
    raise BadInput(
        f"config is '{value}', which is neither a file nor a config that comes with raafl: {nearest(value, known)}"
    )
