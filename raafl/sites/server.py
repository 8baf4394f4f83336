"""Hold clients of other sites to what the server's operator allows them, from an allow-list that is read again when it changes.

The list is a YAML file, one entry for each site. With the revocation list of `raafl certs` it decides who is let in and who
stays: what is removed or revoked is cut within a second, and nobody else notices.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import yaml

from raafl.core.types import ClientInfo
from raafl.devices import Profile
from raafl.errors import BadInput, nearest, no_utf8
from raafl.plain_yaml import load_untrusted_yaml, load_yaml, yaml_problem
from raafl.runfolder.append_file import AppendFile
from raafl.runfolder.schema import CLIENT_LOGS
from raafl.runfolder.seals import Signer
from raafl.runtime.protocol import Answer, Assign, Failed, LogLine, SignedHead
from raafl.runtime.server.session_protocol import SessionExtension, SessionProtocol, Task
from raafl.sites.credentials import stamp_of
from raafl.submodel import FlatTensors
from raafl.transport import Refused
from raafl.transport.tcp.listener import TokenBucket
from raafl.units import quantity

if TYPE_CHECKING:
    from raafl.runtime.run import Run
    from raafl.transport.tcp.listener import Peer

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
        """Read the allow-list at ``path``; raise BadInput if it or the revocation list is invalid.

        `revoked`: function that reads the serial numbers of revoked certificates. `watched`: the files that it reads.
        """
        self._sites = WatchedFiles("list of sites", (path,), lambda: read_sites(path))
        self._revoked = WatchedFiles("list of revoked certificates", watched, revoked)

    def authorize(self, peer: Peer) -> None:
        """Raise `Refused` for a client whose certificate was revoked, or whose site may not use the client id."""
        if peer.site is None:
            return
        clients = self.rules_of(peer).clients
        if peer.client not in clients:
            known = ", ".join(map(str, sorted(clients))) or "none"
            raise Refused("unknown-client", f"site '{peer.site}' may not be client {peer.client}: it may be {known}")

    def rules_of(self, peer: Peer, *, others: Collection[str] = ()) -> SiteRules:
        """Return the rules of a peer's site; raise `Refused` if its certificate was revoked, or the site is unknown.

        `others`: sites that need not be listed.
        """
        if peer.serial in self._revoked.value:
            raise Refused("revoked", f"the certificate of site '{peer.site}' was revoked")
        rules = self._sites.value.get(str(peer.site), ANYTHING if peer.site in others else None)
        if rules is None:
            raise Refused("unknown-site", f"site '{peer.site}' is not on the server's list")
        return rules

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
        # read both lists even if the first one is invalid
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
        load_yaml(text)  # the stricter loader reports where the YAML is invalid, and a site that is listed twice
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
    """Check whether an allow-list has nothing but comments and empty lines."""
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
    try:  # YAML reads 5.0e12 as text, so convert it
        least, most = map(float, bound if isinstance(bound, list) else (0.0, bound))
        sound = least <= most
    except (TypeError, ValueError):
        sound = False
    if not sound:
        raise BadInput(f"{where}.profile.{name} is {bound!r}: give the largest value, or [least, largest]")
    return least, most


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


@dataclass(frozen=True, slots=True)
class SiteRules:
    """Limits for the clients of one site."""

    clients: frozenset[int] = frozenset()  # client ids that the site may use
    max_samples: int | None = None  # largest number of training samples that one client may claim; None = any number
    own_data: bool = True  # whether clients may train on data of their own
    # smallest and largest allowed value for fields of the device profile
    profile: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def check(self, info: ClientInfo) -> None:
        """Raise `Refused` for a client that claims more, such as samples, than its site may; the client gets the reason."""
        if info.own_data and not self.own_data:
            raise Refused("own-data", f"client {info.id} has data of its own, which the server forbids its site")
        if self.max_samples is not None and info.num_samples > self.max_samples:
            raise Refused(
                "too-many-samples",
                f"client {info.id} says that it has {info.num_samples} samples: its site may have {self.max_samples} at most",
            )
        for name, (least, most) in self.profile.items():
            value = getattr(info.profile, name)
            if value is None or not least <= value <= most:
                raise Refused(
                    "profile",
                    f"client {info.id} says that its {name} is {value}: its site may claim {least:g} to {most:g}",
                )


ANYTHING = SiteRules()
"""No rules, for clients that are processes of the server's own command."""


class SiteSession(SessionExtension):
    """A session with a client of another site: rules for what it may claim, signed heads of the journal, its log lines."""

    def __init__(
        self,
        session: SessionProtocol,
        rules: Callable[[int], SiteRules],
        signer: Signer | None,
        take_logs: Callable[[int, Sequence[LogLine]], None],
    ) -> None:
        """Store the limits of the session's client and the signer.

        `rules`: returns the limits of a client by id. `signer`: signs the journal's hash that is sent with each task;
        None = unsigned. `take_logs`: called on any thread with the client's id and its log lines.
        """
        super().__init__(session)
        self._rules, self._signer, self._take_logs = rules(session.client), signer, take_logs

    def check(self, info: ClientInfo) -> None:
        """Refuse a client that claims more than its site may."""
        self._rules.check(info)

    def before(self, task: Task, message: Assign, values: FlatTensors) -> tuple[Assign, FlatTensors]:
        """Sign the journal's head, which the site keeps as evidence."""
        if task.head is None:
            return message, values
        return replace(message, head=SignedHead.sign(task.head, task.assignment.id, self._signer)), values

    def after(self, message: Answer | Failed) -> None:
        """Store the log lines that the site's policy allows the server."""
        self._take_logs(self.session.client, message.logs)


