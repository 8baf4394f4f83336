"""Decide which site may use which client id, from an allow-list that is read again when it changes.

The list is a YAML file, one entry for each site. With the revocation list of `raafl certs` it decides who is let in and who
stays: what is removed or revoked is cut within a second, and nobody else notices.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from raafl.devices import Profile
from raafl.errors import BadInput, nearest, no_utf8
from raafl.plain_yaml import load_yaml, yaml_problem
from raafl.runtime.server.site_rules import ANYTHING, SiteRules
from raafl.runtime.server.watched_files import WatchedFiles
from raafl.sanitize import load_untrusted_yaml
from raafl.transport import Refused
from raafl.units import quantity

if TYPE_CHECKING:
    from raafl.transport.tcp.opening import Peer

_LOOK_S = 0.25
_LARGEST_BYTES = 1 << 20
_FIELDS = ("clients", "max_samples", "own_data", "profile")
_BOUNDED = tuple(one.name for one in fields(Profile) if one.default is None or isinstance(one.default, float))
_log = logging.getLogger(__name__)


class Sites:
    """The allow-list of sites and the list of revoked certificates, read again when one of the files changes.

    If a changed file is missing or invalid, the earlier list stays in force and a warning is logged, so that an editing
    mistake neither ends sessions nor lets in a revoked certificate. Only the first reading raises an error.
    """

    def __init__(self, path: Path, revoked: Callable[[], frozenset[int]], watched: tuple[Path, ...] = ()) -> None:
        """Read the allow-list at ``path``; raises BadInput if it or the revocations are invalid.

        `revoked`: reads the serial numbers of revoked certificates. `watched`: files on which ``revoked`` depends.
        """
        self._sites = WatchedFiles("list of sites", (path,), lambda: read_sites(path))
        self._revoked = WatchedFiles("list of revoked certificates", watched, revoked)

    def authorize(self, peer: Peer) -> None:
        """Raise `Refused` for a client whose certificate was revoked, or whose site may not use the client id."""
        if peer.holder is None or peer.holder.site is None:
            return
        site = peer.holder.site
        if peer.serial in self._revoked.value:
            raise Refused("revoked", f"the certificate of site '{site}' was revoked")
        rules = self._sites.value.get(site)
        if rules is None:
            raise Refused("unknown-site", f"site '{site}' is not on the server's list")
        if peer.client not in rules.clients:
            known = ", ".join(map(str, sorted(rules.clients))) or "none"
            raise Refused("unknown-client", f"site '{site}' may not be client {peer.client}: it may be {known}")

    def rules(self, client: int) -> SiteRules:
        """Return the rules of the site to which the client id belongs."""
        return next((rules for rules in self._sites.value.values() if client in rules.clients), ANYTHING)

    @contextmanager
    def watch(self, changed: Callable[[], None]) -> Iterator[None]:
        """Return a context in which the files are watched for changes.

        ``changed`` is called, on a thread of its own, after new rules are in force.
        """
        stop = threading.Event()
        thread = threading.Thread(target=self._watch, args=(stop, changed), name="sites", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _watch(self, stop: threading.Event, changed: Callable[[], None]) -> None:
        while not stop.wait(_LOOK_S):
            if self.reread():
                changed()

    def reread(self) -> bool:
        """Read a list again if its files have changed; return whether a list is new. See `WatchedFiles.reread`."""
        # each by itself: an invalid list must not prevent the other from being reloaded
        new = [self._sites.reread(), self._revoked.reread()]
        if not any(new):
            return False
        sites, revoked = len(self._sites.value), len(self._revoked.value)
        what = f"{quantity(sites, 'site')}, {quantity(revoked, 'revoked certificate')}"
        _log.info("the list of sites has changed: %s", what)
        return True


def read_sites(path: Path) -> dict[str, SiteRules]:
    """Read an allow-list; return the rules of each site, by the site's name.

    Raises:
        BadInput: an entry is invalid, a site has two entries, or two sites have the same client id.
    """
    text = _text(path)
    try:
        load_yaml(text)  # reports where the YAML is invalid, or names a site twice
        tree = {} if _is_empty(text) else load_untrusted_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        problem = yaml_problem(error) if isinstance(error, yaml.YAMLError) else error
        raise BadInput(
            f"sites is '{path}': {problem}: write one entry `SITE: {{clients: [1]}}` for each site"
        ) from None
    found = {str(site): _rules(f"{path}: {site}", entry) for site, entry in tree.items()}
    owner: dict[int, str] = {}
    for site, rules in found.items():
        for client in rules.clients:
            if owner.setdefault(client, site) != site:
                raise BadInput(
                    f"{path}: client {client} is listed for '{owner[client]}' and for '{site}': list it for one of them"
                )
    return found


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_BYTES + 1)
    except OSError as error:
        raise BadInput(
            f"sites is '{path}', which cannot be read ({error.strerror}): list the sites there, for example "
            "`hospital-a: {clients: [1]}`, or give --sites FILE"
        ) from None
    if len(data) > _LARGEST_BYTES:
        raise BadInput(f"sites is '{path}', which has more than 1 MiB: give --sites FILE with a list of sites")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"sites is '{path}', which {no_utf8(error)}") from None


def _is_empty(text: str) -> bool:
    """Return whether a list contains only comments."""
    return all(not line.strip() or line.lstrip().startswith("#") for line in text.splitlines())


def _rules(where: str, entry: Any) -> SiteRules:
    if not isinstance(entry, dict):
        raise BadInput(f"{where} is {entry!r}: write {{clients: [1], max_samples: 1000}}")
    for name in entry:
        if name not in _FIELDS:
            raise BadInput(f"{where}.{name} is unknown: {nearest(str(name), _FIELDS)}")
    clients = entry.get("clients")
    clients = [clients] if isinstance(clients, int) else clients
    if not isinstance(clients, list) or not clients or not all(_is_count(one) for one in clients):
        raise BadInput(f"{where}.clients is {clients!r}: give the ids that the site may use, for example [1, 2]")
    most, own_data, profile = entry.get("max_samples"), entry.get("own_data", True), entry.get("profile") or {}
    if most is not None and not _is_count(most):
        raise BadInput(f"{where}.max_samples is {most!r}: give a whole number from 1")
    if not isinstance(own_data, bool):
        raise BadInput(f"{where}.own_data is {own_data!r}: give true or false")
    if not isinstance(profile, dict):
        raise BadInput(f"{where}.profile is {profile!r}: give {{flops_per_s: [1.0e9, 1.0e13]}}")
    return SiteRules(
        frozenset(clients), most, own_data, {name: _bounds(where, name, bound) for name, bound in profile.items()}
    )


def _bounds(where: str, name: str, bound: Any) -> tuple[float, float]:
    if name not in _BOUNDED:
        raise BadInput(f"{where}.profile.{name} is unknown: {nearest(str(name), _BOUNDED)}")
    try:  # YAML reads 5.0e12 as text
        least, most = map(float, bound if isinstance(bound, list) else (0.0, bound))
        sound = least <= most
    except (TypeError, ValueError):
        sound = False
    if not sound:
        raise BadInput(f"{where}.profile.{name} is {bound!r}: give the largest value, or [least, largest]")
    return least, most


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1
