"""Run the command that the command line names, such as `raafl fit`."""

from __future__ import annotations

import errno
import importlib
import io
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from raafl import log
from raafl.config.argv import LOG_FORMATS, name_of, options_of, resolves, values, with_paths, without
from raafl.errors import BadInput, Replaced, RunFailed, at_least, nearest
from raafl.lean_import import quick_imports
from raafl.runfolder.outcome import summary_lines
from raafl.runfolder.schema import Summary
from raafl.sanitize import sanitize_text

if TYPE_CHECKING:
    from raafl.config.parse import Parsed

_log = logging.getLogger(__name__)

_WIDE = 160  # columns of a table if the output is not a terminal
_FULL = (errno.ENOSPC, errno.EDQUOT)
_OF_DISK = (*_FULL, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
"""Errors of a file that the user can mend, so that no traceback is of use."""
# seconds that rank 0 has to report an error of all ranks, before another fails and torchrun ends all of them
_WAIT_FOR_RANK_0_S = 30.0

USAGE = """\
raafl trains one model over many unequal machines.

usage: raafl COMMAND [options]

  simulate     train on a virtual clock, in this process, in several (--workers N), or on the ranks that torchrun starts:
                 raafl simulate --config configs/quickstart.yaml
  fit          train on real ranks: a server and N clients on this machine, or what torchrun starts:
                 raafl fit --config configs/quickstart.yaml --local 4
                 torchrun --standalone --nproc-per-node 5 -m raafl fit --config configs/quickstart.yaml
  serve        coordinate clients on other machines, which come and go:
                 raafl serve --config C --address HOST:PORT [--certs FOLDER] [--min_clients N]
  join         be such a client:
                 raafl join --address HOST:PORT --client ID [--certs FOLDER] [--config C] [--data ...]
                 raafl serve --runs FOLDER --address HOST:PORT       several runs, which clients take: raafl join --any
  submit       submit a config as a run to such a server, with an operator's certificate:
                 raafl submit CONFIG --server HOST:PORT [--name NAME] [--min_clients N]
  runs         list, show, stop and resume its runs:
                 raafl runs list | show NAME | stop NAME | resume NAME   --server HOST:PORT [--json]
  certs        make, sign, renew and revoke the certificates of a server and its sites:
                 raafl certs init | server HOST... | request SITE | sign FILE | renew SITE | revoke SITE | list
  replay       re-execute a recorded run from its journal, to the last bit:
                 raafl replay RUN [--until EVENT] [--workers N] [--json]
  audit        check that nothing of a recorded run was altered: hash chain, signatures, digests, and a replay:
                 raafl audit RUN [--key KEY] [--books_only] [--json]; at a site: raafl audit RUN --site DIR [--share 0.05]
  watch        show a run that goes on, or has ended, from its folder:
                 raafl watch RUN [--once [--json]] [--progress live|plain|verbose]
  report       write one HTML page about a run, or about several compared:
                 raafl report RUN [RUN ...] [--output PAGE.html] [--figure CURVES.svg]
  compare      run rows of settings over several seeds, search each row's settings alike, and say what the seeds show:
                 raafl compare FILE.yaml [--output DIR] [--jobs N] [--ranks N] [--plan] [--verify]
  sweep        search fields of one config by an Optuna study or a grid; or write the search as a W&B sweep:
                 raafl sweep SPEC.yaml [--output DIR] [--jobs N] [--wandb]
  reproduce    run a table of a paper as such a comparison, or list the tables:
                 raafl reproduce [PAPER [TABLE]] [--scale small|full] [--jobs N] [--plan]
  plan         say what a run will take by device and algorithm, before it is run; or measure this machine:
                 raafl plan --config C [--json] | raafl plan --measure [FILE] [--address HOST:PORT]
  calibrate    fit device profiles to the tasks of a real run, with their error; check the virtual clock against real runs:
                 raafl calibrate RUN [--check RUN ...] [--output calibrated.yaml]
  axes         list what of a model shrinks, how much that leaves, and what stays whole and why:
                 raafl axes --config C [--rate 0.25 ...] [--json] | raafl axes --model CLASS --data CLASS
  algorithms   list the algorithms and what each does; raafl algorithms NAME says what one takes

Every field of a config is an option too: raafl simulate --config C --algorithm fed_avg --seed 1
raafl COMMAND --help lists them, --print_config prints a config whole, --json prints the summary alone.
--config quickstart, and the like, names a config that comes with raafl; raafl --print_completion bash completes all this.
--log json, of any command, writes the log as lines of JSON to standard error.
Exit codes: 0 done, 1 the run failed, 2 bad input, 3 replaced by another client with the same id, 130 interrupted."""


LOG_VARIABLE: Final = "RAAFL_LOG"
"""Environment variable of the log's form, for the processes that a command starts."""


class JsonConsole(logging.Handler):
    """Logging handler that prints each record to standard error as one line of JSON, in ASCII."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record as a line of JSON, unless standard error is closed."""
        row = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        optional = {
            "rank": os.environ.get("RANK"),
            "client": getattr(record, "client", None),
            "exception": record.exc_info and logging.Formatter().formatException(record.exc_info),
        }
        row |= {name: str(value) for name, value in optional.items() if value}
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(json.dumps(row) + "\n")
            sys.stderr.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code.

    Codes: 0 done, 1 failed, 2 bad input, 3 replaced by another client with the same id, 130 interrupted.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a path may have bytes that the terminal's encoding lacks: a run that is done must not fail when it is named
        with suppress(OSError):  # of an output that was put in the place of another
            sys.stdout.reconfigure(errors="backslashreplace")
    asked = values(argv, "--log")
    given = asked[-1] if asked else os.environ.get(LOG_VARIABLE, "text")
    kind = "json" if given == "json" else "text"
    # child processes read the log format from this environment variable
    with log.console(JsonConsole() if kind == "json" else None), _in_environment(LOG_VARIABLE, kind if asked else None):
        if given not in LOG_FORMATS:
            _complain(f"log is '{given}': give text or json", known_to_all=True)
            return 2
        return _main(without(argv, "--log"))


@contextmanager
def _in_environment(name: str, value: str | None) -> Iterator[None]:
    """Set an environment variable within the ``with`` block; ``value`` None leaves it unchanged."""
    before = os.environ.get(name)
    if value is None:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        os.environ.update({} if before is None else {name: before})


def _main(argv: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {
        "fit": _fit,
        "simulate": _simulate,
        "serve": _serve,
        "join": _join,
        "submit": _printing("runs", "submit"),
        "runs": _printing("runs", "command"),
        "certs": _printing("certs", "command"),
        "replay": _replay,
        "audit": _audit,
        "watch": _watch,
        "report": _printing("report", "report"),
        "compare": _printing("compare", "compare"),
        "sweep": _printing("sweep", "sweep"),
        "reproduce": _printing("reproduce", "reproduce"),
        "plan": _text_command("plan"),
        "calibrate": _text_command("calibrate"),
        "axes": _text_command("axes"),
        "algorithms": _text_command("listing"),
    }
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if argv else 2
    if argv[0] == "--version":
        from raafl._version import __version__

        print(f"raafl {__version__}")
        return 0
    from raafl.commands.starting import Terminated, starting
    from raafl.runtime.lifecycle.signals import ends_process

    try:
        if name_of(argv[0]) == "--print_completion":
            from raafl.commands.completion import completion

            print(completion(argv, commands, USAGE))
            return 0
        if argv[0] not in commands:
            raise BadInput(f"unknown command '{argv[0]}': {nearest(argv[0], commands)}")
        # a client that is told to end has nothing to save, and no handler in a task
        with ends_process(), starting() if argv[0] in ("fit", "simulate", "serve") else nullcontext():
            return commands[argv[0]](with_paths(argv[1:]))
    except (BadInput, FileNotFoundError) as error:
        _complain(str(error) + _place(getattr(error, "field", None), argv), known_to_all=True)
        return 2
    except RunFailed as error:
        _complain(str(error))
        return 3 if isinstance(error, Replaced) else 1
    except KeyboardInterrupt as asked:
        if isinstance(asked, Terminated):
            _complain("stopped by SIGTERM while no run was under way")
        return 130
    except BrokenPipeError:  # whoever read standard output has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except OSError as error:
        if error.filename is None or error.errno not in _OF_DISK:
            raise
        is_full = error.errno in _FULL
        remedy = "free some space, and run the same command again" if is_full else "name another file or folder"
        _complain(f"'{sanitize_text(error.filename)}': {error.strerror}: {remedy}")
        return 1 if is_full else 2


def _place(field: str | None, argv: Sequence[str]) -> str:
    """Return the end of an error message, with the config file in which ``field`` is set; "" if ``field`` is None."""
    if field is None:
        return ""
    from raafl.config.messages import place_of_field

    return place_of_field(field, with_paths(argv))


def _complain(text: str, *, known_to_all: bool = False) -> None:
    """Log an error. If it is one that all ranks have, ranks other than 0 wait first, so that rank 0 reports it before all end."""
    rank = os.environ.get("RANK", "0")
    if known_to_all and rank != "0" and "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(_WAIT_FOR_RANK_0_S)
    _log.error(text, extra={} if rank == "0" else {"prefix": f"raafl, rank {rank}: "})


def _with_local_resume(argv: list[str]) -> list[str]:
    """Replace a URL or ``auto`` after `--resume` by the path of a local run folder; a run at a URL is downloaded."""
    if not values(argv, "--resume"):
        return argv
    from raafl.commands.stored_runs import with_local_resume

    return with_local_resume(argv)


def _check_first(command: str, argv: Sequence[str]) -> None:
    """Check the config's plain values, on the rank that reports errors, before torch is imported: errors then come fast."""
    if log.reports_for_all():
        from raafl.config.plain_check import check_plain

        check_plain(command, argv)


def _fit(argv: list[str]) -> int:
    if values(argv, "--local"):
        from raafl.commands.fit_local import fit_local, read

        if not any(option in argv for option in ("--help", "-h", "--print_config")):
            _check_first("fit", read(argv).options)
            return fit_local(argv)
        argv = without(argv, "--local", "--max_restarts")
    argv = _with_local_resume(argv)
    _check_first("fit", argv)
    with quick_imports():
        from raafl.commands.auto import parse_run
        from raafl.runtime.over_ranks import fit

    _num_ranks()
    with _json_alone(argv):
        with quick_imports():
            parsed = parse_run("fit", argv)
        result = fit(parsed.experiment, parsed.config_yaml)
    return 0 if result is None else _report(*result, parsed)


def _simulate(argv: list[str]) -> int:
    from raafl.local.malloc import keep_freed

    argv = _with_local_resume(argv)
    _check_first("simulate", argv)
    keep_freed()  # needed by commands that train in this process or its forks, and before torch starts threads
    with quick_imports():
        from raafl.commands.auto import parse_run

    over_ranks = _num_ranks() > 1
    with _json_alone(argv):
        with quick_imports():
            parsed = parse_run("simulate", argv)
            if over_ranks:
                from raafl.runtime.over_ranks import simulate_over_ranks as simulate
            else:
                from raafl.runtime.run import simulate
        result = simulate(parsed.experiment, parsed.config_yaml)
    return 0 if result is None else _report(*result, parsed)


def _num_ranks() -> int:
    """Read from torchrun's variables how many ranks there are, 1 without torchrun; raise `BadInput` for an invalid variable."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        value = os.environ.get(name, "0")
        if not value.isdecimal() or int(value) > 65535:
            raise BadInput(f"{name} is '{value}': give a whole number up to 65535, or let torchrun set it")
    return int(os.environ.get("WORLD_SIZE", "1"))


def _serve(argv: list[str]) -> int:
    from raafl.commands.join import credentials
    from raafl.config.remote_options import split

    own, rest = split("serve", argv)
    if own.runs is not None and not any(option in rest for option in ("--help", "-h", "--print_config")):
        from raafl.commands.runs import keep, serve_runs

        return serve_runs(own, rest) if own.keep is None else keep(own, rest)
    rest = _with_local_resume(rest)
    if own.submitted is None:
        _check_first("serve", rest)
    if not own.address.startswith("fd:"):
        resolves(own.address)
    with _json_alone(rest):
        with quick_imports():
            from raafl.commands.auto import parse_run
            from raafl.commands.serve import allow_list, serve, submitted_config

            trusted, config_yaml = "--trust_config" in rest, None
            if own.submitted is not None:
                config_yaml = submitted_config(Path(own.submitted), trusted=trusted)
            parsed = parse_run("serve", rest, config_yaml=config_yaml)
            proof = credentials(own, server=True)
            sites = allow_list(own, proof)
        result = serve(
            parsed.experiment, parsed.config_yaml, own.address, proof, sites=sites, min_clients=own.min_clients
        )
    return _report(*result, parsed)


def _join(argv: list[str]) -> int:
    """Run `raafl join`: train as a client until the server dismisses it."""
    from raafl.commands.join import command
    from raafl.config.remote_options import options_below, split

    own, rest = split("join", argv)
    if own.any and own.address is not None:
        from raafl.commands.join_any import join_any

        resolves(own.address)
        return join_any(own, argv)
    if own.subfederation is None:
        return command(argv)
    resolves(own.address)
    rest = options_below(own, rest)
    _check_first("serve", rest)
    with _json_alone(rest):
        with quick_imports():
            from raafl.commands.subfederation import join_above
        result, parsed = join_above(own, rest)
    return _report(*result, parsed)


def _replay(argv: list[str]) -> int:
    """Run `raafl replay`; return exit code 0 if the replayed model equals the recorded one, else 1."""
    from raafl.commands.replay import client_file, lines_of, parser
    from raafl.commands.stored_runs import run_folder

    options = options_of(parser(), argv)
    at_least("workers", options.workers, 1)
    with _json_alone(argv):
        from raafl.runfolder.append_file import to_json
        from raafl.runtime.replay import replay

        files = {number: Path(file) for number, file in map(client_file, options.client_data)}
        result = replay(
            run_folder(options.run),
            until=options.until,
            workers=options.workers,
            client_data=files,
            trust_config=options.trust_config,
        )
    print(to_json(result) if options.json else "\n".join(sanitize_text(line, 1000) for line in lines_of(result)))
    return 1 if result["equal"] is False else 0


def _audit(argv: list[str]) -> int:
    """Run `raafl audit`; return exit code 0 if it found nothing wrong, else 1."""
    from raafl.commands.audit import audit

    with _json_alone(argv):
        text, sound = audit(argv)
    print(text)
    return 0 if sound else 1


def _watch(argv: list[str]) -> int:
    """Run `raafl watch`: show the progress of a run from its folder."""
    from raafl.commands.watch import watch

    watch(argv)
    return 0


def _printing(module: str, name: str) -> Callable[[list[str]], int]:
    """Make a command that prints the text that the function ``raafl.commands.MODULE.NAME`` returns."""

    def run(argv: list[str]) -> int:
        with quick_imports():
            command = getattr(importlib.import_module(f"raafl.commands.{module}"), name)
        print(command(argv))
        return 0

    return run


@contextmanager
def _json_alone(argv: list[str]) -> Iterator[None]:
    """With `--json`, send all printed text to standard error within the block, so that standard output has only the JSON."""
    if "--json" not in argv or any(option in argv for option in ("--help", "-h", "--print_config")):
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


def _text_command(module: str) -> Callable[[list[str]], int]:
    """Make a command that prints the text that ``raafl.commands.MODULE.command`` returns for the terminal's width."""

    def run(argv: list[str]) -> int:
        command = importlib.import_module(f"raafl.commands.{module}").command
        width, terminal = shutil.get_terminal_size((_WIDE, 24)).columns, sys.stdout.isatty()
        with _json_alone(argv):
            found = command(argv, width, terminal=terminal)
        print(found, end="\n" if found else "")
        return 0

    return run


def _report(summary: dict[str, Any], folder: Path, parsed: Parsed) -> int:
    """Print the summary of a run that has ended, and return the exit code.

    With ``progress: quiet`` it is printed only if the run was interrupted or failed.
    """
    from raafl.runfolder.append_file import to_json

    ended = summary["finished"]
    try:
        if parsed.as_json:
            print(to_json(summary), flush=True)
        elif parsed.experiment.progress != "quiet" or ended.startswith(("interrupted", "failed")):
            print("\n".join(summary_lines(cast(Summary, summary), folder)), flush=True)
    except OSError as error:  # the reader has closed the pipe, or the disk is full; the run's exit code does not change
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):
            _complain(f"the summary cannot be printed: {error.strerror}; see {folder}")
    if ended == "interrupted":
        return 130
    if not ended.startswith("failed"):
        if summary["model"] is not None:
            return 0
        copy = summary.get("model_copy")
        _complain(
            f"the final model could not be saved in {folder}: " + (f"a copy is in {copy}" if copy else "it is lost")
        )
        return 1
    at = f"; the traceback is in {folder / summary['traceback']}" if summary.get("traceback") else ""
    _complain(ended.removeprefix("failed: ") + at)
    return 1
