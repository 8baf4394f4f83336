"""Check the command lines that files of launch/ have against the options that raafl takes."""

from __future__ import annotations

from collections.abc import Sequence

from raafl.config.argv import name_of, with_paths
from raafl.config.experiment import ABOUT, SECTIONS
from raafl.config.remote_options import split


def check(command: str, options: Sequence[str]) -> None:
    """Fail on an option that ``raafl COMMAND`` does not have.

    Args:
        command: serve, join or fit.
        options: as on a command line.
    """
    rest = split(command, options)[1] if command in ("serve", "join") else list(options)
    for item in with_paths(rest):
        name = name_of(item).removeprefix("--")
        known = name in {"config", "json", *ABOUT} or name.split(".")[0] in {
            "model",
            "data",
            "algorithm",
            *SECTIONS,
        }
        assert known or not item.startswith("--"), f"raafl {command} has no option --{name}"
