"""Define the options that `raafl serve` and `raafl join` have in addition to the fields of the config."""

from __future__ import annotations

import re
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from raafl.config.argv import name_of, names_section, own_options, whole_number
from raafl.errors import BadInput
from raafl.plain_yaml import read_yaml

SERVE = """
Options of serve itself:
  --address HOST:PORT   where to listen (default 127.0.0.1:0: this machine only, any free port); 0.0.0.0:PORT lets others in
  --min_clients N       start once so many have joined (default: all)
  --certs FOLDER        of `raafl certs`, with ca.crt, server.crt and server.key (default: certs)
  --tls_ca FILE, --tls_cert FILE, --tls_key FILE   certificates of one's own instead
  --sites FILE          which site may be which client (default: sites.yaml in that folder); watched while the run goes on
  --tls_crl FILE        certificates that were taken back (default: revoked.crl in that folder, if it is there)
  --runs FOLDER         offer a run for each config in this folder, and for those of raafl submit (docs/serve-and-join.md);
                        further options of serve, and --trust_config, are then of every run
  --operators SITE,...  with --runs: sites that may submit, show, stop and resume runs (default: operator)
  --max_runs N          with --runs: how many run at once (default: all)"""
JOIN = """
Options of join itself:
  --address HOST:PORT   the server's; its certificate must be for this host
  --client ID           who this is: 1 to the run's number of clients
  --certs FOLDER        with ca.crt, and SITE.crt and SITE.key of one site (default: certs)
  --tls_ca FILE, --tls_cert FILE, --tls_key FILE   certificates of one's own instead
  --tls_crl FILE        certificates that were revoked, a stolen one of the server too (default: revoked.crl in that folder)
  --proxy URL           an HTTP proxy to pass through (default: the environment's HTTPS_PROXY), or none
  --share_of_data true  with --data: train on this client's share of it, not on all of it
  --policy FILE         what this site allows, checked here before and after each task (docs/site-policy.md)
  --dry-run             show what the server would have this client do, and leave
  --receipts true|false keep signed receipts of what is sent, for raafl audit (default: true)
  --subfederation FILE  train by a federation: serve the clients of the run that this config describes, on each task of the
                        server (docs/sites-and-regions.md); all further options are of that run, such as --output, --resume
  --below_address HOST:PORT, --below_min_clients N, --below_certs FOLDER, --below_sites FILE   of that run, as of raafl serve
  --run NAME            which run of a server for many runs
  --any                 take all its runs that this site's policy allows, each in a process of its own: --at_once N of them
                        (default 1) while there is memory; leave after --idle_s S without one (default: never)
  --keep_inputs SHARE   share of tasks, drawn in secret, whose inputs are kept for raafl audit (default 0.05; 0 keeps none)
Without --config the server's is taken, if it is names of raafl's own parts and plain values. With --data, or any --data.FIELD, the
client trains on data of its own. Processes started by torchrun are one client: torchrun --nproc-per-node 2 -m raafl join ..."""


def parser(command: str) -> ArgumentParser:
    """Return a parser for the options of `serve` or `join` that are not fields of the config."""
    found = ArgumentParser(prog=f"raafl {command}", exit_on_error=False, add_help=False, allow_abbrev=False)
    found.add_argument("--address", default="127.0.0.1:0" if command == "serve" else None)
    found.add_argument("--certs", default="certs")
    for name in ("ca", "cert", "key", "crl"):
        found.add_argument(f"--tls_{name}")
    found.add_argument("--run")
    if command == "serve":
        found.add_argument("--min_clients")
        found.add_argument("--sites")
        found.add_argument("--runs")
        found.add_argument("--operators", default="operator")
        found.add_argument("--max_runs")
        # internal options, which a server for many runs gives to each run's process
        found.add_argument("--keep", help=SUPPRESS)
        found.add_argument("--submitted", help=SUPPRESS)
    else:
        found.add_argument("--client")
        found.add_argument("--proxy")
        found.add_argument("--share_of_data", default="false")
        found.add_argument("--policy")
        found.add_argument("--dry-run", "--dry_run", action="store_true")
        found.add_argument("--receipts", default="true")
        found.add_argument("--subfederation")
        found.add_argument("--below_address", default="127.0.0.1:0")
        found.add_argument("--below_min_clients")
        found.add_argument("--below_certs")
        found.add_argument("--below_sites")
        found.add_argument("--keep_inputs", default="0.05")
        found.add_argument("--any", action="store_true")
        found.add_argument("--at_once", default="1")
        found.add_argument("--idle_s")
    return found


