"""Make, renew and revoke certificates from the command line (`raafl certs`)."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from raafl.config.argv import options_of, whole_number
from raafl.errors import BadInput, nearest
from raafl.plain_yaml import load_untrusted_yaml
from raafl.units import quantity

USAGE = """\
usage: raafl certs COMMAND [--folder certs] [--days 30]

  init [--federation NAME]   make the federation's certificate authority: ca.crt for everybody, ca.key for nobody else
  server HOST...             make the server's key and certificate for the names and addresses by which it is called
  request SITE               at a site: make its key, which stays there, and SITE.csr, which goes to the authority
  sign FILE.csr [--clients 1,2]   at the authority: sign it as SITE.crt, which goes back to the site with ca.crt and
                             revoked.crl; the server's list, sites.yaml, lets the site be these clients
  renew SITE|server          issue the next certificate for the key that the site has
  revoke SITE|server         take certificates back: a server that runs cuts the site within a second, and a site that has the
                             new list, revoked.crl, connects to no server with a revoked certificate
  list [--json]              list certificates, days left, revocations"""

SITES = """\
# Which site may be which client; the server watches this file. For each site, a line such as
#   hospital-a: {clients: [1, 2], max_samples: 60000, own_data: false, profile: {flops_per_s: 5.0e12}}
"""
"""First lines of a new file with a server's list of sites."""


def command(argv: list[str]) -> str:
    """Make, sign, renew, revoke or list TLS certificates, as the first argument says; return the text to print.

    Raises:
        BadInput: an option is wrong, or the folder lacks a file that the command needs.
    """
    if not argv or "--help" in argv or "-h" in argv:
        return USAGE
    if argv[0] not in _COMMANDS:
        raise BadInput(f"unknown command 'certs {argv[0]}': {nearest(argv[0], _COMMANDS)}")
    options = options_of(parser(argv[0]), argv[1:])
    if hasattr(options, "days"):
        options.days = whole_number("days", options.days)
    return _COMMANDS[argv[0]](options)


def parser(name: str = "") -> ArgumentParser:
    """Return a parser for the options of `raafl certs NAME`, or of all `raafl certs` commands if ``name`` is empty."""
    found = ArgumentParser(prog="raafl certs", exit_on_error=False, add_help=False, allow_abbrev=False)
    found.add_argument("--folder", default="certs", type=Path)
    if name in ("init", ""):
        found.add_argument("--federation", default="federation")
    if name in ("server", "sign", "renew", ""):
        found.add_argument("--days", default="30")
    if name in ("sign", ""):
        found.add_argument("--clients")
    if name in ("list", ""):
        found.add_argument("--json", action="store_true")
    if name == "server":
        found.add_argument("names", nargs="+", metavar="HOST")
    if name in ("request", "sign", "renew", "revoke"):
        found.add_argument("name", metavar="FILE" if name == "sign" else "SITE")
    return found


def _init(options: Namespace) -> str:
    from raafl.sites.authority import Authority
    from raafl.sites.certificates import write

    made = Authority.create(options.folder, options.federation)
    if not (options.folder / "sites.yaml").exists():
        write(options.folder / "sites.yaml", SITES.encode())
    return f"made the authority of federation '{made.federation}' in {options.folder}: keep {options.folder / 'ca.key'} to yourself"


def _server(options: Namespace) -> str:
    from raafl.sites.authority import Authority

    made = Authority(options.folder).issue_server(options.names, options.days)
    return f"made {options.folder / 'server.crt'} for {', '.join(options.names)}, valid until {_day(made)}"


def _request(options: Namespace) -> str:
    from raafl.sites.authority import fingerprint, request

    made = request(options.folder, options.name)
    return (
        f"made {options.folder / options.name}.key, which stays here, and {options.folder / options.name}.csr: send that to the "
        f"federation's operator, and tell them its fingerprint:\n{fingerprint(made)}"
    )


def _sign(options: Namespace) -> str:
    from raafl.sites.authority import Authority, fingerprint, read_request, request_site
    from raafl.sites.certificates import read, write

    authority = Authority(options.folder)
    request = read_request(
        sys.stdin.buffer.read(1 << 20) if options.name == "-" else read(Path(options.name)), options.name
    )
    site = request_site(request)
    clients = [] if options.clients is None else [whole_number("clients", one) for one in options.clients.split(",")]
    sites = options.folder / "sites.yaml"
    # before anything is signed: the server's list may be invalid
    listed = _extended(sites, site, clients) if clients else None
    made = authority.sign(request, options.days)
    if listed is not None:
        write(sites, listed.encode())
    return (
        f"signed {options.folder / site}.crt for site '{site}', valid until {_day(made.certificate)}: send it back with "
        f"{options.folder / 'ca.crt'} and {options.folder / 'revoked.crl'}, if this is the fingerprint that the site told you:\n"
        f"{fingerprint(request)}" + ("" if clients else _hint_if_unlisted(options, site))
    )


