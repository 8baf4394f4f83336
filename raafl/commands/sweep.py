"""Search the settings of one config (`raafl sweep SPEC.yaml`), or write the search as a sweep of W&B's (`--wandb`)."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from raafl.commands.compare import options_in, run, with_common
from raafl.lab.compare.compared import best_of, read_sweep
from raafl.lab.compare.comparison import folder_of
from raafl.plain_yaml import dump_yaml


def sweep(argv: Sequence[str]) -> str:
    """Run the search that a file describes; return its table and the best settings, or the file of W&B's sweep.

    Raises:
        BadInput: an option or the file is wrong; raised before any run starts.
        RunFailed: all trials failed, or a run was interrupted from outside.
        KeyboardInterrupt: the user ended it; the same command continues it.
    """
    options: Namespace = options_in(parser(), argv)
    found = read_sweep(options.file)
    if options.wandb:
        return dump_yaml(found.wandb(), width=1000).rstrip()
    comparison = found.comparison()
    options.rows, options.output = None, folder_of(comparison.name, options.output, "sweeps")
    shown = run(comparison, options)
    if options.json or options.plan or options.verify is not None:
        return shown
    return f"{shown}\n\n{best_of(json.loads((options.output / 'result.json').read_text()))}"


def parser() -> ArgumentParser:
    """Return a parser for the options of `raafl sweep`."""
    found = ArgumentParser(
        prog="raafl sweep",
        exit_on_error=False,
        description="Search fields of a config by an Optuna study or a grid, on the virtual clock and on validation data, and "
        "run the best settings on the test set. The same command goes on after a kill.",
    )
    found.add_argument(
        "file", type=Path, metavar="SPEC.yaml", help="the sweep: config, fields with values or ranges, trials, ..."
    )
    found.add_argument(
        "--wandb",
        action="store_true",
        help="run nothing; print a sweep of W&B's over the same fields, for `wandb sweep`",
    )
    return with_common(found, of_one_row=True)
