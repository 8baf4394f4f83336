"""Read lists of revoked certificates (RFC 5280), and never go back to an older one, across restarts too.

The newest list that this machine has seen of an authority stays in the user's state folder, as the authority signed it. So a
file that is lost, or replaced by an older list, lets nobody in whose certificate was revoked.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from raafl.atomic_file import state_folder
from raafl.errors import BadInput
from raafl.sites.certificates import read, read_certificate, write

FOLDER = "revoked"
"""Folder within the user's state folder with the newest revocation list of each authority."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RevocationList:
    """Revocation list that an authority has signed."""

    serials: frozenset[int]  # serial numbers of the revoked certificates
    number: int | None  # number of the list, which grows with each list of the authority; None = the list has none
    date: datetime.datetime  # moment at which the list was made
    next_update: datetime.datetime | None  # moment from which the list is out of date; None = never
    pem: bytes  # the list as signed

    @property
    def order(self) -> tuple[int, datetime.datetime]:
        """Number and date, by which the newer of two lists is known; a list without a number is older than any with one."""
        return (-1 if self.number is None else self.number, self.date)

    def __str__(self) -> str:
        number = "without a number" if self.number is None else f"number {self.number}"
        return f"{number} of {self.date:%Y-%m-%d %H:%M:%S} UTC"


def parse_list(pem: bytes, authority: x509.Certificate, where: str) -> RevocationList:
    """Parse a revocation list, which may be out of date, and check that ``authority`` has signed it.

    Raises:
        BadInput: it is no revocation list, or another authority has signed it.
    """
    try:
        found = x509.load_pem_x509_crl(pem)
        if not found.is_signature_valid(authority.public_key()):  # type: ignore[arg-type]
            raise InvalidSignature
        numbers = [one.value.crl_number for one in found.extensions if isinstance(one.value, x509.CRLNumber)]
        serials = frozenset(entry.serial_number for entry in found)
        return RevocationList(
            serials, numbers[0] if numbers else None, found.last_update_utc, found.next_update_utc, pem
        )
    except (ValueError, TypeError, InvalidSignature):
        raise BadInput(
            f"'{where}' is not a revocation list signed by the authority: get a new copy from the authority"
        ) from None


def read_list(path: Path, authority: x509.Certificate) -> RevocationList:
    """Read a revocation list from a file, and check that ``authority`` has signed it.

    Raises:
        BadInput: the file has no revocation list, another authority has signed it, or its next update is overdue.
    """
    found = parse_list(read(path), authority, str(path))
    if found.next_update is not None and found.next_update < datetime.datetime.now(datetime.UTC):
        raise BadInput(
            f"'{path}' is out of date since {found.next_update:%Y-%m-%d} and may lack revocations: get the newest list "
            "from the authority"
        )
    return found


class Revocations:
    """Revoked certificates of a federation, by the newest list that this machine has seen; thread-safe."""

    def __init__(self, path: Path, ca: Path) -> None:
        """Store the paths of the revocation list and of the authority's certificate; nothing is read yet."""
        self._path, self._ca, self._lock = path, ca, Lock()
        self._newest: RevocationList | None = None
        self._is_read, self._warned = False, ""

    def read(self) -> frozenset[int]:
        """Read the list, and return the serial numbers of the revoked certificates; none while no list was ever seen.

        Raises:
            BadInput: the file has no list, or an outdated one. A file that is missing, or has an older list than this
                machine has seen, is a warning at the first call, and `BadInput` later; the newest list counts.
        """
        with self._lock:
            authority = read_certificate(self._ca)
            memory = _Memory(authority)
            self._newest = max(filter(None, (self._newest, memory.load())), key=lambda one: one.order, default=None)
            problem = ""
            if is_missing(self._path):
                if self._newest is not None:
                    problem = f"'{self._path}' is missing, but this machine has seen the revocation list {self._newest}"
            else:
                found = read_list(self._path, authority)
                if self._newest is not None and found.order < self._newest.order:
                    problem = f"'{self._path}' is the revocation list {found}, older than {self._newest}, seen before"
                elif found != self._newest:
                    memory.store(found)
                    self._newest = found
            if problem and self._is_read:
                raise BadInput(f"{problem}: get the newest list from the authority")
            if problem:
                _log.warning("%s, which stays in force: get the newest list from the authority", problem)
            self._is_read = True
            return frozenset() if self._newest is None else self._newest.serials

    def latest(self) -> frozenset[int]:
        """Read the list as `read` does; if a later reading fails, warn once and return the newest serial numbers.

        Raises:
            BadInput: the first reading failed.
        """
        try:
            found = self.read()
        except BadInput as error:
            if not self._is_read:
                raise
            if str(error) != self._warned:
                self._warned = str(error)
                _log.warning("the earlier list of revoked certificates stays in force: %s", error)
            return frozenset() if self._newest is None else self._newest.serials
        self._warned = ""
        return found


class _Memory:
    """File in which this user's processes store the newest revocation list of an authority."""

    def __init__(self, authority: x509.Certificate) -> None:
        spki = authority.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        self._authority, self._name = authority, hashlib.sha256(spki).hexdigest()[:32]

    def load(self) -> RevocationList | None:
        """Return the stored list; None if there is no readable one."""
        try:
            path = state_folder() / FOLDER / f"{self._name}.crl"
            return None if is_missing(path) else parse_list(read(path), self._authority, str(path))
        except (OSError, RuntimeError):
            return None
        except BadInput as error:
            _log.warning("the newest revocation list seen so far is not known: %s", error)
            return None

    def store(self, new: RevocationList) -> None:
        """Store a list, unless another process has stored a newer one; log a warning on failure."""
        try:
            folder = state_folder() / FOLDER
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with (folder / f"{self._name}.lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                known = self.load()
                if known is None or known.order < new.order:
                    write(folder / f"{self._name}.crl", new.pem)
        except (OSError, RuntimeError, BadInput) as error:
            if new.serials:  # losing a list without revocations does no harm
                _log.warning(
                    "the revocation list %s cannot be remembered (%s): after a restart an older one would count",
                    new,
                    error,
                )


def is_missing(path: Path) -> bool:
    """Check whether there is nothing at a path; what cannot be looked up, or is no file, is not missing."""
    try:
        path.lstat()
    except OSError as error:
        return isinstance(error, FileNotFoundError | NotADirectoryError)
    return False
