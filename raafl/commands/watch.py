"""Show a running or finished run from its folder (`raafl watch RUN`)."""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from raafl.commands.stored_runs import run_tables
from raafl.config.argv import options_of
from raafl.config.options import MODES
from raafl.errors import BadInput
from raafl.runfolder.books import signature_warning
from raafl.runfolder.events import RunTail
from raafl.runfolder.schema import CLIENTS, JOURNAL
from raafl.sanitize import is_url
from raafl.units import duration, size
from raafl.watch.progress import Progress, plain, sentence
from raafl.watch.state import RunState, follow

LOOK_S = 0.25
"""Seconds between two looks."""
LARGE_BYTES = 10_000_000
"""Bytes of a run's rows above which the view says that it reads them, at some 15 MB a second."""
SILENT_S = 120.0
"""Seconds after which a folder that nobody writes to counts as silent: the run may be dead."""


def watch(argv: Sequence[str], file: TextIO | None = None, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show the progress of a run until it ends; with `--once`, show its present state and return.

    `file`: stream to print to; None = standard output.

    Raises:
        BadInput: an option is wrong, or `--once` is used and the run does not exist.
    """
    options = options_of(parser(), argv)
    if options.run is None:
        raise BadInput("RUN is missing: give the folder of a run")
    if is_url(options.run) and not options.once:
        raise BadInput(f"run is '{options.run}', a URL, which can only be read once: add --once")
    path = run_tables(options.run)
    if path.exists() and not path.is_dir():
        raise BadInput(f"'{path}' is a file: give the folder of a run")
    if options.json and not options.once:
        raise BadInput("--json needs --once: give both, or leave --json out")
    if options.once:
        _once(path, file or sys.stdout, as_json=options.json, mode=options.progress)
    else:
        _follow(path, Progress(options.progress, file), sleep)


def parser() -> ArgumentParser:
    """Return a parser for the options of `raafl watch`."""
    found = ArgumentParser(
        prog="raafl watch",
        exit_on_error=False,
        description="Show a run that goes on, or has ended, from its folder. Nothing is written there.",
    )
    found.add_argument("run", nargs="?", metavar="RUN", help="the run's folder, which may appear later, or its URL")
    found.add_argument("--once", action="store_true", help="show how the run stands now, and exit")
    found.add_argument("--json", action="store_true", help="with --once: as JSON, with every client")
    found.add_argument(
        "--progress",
        choices=[mode for mode in MODES if mode != "quiet"],
        default="auto",
        metavar="MODE",
        help="live (a table), plain (lines), verbose (a line for each task too), auto: live on a terminal, else plain",
    )
    return found


def _once(path: Path, file: TextIO, *, as_json: bool, mode: Any) -> None:
    watched = follow(path)
    watched.look()
    if not watched.begun:
        raise BadInput(f"run is '{path}', a folder without a run: leave out --once to wait for one")
    if as_json:
        silent_s = watched.silent_s
        found = {"run": str(path), **plain(watched.state.snapshot(None)), "silent_s": silent_s}
        if found["state"] == "running" and silent_s > SILENT_S:
            found["state"] = "silent"
        more = {"damaged_lines": watched.num_damaged, "books": signature_warning(path)}
        file.write(json.dumps(found | more) + "\n")
        return
    progress = Progress(mode, file)
    progress.start(watched.state.title or str(path))
    if progress.mode == "plain" and watched.state.summary is None:
        progress.note(sentence(watched.state.snapshot()))
    progress.update(watched.state.snapshot, evaluated=True)
    if (silent := _silence(watched)) is not None:
        progress.note(silent)
    _warn_unsigned(path, progress)
    progress.stop()


def _follow(path: Path, progress: Progress, sleep: Callable[[float], None]) -> None:
    watched = follow(path)
    said: str | None = None
    progress.start(str(path))
    num_bytes = sum((path / name).stat().st_size for name in (JOURNAL, CLIENTS) if (path / name).is_file())
    if num_bytes > LARGE_BYTES:  # nothing is shown before they were read, which takes seconds
        progress.note(f"reading {size(num_bytes)} of rows")
    try:
        while True:
            news = watched.look()
            # only after the first read, so that events from before are not printed
            watched.state.say = progress.note if progress.verbose else None
            if watched.begun:
                progress.update(watched.state.snapshot, evaluated=watched.state.summary is not None)
            to_say = None if news else _silence(watched)
            if to_say is not None and said is None:
                progress.note(to_say)
            said = to_say
            if watched.state.summary is not None:
                _warn_unsigned(path, progress)
                return
            sleep(LOOK_S)
    finally:
        progress.stop()


def _warn_unsigned(path: Path, progress: Progress) -> None:
    """Print a note if the run's records lack signatures or were altered."""
    if (line := signature_warning(path)) is not None:
        progress.note(line)


def _silence(watched: RunTail[RunState]) -> str | None:
    if not watched.begun:
        return "waiting: there is no run in the folder yet"
    silent_s = watched.silent_s
    if watched.state.summary is not None or silent_s <= SILENT_S:
        return None
    return f"no row was written for {duration(silent_s)}: the run may be dead, or busy with long tasks"
