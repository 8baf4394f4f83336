"""Read and write keys and certificates as PEM files; a private key is readable by its owner alone."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from raafl.atomic_file import atomic_file, write_private
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
# A site is ``raafl://FEDERATION/site/SITE``, a server ``raafl://FEDERATION/server``. Certificates of another authority are taken
# as well where they have such a URI.

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