def _hint_if_unlisted(options: Namespace, site: str) -> str:
    """Return a hint with the command that adds a site to the server's list of sites; "" if the list has it."""
    from raafl.sites.server import read_sites

    path, client = options.folder / "sites.yaml", 1
    if path.exists():
        # an invalid list is no obstacle here: the command in the hint reports why it is invalid
        with suppress(BadInput):
            sites = read_sites(path)
            if site in sites:
                return ""
            client = max((one for rules in sites.values() for one in rules.clients), default=0) + 1
    folder = f" --folder {shlex.quote(str(options.folder))}" if options.folder != Path("certs") else ""
    file = shlex.quote("FILE.csr" if options.name == "-" else options.name)
    return (
        f"\nsite '{site}' can be no client yet, since {path} does not list it: "
        f"raafl certs sign {file} --clients {client}{folder}"
    )


def _extended(path: Path, site: str, clients: list[int]) -> str | None:
    """Add a site to the server's list of sites; return the new text, or None if it has the site with the same clients.

    Raises BadInput if it has the site with other clients, or if the server would refuse the old or the new list.
    """
    from raafl.sites.certificates import read
    from raafl.sites.server import read_sites

    sites = read_sites(path) if path.exists() else {}
    if site in sites and sites[site].clients == frozenset(clients):
        return None
    if site in sites:
        raise BadInput(
            f"clients is {clients}, but '{path}' lists site '{site}' with {sorted(sites[site].clients)}: change that entry, "
            "or leave --clients out"
        )
    for other, rules in sites.items():
        if taken := sorted(rules.clients.intersection(clients)):
            raise BadInput(f"clients is {clients}, but '{path}' lists {taken} for '{other}': give ids of no other site")
    old = read(path).decode() if path.exists() else SITES
    return _with_line(old, load_untrusted_yaml(old) if sites else {}, path, site, clients)


def _with_line(old: str, tree: dict[str, Any], path: Path, site: str, clients: list[int]) -> str:
    """Append a line for ``site`` to the server's list, a text; raise `BadInput` if the text then is not that list plus ``site``."""
    expected = {**tree, site: {"clients": clients}}
    line = f"{site}: {{clients: {clients}}}"
    # try quotes, since YAML reads names such as on or 007 as other types
    for found in (line, line.replace(site, f"'{site}'", 1)):
        text = f"{old.rstrip()}\n{found}\n"
        with suppress(ValueError):
            if load_untrusted_yaml(text) == expected:
                return text
    raise BadInput(f"'{path}' cannot take a line at its end: add `{line}` yourself, and leave --clients out")


def _renew(options: Namespace) -> str:
    from raafl.sites.authority import Authority

    made = Authority(options.folder).renew(options.name, options.days)
    return f"made {options.folder / options.name}.crt, valid until {_day(made.certificate)}"


def _revoke(options: Namespace) -> str:
    from raafl.sites.authority import Authority

    taken = Authority(options.folder).revoke(options.name)
    said = f"revoked '{options.name}': {quantity(len(taken), 'valid certificate')}"
    if options.name != "server":
        return said
    return (
        f"{said}: send {options.folder / 'revoked.crl'} to every site, to lie beside its ca.crt, since a site without it still "
        f"takes the certificate; remove {options.folder / 'server.key'}, and make a new key with `raafl certs server HOST...`"
    )


def _list(options: Namespace) -> str:
    from raafl.sites.authority import Authority, fingerprint

    rows: list[dict[str, Any]] = [
        {
            "name": one.holder.site or "server",
            "serial": f"{one.certificate.serial_number:x}",
            "until": _day(one.certificate),
            "days_left": round(one.days_left, 1),
            "fingerprint": fingerprint(one.certificate),
            "state": "revoked" if one.revoked else "valid" if one.valid else "expired",
        }
        for one in Authority(options.folder).issued()
    ]
    if options.json:
        return json.dumps(rows)
    lines = []
    for row in rows:
        soon = row["state"] == "valid" and row["days_left"] < 7
        remedy = f"   expires soon: raafl certs renew {row['name']}" if soon else ""
        lines.append(
            f"{row['name']:24} {row['state']:8} until {row['until']}   key {row['fingerprint'][:19]}...{remedy}"
        )
    return "\n".join(lines) or "no certificates yet"


def _day(certificate: Any) -> str:
    return f"{certificate.not_valid_after_utc:%Y-%m-%d}"


_COMMANDS: dict[str, Callable[[Namespace], str]] = {
    "init": _init,
    "server": _server,
    "request": _request,
    "sign": _sign,
    "renew": _renew,
    "revoke": _revoke,
    "list": _list,
}
