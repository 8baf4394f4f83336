"""Format what `raafl algorithms` prints: a table, paragraphs, or all options of one algorithm."""

from __future__ import annotations

import inspect
import io
import re
import textwrap
from collections.abc import Callable
from typing import Any


def table(rows: list[dict[str, str]], width: int) -> str:
    """Return the algorithms as a table, ``width`` characters wide."""
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


def whole(factory: Callable[..., Any], row: dict[str, str], width: int) -> str:
    """Describe an algorithm's five parts and its factory's arguments, as text.

    Args:
        factory: factory of the algorithm.
        row: entry of the algorithm in the list of algorithms.
        width: number of columns at which lines wrap.
    """
    texts = re.findall(r"^ {4}(\w+): (.*?)(?=^ {4}\w+: |^\S|\Z)", inspect.getdoc(factory) or "", re.M | re.S)
    parameters = inspect.signature(factory).parameters
    lines = [paragraphs([row], width), "", "  arguments (--algorithm.ARGUMENT VALUE, or init_args in a config):"]
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


def paragraphs(rows: list[dict[str, str]], width: int) -> str:
    """Return the algorithms as paragraphs, for narrow terminals."""
    lines = []
    for row in rows:
        lines.append(f"{row['name']}  ({row['paper']})")
        for part in ("sample", "select", "local", "trigger", "merge"):
            lines += textwrap.wrap(row[part], max(width, 40), initial_indent=f"  {part:9}", subsequent_indent=" " * 11)
        lines.append("")
    return "\n".join(lines[:-1])
