"""Read and write keys and certificates as PEM files; a private key is readable by its owner alone."""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import logging
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from raafl.atomic_file import atomic_file, state_folder, write_private
from raafl.errors import BadInput

_LARGEST_BYTES = 1 << 20


def new_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Create an ECDSA P-256 key in a new file with mode 600.

    Raises:
        BadInput: the file exists (a key is never overwritten), or it cannot be written.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, text)
    except FileExistsError:
        raise BadInput(
            f"'{path}' exists, and a key is never overwritten: remove it, or name another --folder"
        ) from None
    except OSError as error:
        raise BadInput(f"'{path}' cannot be written: {error.strerror}: check the folder and its permissions") from None
    return key


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a private key; raise `BadInput` if it is absent, malformed, or readable by others."""
    data = read(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise BadInput(f"'{path}' is a private key that other users can access (mode {mode:03o}): chmod 600 '{path}'")
    try:
        key = serialization.load_pem_private_key(data, None)
    except (ValueError, TypeError):
        raise BadInput(
            f"'{path}' has no PEM private key that can be read without a passphrase: name a file with such a key"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise BadInput(f"'{path}' has a key that is not ECDSA: make one with `raafl certs`")
    return key


def read_certificate(path: Path) -> x509.Certificate:
    """Read the first certificate of a PEM file; raise `BadInput` if there is none."""
    data = read(path)
    try:
        return x509.load_pem_x509_certificate(data)
    except ValueError:
        raise BadInput(f"'{path}' has no PEM certificate: name a file with a certificate") from None


def read(path: Path) -> bytes:
    """Return the bytes of a file of at most 1 MiB; raise `BadInput` if it is larger or cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_BYTES + 1)
    except OSError as error:
        raise BadInput(f"'{path}' cannot be read: {error.strerror}: check the path and its permissions") from None
    if len(data) > _LARGEST_BYTES:
        raise BadInput(f"'{path}' has more than 1 MiB, so it cannot be a certificate: name another file")
    return data


def is_file(path: Path) -> bool:
    """Check whether there is a file at a path; raise `BadInput` if this user may not look it up."""
    try:
        return path.is_file()
    except OSError as error:
        raise BadInput(f"'{path}' cannot be read: {error.strerror}: check the path and its permissions") from None


def write(path: Path, data: bytes) -> None:
    """Replace a file atomically, so that no reader sees half of it; raise `BadInput` if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.write(data)
    except OSError as error:
        raise BadInput(f"'{path}' cannot be written: {error.strerror}: check the folder and its permissions") from None


def move(path: Path, to: Path) -> None:
    """Rename a file; raise `BadInput` if that fails."""
    try:
        path.replace(to)
    except OSError as error:
        raise BadInput(f"'{path}' cannot be renamed: {error.strerror}: check the folder and its permissions") from None


def to_pem(thing: x509.Certificate | x509.CertificateRevocationList | x509.CertificateSigningRequest) -> bytes:
    """Encode a certificate, a revocation list or a signing request as PEM."""
    return thing.public_bytes(serialization.Encoding.PEM)


# Write and read the names of site and federation in a certificate, as a URI among its subject alternative names.
#
# A site is ``raafl://FEDERATION/site/SITE``, a server ``raafl://FEDERATION/server``. Certificates of another
# authority are also accepted if they have such a URI.

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
_SITE = re.compile(rf"raafl://({_NAME})/site/({_NAME})")
_SERVER = re.compile(rf"raafl://({_NAME})/server")
RESERVED = ("ca", "server")
"""Names of files in the folder of certificates, which no site can have."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Holder of a certificate: a site of a federation, or its server."""

    federation: str  # name of the federation
    site: str | None = None  # name of the site; None = the server

    @property
    def uri(self) -> str:
        """URI with the names of federation and site, written into the certificate."""
        return f"raafl://{self.federation}/" + ("server" if self.site is None else f"site/{self.site}")


def holder_of(uris: Iterable[str]) -> Holder | None:
    """Return the site or server that a certificate's URIs name; None unless exactly one of them is raafl's."""
    holders = []
    for uri in uris:
        if found := _SITE.fullmatch(uri):
            holders.append(Holder(found[1], found[2]))
        elif found := _SERVER.fullmatch(uri):
            holders.append(Holder(found[1]))
    return holders[0] if len(holders) == 1 else None


def check_name(field: str, name: str) -> str:
    """Check the name of a site or federation, and return it; raise `BadInput` if it has characters that are not allowed."""
    if not re.fullmatch(_NAME, name) or name in RESERVED:
        raise BadInput(
            f"{field} is '{name}': give 1 to 63 of the characters a-z, A-Z, 0-9, '.', '_' and '-', not "
            f"{' or '.join(RESERVED)}"
        )
    return name


# Read lists of revoked certificates (RFC 5280), and never go back to an older one, across restarts too.
#
# The newest list that this machine has seen of an authority stays in the user's state folder, as the authority signed it. So a
# file that is lost, or replaced by an older list, lets nobody in whose certificate was revoked.

FOLDER = "revoked"
"""Folder within the user's state folder with the newest revocation list of each authority."""
_GET_IT = ": get the newest list from the authority"

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
        """Store the paths of a revocation list and of the authority's certificate; `latest` reads them."""
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
                raise BadInput(f"{problem}{_GET_IT}")
            if problem:
                _log.warning("%s, which stays in force%s", problem, _GET_IT)
            self._is_read = True
            self._warned = problem and f"{problem}{_GET_IT}"
            return frozenset() if self._newest is None else self._newest.serials

    def latest(self) -> frozenset[int]:
        """Read the list as `read` does; if a later reading fails, warn once and return the newest serial numbers.

        Raises:
            BadInput: the first reading failed.
        """
        try:
            return self.read()
        except BadInput as error:
            if not self._is_read:
                raise
            if str(error) != self._warned:
                self._warned = str(error)
                _log.warning("the earlier list of revoked certificates stays in force: %s", error)
            return frozenset() if self._newest is None else self._newest.serials


class _Memory:
    """File with the newest revocation list of one authority that any process of this user has seen."""

    def __init__(self, authority: x509.Certificate) -> None:
        spki = authority.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        self._authority, self._name = authority, hashlib.sha256(spki).hexdigest()[:32]

    def load(self) -> RevocationList | None:
        """Load the stored list; return None if the file is missing or unreadable."""
        try:
            path = state_folder() / FOLDER / f"{self._name}.crl"
            return None if is_missing(path) else parse_list(read(path), self._authority, str(path))
        except (OSError, RuntimeError):
            return None
        except BadInput as error:
            _log.warning("the newest revocation list seen so far is not known: %s", error)
            return None

    def store(self, new: RevocationList) -> None:
        """Store a list unless the file has a newer one, perhaps from another process; log a warning on failure."""
        try:
            folder = state_folder() / FOLDER
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with (folder / f"{self._name}.lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                known = self.load()
                if known is None or known.order < new.order:
                    write(folder / f"{self._name}.crl", new.pem)
        except (OSError, RuntimeError, BadInput) as error:
            if new.serials:  # without revoked certificates nothing is lost
                _log.warning(
                    "the revocation list %s cannot be remembered (%s): after a restart an older one would count",
                    new,
                    error,
                )


def is_missing(path: Path) -> bool:
    """Check that nothing is at a path; a path that cannot be looked up, or that is no file, is not missing."""
    try:
        path.lstat()
    except OSError as error:
        return isinstance(error, FileNotFoundError | NotADirectoryError)
    return False
