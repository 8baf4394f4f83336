"""Check the plain values of a command line and its config files, which needs neither torch nor the parts that they name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from raafl.config.argv import expand_trainer, name_of, values
from raafl.config.check import MADE
from raafl.config.experiment import Experiment
from raafl.config.parse import NEEDS_CONFIG, TRUST, config_first, expand_short, make_parser
from raafl.errors import BadInput

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

_PRINTS = ("--help", "-h", "--print_config")


def check_plain(command: str, argv: Sequence[str], *, whole: bool = True) -> None:
    """Raise an error for invalid YAML, unknown names and plain values out of range; print the help if the arguments ask for it.

    Raises:
        BadInput: a value is wrong; the message has a line for every error.
        SystemExit: `--help` was given.
    """
    if any(item in ("--help", "-h") for item in argv):
        make_parser(command, plain=True).parse_args(["--help"])
    argv = expand_trainer(expand_short([item for item in argv if item != TRUST]))
    if any(name_of(item) in _PRINTS or name_of(item).endswith(".help") for item in argv):
        return
    if not argv and whole:
        raise BadInput(NEEDS_CONFIG.format(command))
    argv = config_first(argv)
    resumes = bool(values(argv, "--resume") and not values(argv, "--config"))
    whole = whole and not resumes
    parser = make_parser(command, plain=True)
    try:
        made = _made(parser, argv)
    except BadInput:
        if resumes:  # the run's config has the section's other fields, so that only the full reading can tell
            return
        raise
    lines = _refused(parser, argv, whole) if made is None else _out_of_range(made, whole)
    if lines:
        raise BadInput("\n".join(lines))


def _refused(parser: ArgumentParser, argv: Sequence[str], whole: bool) -> list[str]:
    from raafl.config.messages import PlainErrors

    return PlainErrors(parser, whole=whole).lines(argv)


def _made(parser: ArgumentParser, argv: Sequence[str]) -> Namespace | None:
    """Parse the plain fields and create their dataclasses, which may raise BadInput; None if the parser rejects a value."""
    from argparse import ArgumentError

    try:
        made: Namespace = parser.instantiate(parser.parse_args(_without_parts(argv)))
        return made
    except BadInput:
        raise
    except (ArgumentError, ValueError, TypeError):
        return None


def _without_parts(argv: Sequence[str]) -> list[str]:
    """Return the options without those of model, data, algorithm and partition."""
    kept: list[str] = []
    items = list(argv)
    while items:
        item = items.pop(0)
        if name_of(item).removeprefix("--").partition(".")[0] not in MADE:
            kept.append(item)
        elif "=" not in item and items and not items[0].startswith("--"):
            items.pop(0)
    return kept


def _out_of_range(namespace: Namespace, whole: bool) -> list[str]:
    from raafl.config.problems import plain_problems

    experiment = Experiment(**{field.name: namespace[field.name] for field in fields(Experiment)})
    if not whole:  # on a client these are unset: the server may have created that run folder already
        experiment.output = experiment.resume = None
    try:
        return list(dict.fromkeys(plain_problems(experiment, needs_end=whole)))
    except TypeError:  # a value has a wrong type, which the full parser reports
        return []
