"""Print which dimensions of a model can shrink, which cannot, and why (`raafl axes`)."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser
from collections.abc import Sequence

from raafl.config.argv import names_section, own_options
from raafl.config.plain_check import check_plain
from raafl.errors import BadInput, fraction
from raafl.lean_import import quick_imports

HELP = """\
usage: raafl axes --config FILE [--FIELD VALUE ...] [--rate RATE ...] [--json]
       raafl axes --model CLASS --data CLASS [--model.FIELD VALUE ...] [--rate RATE ...] [--json]

Lists the axes of a model: dimensions of parameters whose units shrink together, each proven on two samples of the data; what a
share of every axis leaves of parameters and FLOPs, the residual width whole; and what stays whole, with the reason and the line
of code. The model is made without values, and nothing is trained. Every field of a config is an option, as in
`raafl simulate --help`.

  --rate RATE ...       shares of each axis, above 0 and at most 1 (default 0.5 0.25)
  --json                print JSON and nothing else"""

_ALONE = ("--algorithm", "fed_raa", "--clients", "1")
"""Defaults without a config: a method that leaves the model whole, and all of the data."""


def parser() -> ArgumentParser:
    """Return a parser for the options of `raafl axes` that are not fields of the config."""
    found = ArgumentParser(prog="raafl axes", exit_on_error=False, add_help=False, allow_abbrev=False)
    found.add_argument("--rate", type=float, nargs="+")
    return found


def command(argv: Sequence[str], width: int, *, terminal: bool) -> str:
    """List the axes of a config's model (dimensions that submodels may cut, such as hidden neurons), as text to print.

    Raises:
        BadInput: an option or the config is invalid, or the data do not fit the model.
    """
    if any(option in argv for option in ("--help", "-h")):
        return HELP
    own, rest = own_options(parser(), argv)
    for rate in own.rate or ():
        fraction("rate", rate)
    if not names_section(rest, "--config"):
        if not (names_section(rest, "--model") and names_section(rest, "--data")):
            raise BadInput("axes needs a model and data: give --config FILE, or --model CLASS and --data CLASS")
        rest = [*_ALONE, *rest]
    check_plain("axes", rest, whole=False)
    with quick_imports():
        from raafl.config.parse import parse
        from raafl.lab.plan.dry import World
        from raafl.lab.plan.show import axes_text
        from raafl.parts.select.axis_report import RATES, facts

        parsed = parse("axes", rest)
    world = World(parsed.experiment)
    begin_s = time.perf_counter()
    found = facts(world.cut_submodels(), own.rate or RATES, world.batch_size)
    found["seconds"] = time.perf_counter() - begin_s
    if parsed.as_json:
        return json.dumps(found, allow_nan=False)
    return f"{axes_text(found, width, terminal=terminal)}\n\nfound and proven in {found['seconds']:.1f} s"