def split(command: str, argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Parse the command's own options; return them, and all other arguments, which set fields of the config.

    Raises:
        BadInput: an option is missing or invalid.
    """
    own, rest = own_options(parser(command), argv)
    if command == "join":
        own.share_of_data = _truth("share_of_data", own.share_of_data)
        own.receipts = _truth("receipts", own.receipts)
        own.keep_inputs = share_of("keep_inputs", own.keep_inputs)
        own.at_once = whole_number("at_once", own.at_once)
        own.idle_s = None if own.idle_s is None else whole_number("idle_s", own.idle_s, 0)
        _check_below(own)
        _check_any(own)
    if own.run is not None:
        check_run_name(own.run)
    if command == "serve":
        own.min_clients = None if own.min_clients is None else whole_number("min_clients", own.min_clients)
        own.max_runs = None if own.max_runs is None else whole_number("max_runs", own.max_runs)
        if own.runs is None and (own.max_runs is not None or own.operators != "operator"):
            raise BadInput("--max_runs and --operators are about a server for many runs: give --runs FOLDER, too")
    elif not {"--help", "-h", "--print_config"} & set(rest):
        if own.address is None:
            raise BadInput("`raafl join` needs --address HOST:PORT, where the server listens")
        if own.dry_run and names_section(rest, "--config"):
            raise BadInput("--dry-run shows the server's config, but --config names another: leave --config out")
        if own.client is None:
            raise BadInput("`raafl join` needs --client ID: a number from 1 to the run's number of clients")
        own.client = whole_number("client", own.client)
    return own, rest


def options_below(own: Namespace, rest: Sequence[str]) -> list[str]:
    """Return the options of the run below a client with ``--subfederation``: its config, by default one merge a task."""
    if any(name_of(item) == "--resume" for item in rest):
        return list(rest)
    options = [f"--config={own.subfederation}", *rest]
    try:
        config = read_yaml(Path(own.subfederation), "subfederation")
    except (OSError, BadInput):  # reported later by the code that parses the config
        return options
    is_given = names_section(rest, "--subfederation") or (isinstance(config, dict) and config.get("subfederation"))
    return options if is_given else [*options, "--subfederation.merges=1"]


def _check_below(own: Namespace) -> None:
    """Raise `BadInput` if options of `join` about a subfederation's clients lack `--subfederation` or contradict it."""
    if own.subfederation is None:
        defaults = {"address": "127.0.0.1:0", "min_clients": None, "certs": None, "sites": None}
        given = [name for name, default in defaults.items() if getattr(own, f"below_{name}") != default]
        if given:
            raise BadInput(
                f"--below_{given[0]} is about the clients of a subfederation: give --subfederation FILE, too"
            )
    elif own.dry_run:
        raise BadInput("--dry-run shows what a plain client would do: leave --subfederation out")
    if own.below_min_clients is not None:
        own.below_min_clients = whole_number("below_min_clients", own.below_min_clients)


def _check_any(own: Namespace) -> None:
    """Raise `BadInput` for `join` options that contradict `--any`, or that need it."""
    if not own.any:
        if own.at_once != 1 or own.idle_s is not None:
            raise BadInput("--at_once and --idle_s are about the runs that --any takes: give --any, too")
        return
    for name, given in (("run", own.run), ("dry-run", own.dry_run), ("subfederation", own.subfederation)):
        if given:
            raise BadInput(f"--any takes every run, and --{name} is about one: leave one of them out")


def share_of(name: str, text: str) -> float:
    """Parse a number from 0 to 1; raise `BadInput` for anything else."""
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise BadInput(f"{name} is '{text}': give a share from 0 to 1, such as 0.05")
    return share


def _truth(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise BadInput(f"{name} is '{text}': give true or false")
    return text.lower() == "true"


_RUN_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


def check_run_name(name: str) -> str:
    """Return the name of a run of a server for many; raise `BadInput` unless it can be the name of a folder anywhere."""
    if not _RUN_NAME.fullmatch(name):
        raise BadInput(
            f"run is {ascii(name)[:80]}: give 1 to 63 of the characters a-z, 0-9, '_' and '-', a letter or digit first"
        )
    return name
