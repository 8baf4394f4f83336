"""Write and read seals: signed entries with hashes of a run's journal, tables, checkpoints and other files.

A seal is a row of `seals.jsonl`, written when a run starts, after each checkpoint and at the end. It says that the journal
had so many rows and this head, and which digests the files had. Its signature covers all of its other fields; each seal has
the digest of the one before.

The seals are no rows of the journal: a journal depends on the run's events alone, and two equal simulations have one head.
"""

from __future__ import annotations

import base64
import binascii
import csv
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from raafl.atomic_file import state_folder, write_private
from raafl.errors import BadInput
from raafl.runfolder.append_file import START, AppendFile, complete_rows, to_json
from raafl.runfolder.schema import CHECKPOINTS, CONFIG, GROWING, MODEL, SEALS, SUMMARY, Sealed, TableSeal

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_SIGNATURE: Final = b',"signature":"'
_CONTEXT: Final = "raafl seal 1\n"
"""Prefix of every text that is signed, so that a signature is valid for nothing else that the key signs."""
_log = logging.getLogger(__name__)


class TableDigest:
    """Digest of the rows of a table, computed as rows are added; the header is left out.

    `lines`: number of lines in the digest.
    `more_lines`: number of complete lines of the file that follow them.
    """

    def __init__(self) -> None:
        self.lines = self.more_lines = 0
        self._hash = hashlib.sha256()

    @classmethod
    def of_file(cls, path: Path, lines: int | None = None) -> Self:
        """Compute the digest of the first ``lines`` complete lines after the header of a file; None = all lines."""
        found = cls()
        with path.open(encoding="utf-8", errors="surrogateescape", newline="") as text:
            header = csv.reader(text)
            next(header, None)
            skipped = header.line_num
        with path.open("rb") as file:
            for number, line in enumerate(file):
                if number < skipped or not line.endswith(b"\n"):
                    continue
                if found.lines == lines:
                    found.more_lines += 1
                else:
                    found.add(line)
        return found

    def add(self, data: bytes) -> None:
        """Add complete lines to the digest."""
        lines = data[:-1].split(b"\n")
        self._hash.update(b"".join([line.rstrip(b",\r") + b"\n" for line in lines]))
        self.lines += len(lines)

    def seal(self, columns: Sequence[str]) -> TableSeal:
        """Return the digest of the rows added so far, with the columns of their table."""
        return TableSeal(self.lines, tuple(columns), self._hash.hexdigest())


@dataclass(frozen=True, slots=True)
class Seal:
    """A seal, read from the file of seals: a signed entry with hashes of the run's files."""

    data: Mapping[str, Any]  # fields of the seal
    text: str  # text that the signature covers
    signature: str | None = field(default=None)  # signature in base64; None = unsigned


