"""Offer several runs at one port (`raafl serve --runs`); submit, list, show, stop and resume them (`raafl submit`, `raafl runs`).

No torch is imported before a process listens or asks, since the process that keeps a run needs none.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raafl.commands.fit_local import ServerCommand
from raafl.commands.join import credentials
from raafl.config.argv import name_of, options_of, resolves, whole_number
from raafl.config.remote_options import check_run_name
from raafl.errors import BadInput, RunFailed
from raafl.lean_import import quick_imports
from raafl.runtime.supervisor import Child, RestartPolicy, Supervisor
from raafl.sites.hosted_runs import HostedRun, locked, state_folder_of
from raafl.units import duration, quantity

if TYPE_CHECKING:
    from raafl.runtime.lifecycle.service_manager import ServiceManager
    from raafl.sites.run_server import Answer, Question, RunServer

USAGE = """\
usage: raafl runs list | show NAME | stop NAME... | resume NAME...   --server HOST:PORT [--certs certs] [--json]

  list            list the runs of a server for many runs (raafl serve --runs), and how each stands
  show NAME       show a run's progress, and the end of its log
  stop NAME...    let runs write a checkpoint and end, and their clients leave
  resume NAME...  let runs that were stopped, or have failed, go on from their last checkpoint
A site may list; for all else --certs has the certificate of an operator (raafl certs request operator)."""

SUBMIT_USAGE = """\
usage: raafl submit CONFIG --server HOST:PORT [--name NAME] [--min_clients N] [--certs certs] [--json]

Submit a config as a run to a server for many runs (raafl serve --runs), with the certificate of an operator.
NAME is the config's file name unless --name is given. The config may name raafl's own parts and plain values alone, unless the
server was started with --trust_config."""

_LOOK_S = 0.5
_VERBS = ("list", "show", "stop", "resume")
_OF_SERVER = ("certs", "tls_ca", "tls_cert", "tls_key", "tls_crl", "sites", "min_clients")
"""Options of the server for many runs that each run's process gets, too."""
_log = logging.getLogger(__name__)


# ---- raafl serve --runs ----


def serve_runs(own: Namespace, rest: Sequence[str]) -> int:
    """Offer the runs of a folder until a signal comes, which ends none of them; return the exit code.

    Raises:
        BadInput: an option, a file or the address is wrong, or another process serves this folder.
    """
    _check_rest(own, rest)
    folder = Path(own.runs)
    state = state_folder_of(folder)
    with locked(state, f"runs is '{folder}', which another process serves: end that one first, or name another folder"):
        with quick_imports():
            from raafl.commands.serve import allow_list, listener
            from raafl.runtime.lifecycle.service_manager import ServiceManager
            from raafl.sites.run_server import RunServer

        proof = credentials(own, server=True)
        sites = allow_list(own, proof)
        if sites is None:
            raise BadInput("a server for many runs needs certificates: make them with `raafl certs`, and give --certs")
        server = RunServer(
            folder,
            listener(own.address),
            proof,
            sites,
            own.operators.split(","),
            options=["--runs", str(folder), *_options(own), *rest],
            trusts="--trust_config" in rest,
            max_runs=own.max_runs,
        )
        service = ServiceManager.here()
        with server, sites.watch(lambda: None), _ending() as ended:
            _log.info(f"runs of {folder} at {server.address}, TLS 1.3")
            service.ready(f"runs of {folder} at {server.address}")
            _attend(server, ended, service)
            _log.info(
                f"without this process {quantity(server.num_running, 'run')} will go on: start it again, or `raafl runs stop`"
            )
    return 0


def _attend(server: RunServer, ended: threading.Event, service: ServiceManager) -> None:
    num = -1
    while not ended.is_set():
        server.look()
        if (now := server.num_running) != num:
            num = now
            service.status(f"{quantity(num, 'run')} at {server.address}")
        ended.wait(_LOOK_S)


