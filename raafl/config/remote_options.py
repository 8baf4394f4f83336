"""The options that `raafl serve` and `raafl join` take beside the config's fields."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from raafl.config.argv import own_options, whole_number
from raafl.errors import BadInput

SERVE = """
Options of serve itself:
  --address HOST:PORT   where to listen (default 127.0.0.1:0: this machine only, any free port); 0.0.0.0:PORT lets others in
  --min_clients N       start once so many have joined (default: all)
  --secret_file FILE    the run's secret (or the variable RAAFL_SECRET, or RAAFL_SECRET_FILE)
  --encrypt true|false  encrypt everything after the handshake (default: true, but for a server that only this machine can reach)"""
JOIN = """
Options of join itself:
  --address HOST:PORT   the server's
  --client ID           who this is: 1 to the run's number of clients
  --secret_file FILE    the run's secret, or this client's own key (or the variable RAAFL_SECRET, or RAAFL_SECRET_FILE)
  --encrypt true|false  refuse a server that does not encrypt (default: true, but for one at an address of this machine alone)
  --share_of_data true  with --data: train on this client's share of it, not on all of it
Without --config the server's is taken, if it is names of raafl's own parts and plain values. With --data, or any --data.FIELD, the
client trains on data of its own. Processes started by torchrun are one client: torchrun --nproc-per-node 2 -m raafl join ..."""


def parser(command: str) -> ArgumentParser:
    """Return the parser of the options of serve, join or key that are no fields of a config."""
    found = ArgumentParser(prog=f"raafl {command}", exit_on_error=False, add_help=False, allow_abbrev=False)
    found.add_argument("--address", default="127.0.0.1:0" if command == "serve" else None)
    found.add_argument("--secret_file")
    found.add_argument("--encrypt")
    if command == "serve":
        found.add_argument("--min_clients")
    else:
        found.add_argument("--client")
        found.add_argument("--share_of_data", default="false")
    if command == "key":
        found.add_argument("--output")
    return found


def split(command: str, argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Return the command's own options, and the rest for the config's parser.

    Raises:
        BadInput: an option is missing or makes no sense.
    """
    own, rest = own_options(parser(command), argv)
    for name in ("encrypt", "share_of_data"):
        if getattr(own, name, None) is not None:
            setattr(own, name, _truth(name, getattr(own, name)))
    if command == "serve":
        own.min_clients = None if own.min_clients is None else whole_number("min_clients", own.min_clients)
    elif not {"--help", "-h", "--print_config"} & set(rest):
        if own.address is None and command == "join":
            raise BadInput("join needs --address HOST:PORT, where the server listens")
        if own.client is None and command == "key" and own.output is not None:
            return own, rest
        if own.client is None:
            raise BadInput(f"{command} needs --client ID: a number from 1 to the run's number of clients")
        own.client = whole_number("client", own.client)
    return own, rest


def _truth(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise BadInput(f"{name} is '{text}': give true or false")
    return text.lower() == "true"
