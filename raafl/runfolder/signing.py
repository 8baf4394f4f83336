"""Sign the records of a run with a private key, and check such signatures.

The key is the one that a server or a site has for TLS, if it is named; else an Ed25519 key of this user, made at its first use
in the state folder, which only the user can read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from raafl.errors import BadInput
from raafl.state_folder import state_folder, write_private

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KEY_FILE: Final = "signing.key"
"""Name of the key file in the user's state folder."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Signer:
    """A private key that signs the records of runs."""

    key: Ed25519PrivateKey | EllipticCurvePrivateKey
    public: str  # public key, in base64 (DER)

    @classmethod
    def load(cls, path: Path) -> Signer:
        """Read a private key (Ed25519 or ECDSA) from a PEM file.

        Raises:
            BadInput: the file cannot be read, or has another kind of key.
        """
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        try:
            key = serialization.load_pem_private_key(path.read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise BadInput(
                f"signing key is '{path}', which cannot be read ({error}): give a PEM file with a private key"
            ) from None
        if not isinstance(key, Ed25519PrivateKey | EllipticCurvePrivateKey):
            raise BadInput(f"signing key is '{path}', which is not supported: use an Ed25519 or ECDSA private key")
        form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        return cls(key, base64.b64encode(key.public_key().public_bytes(*form)).decode())

    @classmethod
    def own(cls) -> Signer | None:
        """Return this user's own key, which is created if needed; None if it cannot be stored."""
        try:
            path = state_folder() / KEY_FILE
            if not path.is_file():
                _make_key(path)
            return cls.load(path)
        except (OSError, RuntimeError) as error:
            _log.debug("no signing key: %s", error)
            return None

    @classmethod
    def choose(cls, path: Path | None) -> Signer | None:
        """Return a signer with the key in a file, or with this user's own key.

        `path`: file of a private key; None, or a file that cannot be used (missing, damaged, RSA) = the user's own
        key.
        """
        if path is None:
            return cls.own()
        try:
            return cls.load(path)
        except BadInput as error:
            _log.info("%s; this user's own key signs", error)
            return cls.own()

    def sign(self, text: str) -> str:
        """Return the signature of a text, in base64."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        data = text.encode()
        signature = self.key.sign(data) if isinstance(self.key, Ed25519PrivateKey) else self.key.sign(data, _ecdsa())
        return base64.b64encode(signature).decode()


def read_public_key(text: str) -> str:
    """Read a public key from base64 text, or from a PEM file with a public key or a certificate.

    Raises:
        BadInput: ``text`` has another form.
    """
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        PublicFormat,
        load_der_public_key,
        load_pem_public_key,
    )
    from cryptography.x509 import load_pem_x509_certificate

    try:
        if Path(text).is_file():
            data = Path(text).read_bytes()
            key = load_pem_x509_certificate(data).public_key() if b"BEGIN CERT" in data else load_pem_public_key(data)
        else:
            key = load_der_public_key(base64.b64decode(text, validate=True))
    except (OSError, ValueError) as error:
        raise BadInput(f"key is '{text:.100}': give a public key in base64, or a PEM file with one ({error})") from None
    return base64.b64encode(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).decode()


def is_signed(text: str, signature: object, public: object) -> bool:
    """Check whether a text was signed with the private key that belongs to ``public``; False for malformed arguments, too."""
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_der_public_key

    if not isinstance(signature, str) or not isinstance(public, str):
        return False
    try:
        key = load_der_public_key(base64.b64decode(public, validate=True))
        data = base64.b64decode(signature, validate=True)
        if isinstance(key, Ed25519PublicKey):
            key.verify(data, text.encode())
        elif isinstance(key, EllipticCurvePublicKey):
            key.verify(data, text.encode(), _ecdsa())
        else:
            return False
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError, binascii.Error):
        return False
    return True


def key_name(public: str) -> str:
    """Return a short name for a public key: 16 hex digits of its SHA-256."""
    return hashlib.sha256(public.encode()).hexdigest()[:16]


def _ecdsa() -> ECDSA:
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.hashes import SHA256

    return ECDSA(SHA256())


def _make_key(path: Path) -> None:
    """Write a new Ed25519 key; if two processes do so at once, the key written first is kept."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    pem = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_private(temporary, pem)
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