@contextmanager
def _ending() -> Iterator[threading.Event]:
    """Yield an event that is set when SIGINT or SIGTERM arrives."""
    ended = threading.Event()
    before = {number: signal.signal(number, lambda *_: ended.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_rest(own: Namespace, rest: Sequence[str]) -> None:
    for option in rest:
        name = name_of(option)
        if name in ("--config", "--resume", "--output", "--name", "--json"):
            raise BadInput(f"{name} is of one run, but --runs serves several: put configs into '{own.runs}'")
    if own.run is not None:
        raise BadInput("--run is of one run, but --runs serves several: leave one of them out")


def _options(own: Namespace) -> list[str]:
    given = [(name, getattr(own, name)) for name in _OF_SERVER]
    return [text for name, value in given if value is not None for text in (f"--{name}", str(value))]


def keep(own: Namespace, rest: Sequence[str]) -> int:
    """Keep one run: start its server, start it again from its last checkpoint when it dies, and write down how it ended.

    Raises:
        BadInput: another process keeps the run.
    """
    run = HostedRun(Path(own.runs), check_run_name(own.keep))
    asked = run.asked
    assert asked is not None
    min_clients = own.min_clients if asked.min_clients is None else asked.min_clients
    shared = [*_options(Namespace(**{**vars(own), "min_clients": min_clients})), "--run", run.name, *rest]
    # a config that another site submitted is checked once more, by the process that will use it
    source = "--config" if asked.by is None else "--submitted"
    options = [source, str(run.config), "--output", str(run.run_folder), *shared]
    with run.kept(), run.receiving() as passed:
        command = ServerCommand(options, passed, folder=run.run_folder, resumed=())
        server = Child("the server", command.command, dict(os.environ), fds=(passed.fileno(),))
        code = Supervisor(server, {}, RestartPolicy(), _log.warning).run()
        run.end(code)
    return code


# ---- raafl submit and raafl runs ----


def parser(name: str = "runs") -> ArgumentParser:
    """Return a parser for the options of `raafl runs`, or of `raafl submit`."""
    found = ArgumentParser(prog=f"raafl {name}", exit_on_error=False, add_help=False, allow_abbrev=False)
    found.add_argument("--server", metavar="HOST:PORT")
    found.add_argument("--certs", default="certs", metavar="DIR")
    for one in ("ca", "cert", "key", "crl"):
        found.add_argument(f"--tls_{one}")
    found.add_argument("--proxy")
    found.add_argument("--json", action="store_true")
    if name == "submit":
        found.add_argument("config", metavar="CONFIG")
        found.add_argument("--name")
        found.add_argument("--min_clients")
    else:
        found.add_argument("verb", choices=_VERBS)
        found.add_argument("names", nargs="*", metavar="NAME")
    return found


def submit(argv: Sequence[str]) -> str:
    """Submit a config as a run; return the text to print (`raafl submit`).

    Raises:
        BadInput: an option or a file is wrong.
        RunFailed: the server refused.
    """
    if _asks_help(argv):
        return SUBMIT_USAGE
    from raafl.sites.hosted_runs import MAX_CONFIG

    options = options_of(parser("submit"), argv)
    path = _config(options.config)
    name = check_run_name(options.name or path.stem)
    num = None if options.min_clients is None else whole_number("min_clients", options.min_clients)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"CONFIG is '{path}', which cannot be read ({error}): name a YAML file") from None
    if len(text) > MAX_CONFIG:
        raise BadInput(f"CONFIG is '{path}', which has {len(text):,} characters: give one of at most {MAX_CONFIG:,}")
    (answer,) = _ask(options, lambda: [_question("submit", run=name, config=text, min_clients=num)])
    return json.dumps(answer.runs[0]) if options.json else f"run '{name}' was submitted to {options.server}"


def command(argv: Sequence[str]) -> str:
    """List, show, stop or resume runs; return the text to print (`raafl runs`).

    Raises:
        BadInput: an option or a file is wrong.
        RunFailed: the server refused.
    """
    if _asks_help(argv):
        return USAGE
    options = options_of(parser(), argv)
    names = [check_run_name(name) for name in options.names]
    if options.verb == "list" and names:
        raise BadInput(f"`raafl runs list` takes no name, but '{names[0]}' is given: `raafl runs show {names[0]}`")
    if options.verb != "list" and (not names or (options.verb == "show" and len(names) > 1)):
        raise BadInput(f"`raafl runs {options.verb}` needs a run's NAME: `raafl runs list` shows them")
    asked = [""] if options.verb == "list" else names
    answers = _ask(options, lambda: [_question(options.verb, run=name) for name in asked])
    rows = [row for answer in answers for row in answer.runs]
    if options.json:
        return json.dumps({**rows[0], **answers[0].details} if options.verb == "show" else rows)
    if options.verb == "show":
        return "\n".join([_line(rows[0]), *_shown(answers[0].details)])
    return "\n".join(map(_line, rows)) or "no runs yet: raafl submit CONFIG"


def _asks_help(argv: Sequence[str]) -> bool:
    return not argv or "--help" in argv or "-h" in argv


def _config(given: str) -> Path:
    from raafl.config.argv import shipped

    path = Path(given)
    return path if path.is_file() else shipped().get(path.stem, path)


def _question(*args: Any, **kwargs: Any) -> Question:
    from raafl.sites.run_server import Question

    return Question(*args, **kwargs)


def _ask(options: Namespace, questions: Any) -> list[Answer]:
    if options.server is None:
        raise BadInput("--server HOST:PORT is missing: give the address of `raafl serve --runs`")
    resolves(options.server)
    with quick_imports():
        from raafl.sites.run_server import ask
        from raafl.transport import PeerLost, PeerTimeout, Refused
    login = credentials(Namespace(**vars(options), run=None), server=False).client_login()
    try:
        return [ask(options.server, question, login, proxy=options.proxy) for question in questions()]
    except (PeerLost, PeerTimeout, Refused) as error:
        raise RunFailed(
            f"the server at {options.server} does not answer ({error}): check its address and log"
        ) from None


def _line(row: dict[str, Any]) -> str:
    since = row.get("since")
    age = f"  since {duration(max(time.time() - since, 0.0))}" if isinstance(since, int | float) else ""
    by = f"  by {row['by']}" if row.get("by") else ""
    code = f"  exit code {row['exit_code']}" if row.get("exit_code") else ""
    return f"{row['run']:24} {row['state']:10}{age}{by}{code}"


def _shown(details: dict[str, Any]) -> Iterator[str]:
    progress = details.get("progress")
    yield f"folder: {details.get('folder', '')}"
    if isinstance(progress, dict) and progress:
        wanted = ("version", "num_updates", "num_there", "finished")
        yield "progress: " + ", ".join(f"{name} {progress[name]}" for name in wanted if progress.get(name) is not None)
        metrics = progress.get("metrics")
        if isinstance(metrics, dict) and metrics:
            yield "metrics: " + ", ".join(f"{name} {value}" for name, value in metrics.items())
    log = details.get("log")
    if isinstance(log, list):
        yield from (f"  {line}" for line in log)