# seconds until an unreadable file is tried again: it can become readable without any change of its own
_RETRY_S = 5.0

T = TypeVar("T")


@contextmanager
def site_sessions(
    run: Run, rules: Callable[[int], SiteRules] = lambda client: ANYTHING
) -> Iterator[Callable[[SessionProtocol], SessionExtension]]:
    """Open the files for sessions with clients of other sites; yield a function that creates a session's extension.

    `rules`: returns the limits of a client's site.
    """
    logs = ClientLogs(run.folder, run.progress.warn)
    try:
        yield partial(SiteSession, rules=rules, signer=run.signer, take_logs=logs.add)
    finally:
        logs.close()


class WatchedFiles(Generic[T]):
    """Value read from files that may change.

    `value`: latest value that could be read.
    """

    def __init__(self, what: str, paths: tuple[Path, ...], read: Callable[[], T]) -> None:
        """Read the value for the first time with ``read``, whose errors are passed on."""
        self._what, self._paths, self._read = what, paths, read
        self._stamps = self._seen = self._look()
        self._failed: list[tuple[int, ...]] | None = None
        self._warned, self._retry_at = "", 0.0
        self.value = read()

    def reread(self) -> bool:
        """Read the value again if the files have changed and are at rest; return whether the value is new.

        Call this at intervals: a change counts at the second call that finds the files the same.
        If the files cannot be read, the value stays, a warning is logged once, and later calls try again.
        """
        before, self._seen = self._seen, self._look()
        if self._seen == self._stamps or self._seen != before:
            return False
        if self._seen == self._failed and time.monotonic() < self._retry_at:
            return False
        value, problem = self.value, ""
        try:
            value = self._read()
        except Exception as error:  # keep watching: the next change of the file may revoke a certificate
            problem = str(error) or type(error).__name__
        if self._look() != before:
            return False
        if problem:
            self._failed, self._retry_at = before, time.monotonic() + _RETRY_S
            self._warn(problem)
            return False
        self._stamps, self._warned = before, ""
        changed, self.value = value != self.value, value
        return changed

    def _warn(self, problem: str) -> None:
        if problem != self._warned:
            _log.warning("the earlier %s stays in force: %s", self._what, problem)
        self._warned = problem

    def _look(self) -> list[tuple[int, ...]]:
        return [stamp_of(path) for path in self._paths]


LINES_AT_ONCE: Final = 100
LINE_EVERY_S: Final = 1.0
"""Each client may have so many lines written at once, and one more each second; others are counted and dropped."""

MAX_FILE_BYTES: Final = 64 << 20


class ClientLogs:
    """Log lines of all clients of a run; callable from any thread. The file is created with the first line."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        """Store the path of the log file; ``warn`` is called once if writing fails or the file is full."""
        self._path, self._warn = folder / CLIENT_LOGS, warn
        self._bucket = TokenBucket(LINES_AT_ONCE, LINE_EVERY_S)
        self._dropped: Counter[int] = Counter()
        self._file: AppendFile[dict[str, Any]] | None = None
        self._left_bytes: int | None = None  # bytes that the file may still grow; None = it is not open yet
        self._lock, self._is_closed = threading.Lock(), False

    def add(self, client: int, lines: Sequence[LogLine]) -> None:
        """Store log lines of a client; if it sends more than the rate limit allows, lines are dropped."""
        for line in lines:
            with self._lock:
                if not self._bucket.take(client):
                    self._dropped[client] += 1
                    continue
                self._write(client, line)
            _log.log(
                logging.getLevelNamesMapping()[line.level.upper()],
                f"client {client} logs: {line.text}",
                extra={"client": client},
            )

    def _write(self, client: int, line: LogLine) -> None:
        if self._is_closed or (self._left_bytes is not None and self._left_bytes <= 0):
            return
        try:
            file = self._opened()
        except OSError as error:
            self._is_closed = True
            self._warn(f"{self._path} cannot be written: {error.strerror}; clients' log lines are only in this log")
            return
        row: dict[str, Any] = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "client": client}
        row |= {"level": line.level, "text": line.text}
        if (dropped := self._dropped.pop(client, 0)) > 0:
            row["dropped_before"] = dropped
        file.add(row)
        assert self._left_bytes is not None
        self._left_bytes -= len(_encode(row))
        if self._left_bytes <= 0:
            self._warn(
                f"{self._path} has reached {MAX_FILE_BYTES >> 20} MiB: further lines of clients are only in this log"
            )

    def _opened(self) -> AppendFile[dict[str, Any]]:
        if self._file is None:
            self._file = AppendFile(self._path, _encode, self._warn, new=False)
            self._left_bytes = MAX_FILE_BYTES - self._path.stat().st_size
        return self._file

    def close(self) -> None:
        """Close the file of the clients' log lines; later lines go to `logging` only."""
        with self._lock:
            self._is_closed = True
            if self._file is not None:
                self._file.close()


def _encode(row: dict[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"
