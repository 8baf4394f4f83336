"""Run a table or figure of a paper as a comparison, or list the papers that raafl can reproduce (`raafl reproduce`)."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict

from raafl.commands.compare import options_in, run, with_common
from raafl.lab.compare.papers import Paper, catalogue, paper


def reproduce(argv: Sequence[str]) -> str:
    """Run the experiments behind a table or figure of a paper and return their results; without a table, list all tables.

    Raises:
        BadInput: a paper, table or option is unknown, the size of the experiments (`--scale`) is neither small nor full, or
            the table cannot be reproduced.
        RunFailed: some runs failed, or a replay gave another result.
        KeyboardInterrupt: the user ended it; the same command continues it.
    """
    options = options_in(parser(), argv)
    if options.table is None:
        papers = list(catalogue().values()) if options.paper is None else [paper(options.paper)]
        return json.dumps([_as_json(one) for one in papers]) if options.json else "\n\n".join(map(_listed, papers))
    return run(paper(options.paper).exhibit(options.table).comparison(options.scale), options)


def parser() -> ArgumentParser:
    """Return a parser for the options of `raafl reproduce`."""
    found = ArgumentParser(
        prog="raafl reproduce",
        exit_on_error=False,
        description="Run a table or figure of a paper as a comparison: rows, seeds and searches are those of its file in "
        "configs/papers. Without a table, list what there is.",
    )
    found.add_argument("paper", nargs="?", metavar="PAPER", help="such as fed-raa")
    found.add_argument("table", nargs="?", metavar="TABLE", help="such as table-2-mnist")
    found.add_argument(
        "--scale",
        choices=("small", "full"),
        default="small",
        help="small: what two cores do; full: the paper's setting (default: small)",
    )
    return with_common(found)


def _listed(one: Paper) -> str:
    lines = [f"{one.name}: {one.title}"]
    width = max(map(len, one.exhibits), default=0)
    for exhibit in one.exhibits.values():
        state = f"cannot be reproduced: {exhibit.missing}" if exhibit.missing else f"[{', '.join(exhibit.scales)}]"
        lines.append(
            f"  {exhibit.name:<{width}}  {exhibit.shows}  {state}{'  ' + exhibit.note if exhibit.note else ''}"
        )
    return "\n".join(lines)


def _as_json(one: Paper) -> dict[str, object]:
    return {"paper": one.name, "title": one.title, "tables": [asdict(exhibit) for exhibit in one.exhibits.values()]}
