"""List the algorithms (`raafl algorithms`), or describe one with all its options."""

from __future__ import annotations

import inspect
import io
import json
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from raafl.errors import BadInput, one_of
from raafl.lean_import import quick_imports

HELP = """\
usage: raafl algorithms [NAME ...] [--json]

The algorithms and their five answers; of one named, all it takes; of auto, how it chooses and among what."""
_TABLE_FROM = 120
"""Smallest width of a terminal, in columns, for which the list is printed as a table."""


def command(argv: Sequence[str], width: int, *, terminal: bool) -> str:
    """Return a list of all algorithms, or a description of those that are named, as text to print.

    Raises:
        BadInput: an option is unknown, or there is no algorithm of that name.
    """
    if any(item in ("--help", "-h") for item in argv):
        return HELP
    with quick_imports():
        from raafl.algorithms import ALGORITHMS, AUTO, described

    names = [arg for arg in argv if arg != "--json"]
    for name in names:
        if name.startswith("-"):
            raise BadInput(f"unknown option '{name}': raafl algorithms takes names and --json only")
        one_of("algorithm", name, [*ALGORITHMS, AUTO])
    if AUTO in names:
        from raafl.lab.plan.choose import Table

        known = Table.load()
        return json.dumps(known.to_json()) if "--json" in argv else known.text()
    rows = [ALGORITHMS[name]().describe() for name in names] or described()
    if "--json" in argv:
        return json.dumps(rows, indent=2)
    if names:
        return "\n\n".join(describe(ALGORITHMS[row["name"]], row, width) for row in rows)
    listed = table(rows, width) if width >= _TABLE_FROM else _paragraphs(rows, width)
    about = f"{AUTO}  raafl chooses one of them before the run: see `raafl algorithms {AUTO}`"
    return "\n".join([listed, "", *textwrap.wrap(about, width)])


def table(rows: list[dict[str, str]], width: int) -> str:
    """Format the list of algorithms as a table that is ``width`` characters wide."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0), show_edge=False)
    for column in rows[0]:
        shown.add_column(column, no_wrap=column == "name")
    for row in rows:
        shown.add_row(*row.values())
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as text:
        console.print(shown)
    return "\n".join(line.rstrip() for line in text.get().rstrip().splitlines())


def describe(factory: Callable[..., Any], row: dict[str, str], width: int) -> str:
    """Describe one algorithm in words: the parts of which it is made, such as its merge rule, and its arguments."""
    texts = documented_arguments(factory)
    parameters = inspect.signature(factory).parameters
    lines = [_paragraphs([row], width), "", "  arguments (--algorithm.ARGUMENT VALUE, or init_args in a config):"]
    indent = max([12, *(len(name) for name, _ in texts)]) + 1
    for name, text in texts:
        default = parameters[name].default
        shown = (
            "" if default is None else f" (default: {str(default).lower() if default in (True, False) else default})"
        )
        lines += textwrap.wrap(
            " ".join(text.split()) + shown,
            max(width, 40),
            initial_indent=f"    {name:{indent}}",
            subsequent_indent=" " * (indent + 4),
        )
    return "\n".join(lines)


def documented_arguments(factory: Callable[..., Any]) -> list[tuple[str, str]]:
    """Return the arguments of a function with their texts, as its docstring has them under "Args:"."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.getdoc(factory) or "", re.M | re.S)
    return re.findall(r"^ {4}(\w+): (.*?)(?=^ {4}\w+: |\Z)", section[1], re.M | re.S) if section else []


def _paragraphs(rows: list[dict[str, str]], width: int) -> str:
    """Format the methods as paragraphs, for a terminal that is too narrow for a table."""
    lines = []
    for row in rows:
        lines.append(f"{row['name']}  ({row['paper']})")
        for part in ("sample", "select", "local", "trigger", "merge"):
            lines += textwrap.wrap(row[part], max(width, 40), initial_indent=f"  {part:9}", subsequent_indent=" " * 11)
        lines.append("")
    return "\n".join(lines[:-1])
