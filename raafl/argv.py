"""Reading a command line before the config's parser does, which needs torch: `--option VALUE` or `--option=VALUE`."""

from __future__ import annotations

from collections.abc import Sequence


def name_of(item: str) -> str:
    """Return the option that an item names, without a value behind `=`."""
    return item.partition("=")[0]


def values(argv: Sequence[str], option: str) -> list[str]:
    """Return what ``argv`` gives for an option, each time; an option at the very end has the empty value."""
    return [
        item.partition("=")[2] if "=" in item else following
        for item, following in zip(argv, [*argv, ""][1:], strict=True)
        if name_of(item) == option
    ]


def names_section(argv: Sequence[str], section: str) -> bool:
    """Return whether ``argv`` gives a section of the config, or any field of it: `--data`, `--data.batch_size`."""
    return any(name_of(item).split(".")[0] == section for item in argv)


def without(argv: Sequence[str], *options: str) -> list[str]:
    """Return ``argv`` without some options and their values."""
    kept: list[str] = []
    items = iter(argv)
    for item in items:
        if name_of(item) not in options:
            kept.append(item)
        elif "=" not in item:
            next(items, None)
    return kept