class SealFile:
    """Writer of a run's seals (signed entries with hashes of its files); used by one thread at a time.

    A seal that cannot be written stays in memory, and is written at the next attempt that succeeds.
    """

    def __init__(
        self,
        path: Path,
        signer: Signer | None,
        warn: Callable[[str], None] = _log.warning,
        *,
        remake: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the file of seals, or continue an existing one.

        `signer`: signs each seal; None = seals are unsigned. Raises OSError if the file cannot be opened.
        """
        self._signer = signer
        self._before = _last_digest(path)
        self._file: AppendFile[bytes] = AppendFile(path, bytes, warn, new=not path.exists(), remake=remake)

    def add(
        self,
        sealed: Sealed,
        *,
        version: int,
        files: Mapping[str, str],
        final: bool = False,
        altered: Iterable[str] = (),
    ) -> bool:
        """Write a seal (signed entry with hashes) of rows that are on the disk, see `sync`; return whether the disk took it."""
        data: dict[str, Any] = {
            "at": int(time.time()),
            "version": version,
            "rows": sealed.rows,
            "head": sealed.head,
            "tables": {name: asdict(one) for name, one in sealed.tables.items()},
            "files": dict(files),
            "before": self._before,
            "key": None if self._signer is None else self._signer.public,
        }
        data |= ({"final": True} if final else {}) | ({"altered": list(altered)} if altered else {})
        text = to_json(data)
        line = text.encode() + b"\n"
        if self._signer is not None:
            signature = self._signer.sign(_CONTEXT + text).encode()
            line = b"".join((text[:-1].encode(), _SIGNATURE, signature, b'"}\n'))
        self._before = hashlib.sha256(line).hexdigest()
        return self._file.add(line)

    def flush(self) -> None:
        """Try again to write the seals that could not be written so far."""
        self._file.flush()

    def close(self) -> None:
        """Try once more to write the seals that could not be written so far, and close the file."""
        self._file.close()


def sync(folder: Path) -> None:
    """Flush journal and tables to disk, so that after a power failure no seal, and no checkpoint, knows of rows that were lost."""
    for name in GROWING:
        with suppress(OSError):
            descriptor = os.open(folder / name, os.O_RDONLY)
            try:
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)


class RunSeals:
    """The seals of a run folder; their file is opened with the first, so that a full disk does not keep a run from starting."""

    def __init__(
        self, folder: Path, signer: Signer | None, warn: Callable[[str], None], remake: Callable[[], None]
    ) -> None:
        self._folder, self._signer, self._warn, self._remake = folder, signer, warn, remake
        self._file: SealFile | None = None
        self._files: dict[str, str] = {}  # digests of all files sealed so far, by name

    def seal(
        self, sealed: Sealed, version: int, names: Iterable[str], *, final: bool = False, altered: Iterable[str] = ()
    ) -> bool:
        """Write a seal with the digests of files; the last one has those of all files. Return whether the disk took it.

        `names`: files that are new since the last seal, by their paths in the folder; ignored in the last seal.
        """
        if version and (final or CONFIG in names):  # rows before a checkpoint were flushed before it was written
            sync(self._folder)
        if final:
            saved = sorted((self._folder / CHECKPOINTS).glob("*.ckpt"))
            names = [SUMMARY, CONFIG, MODEL, *(f"{CHECKPOINTS}/{path.name}" for path in saved)]
        files = digests(self._folder, (name for name in names if not final or name not in self._files))
        self._files |= files
        if final:
            files = {name: digest for name, digest in self._files.items() if (self._folder / name).is_file()}
        path = self._folder / SEALS
        if self._file is None:
            try:
                self._file = SealFile(path, self._signer, self._warn, remake=self._remake)
            except OSError as error:
                self._warn(f"{path} cannot be written: {error.strerror}; the run's books are not sealed")
                return False
        return self._file.add(sealed, version=version, files=files, final=final, altered=altered)

    def close(self) -> None:
        """Close the file of seals."""
        if self._file is not None:
            self._file.close()


def read_seals(path: Path) -> list[Seal | None]:
    """Read the seals (signed entries with hashes of a run's files) of a file, one a line, in order.

    An invalid line gives None in its place; an incomplete last line is left out.

    Raises:
        OSError: the file cannot be read.
    """
    return [_seal(line) for line in complete_rows(path.read_bytes())]


def _seal(line: bytes) -> Seal | None:
    text, signature = line[:-1], None
    if _SIGNATURE in line:
        text, _, tail = line.rpartition(_SIGNATURE)
        text, signature = text + b"}", tail.removesuffix(b'"}\n').decode(errors="replace")
    try:
        data = json.loads(text)
        rows, tables, files = data["rows"], data["tables"], data["files"]
        sound = type(rows) is int and isinstance(tables, dict) and isinstance(files, dict)
        return Seal(data, _CONTEXT + text.decode(), signature) if sound else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def seal_digest(line: bytes) -> str:
    """Return the digest of a line of `seals.jsonl`; the next line contains it as ``before``, so that lines form a chain."""
    return hashlib.sha256(line).hexdigest()


def _last_digest(path: Path) -> str:
    if not path.is_file():
        return START
    lines = complete_rows(path.read_bytes())
    return seal_digest(lines[-1]) if lines else START


def file_digest(path: Path) -> str:
    """Return the SHA-256 digest of a file, as hexadecimal digits.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 digests of files in a folder, by their paths; the name of a subfolder stands for all files in it.

    Links and unreadable files are left out.
    """
    found: dict[str, str] = {}
    for name in names:
        path = folder / name
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        files = [one for one in inside if one.is_file() and not one.is_symlink() and not one.name.startswith(".")]
        for one in files:
            with suppress(OSError):
                found[one.relative_to(folder).as_posix()] = file_digest(one)
    return found


# Sign the records of a run with a private key, and check such signatures. It is the TLS key of a server or site, if one
# is named; else an Ed25519 key that is made at first use in the user's state folder, where only the user can read it.

KEY_FILE: Final = "signing.key"
"""Name of the key file in the user's state folder."""


@dataclass(frozen=True)
class Signer:
    """A private key that signs the records of runs."""

    key: Ed25519PrivateKey | EllipticCurvePrivateKey
    public: str  # public key as DER in base64

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
    """Write a new Ed25519 key; of two processes that do so at once, the first one's key stays."""
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
