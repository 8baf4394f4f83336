"""Authenticate both ends of a connection by a client's key, and agree on encryption, before any other byte is read.

Four messages of fixed length; numbers are little-endian:

========= ====== ======= ========================================================================================
message   from   bytes   content
========= ====== ======= ========================================================================================
HELLO     client 44      magic, version (2), flags (2; 1 = demands encryption), client id (4), nonce (32)
CHALLENGE server 40      magic, version (2), zero (2), nonce (32)
PROOF     client 64      X25519 share (32), HMAC-SHA256 over HELLO, CHALLENGE and the share (32)
CONFIRM   server 68      flags (4; 1 = encrypted), X25519 share (32), HMAC-SHA256 over everything before it (32)
========= ====== ======= ========================================================================================

Each HMAC has a key of its own, derived from the client's key. The client proves first: a caller without the key gets the
challenge, which is the same for every run, and then the end of the connection. The keys of an encrypted session derive from the
client's key, both shares and all four messages, so that flags cannot be altered in transit, and recorded traffic stays closed
when a secret becomes known later.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from raafl.errors import BadInput
from raafl.transport.codec import Refused
from raafl.transport.connection import PeerLost
from raafl.transport.tcp.cipher import KEY_BYTES, RecordCipher, derive
from raafl.transport.tcp.stream import SocketStream

MAGIC = b"RAHS"
VERSION = 1
MIN_SECRET_BYTES = 16

_START = struct.Struct("<4sHH")  # of HELLO and CHALLENGE, in this and every later version
_ID = struct.Struct("<I")
_FLAGS = struct.Struct("<I")
_NONCE_BYTES = _SHARE_BYTES = _MAC_BYTES = 32
_ENCRYPTED = 1

CHALLENGE_BYTES = _START.size + _NONCE_BYTES
"""All that a peer which proves nothing gets."""

_MAX_SECRET_BYTES = 4096
_CLIENT_KEY = "raafl-client-"
_MAKE = "raafl key --output raafl.secret"

RUN_SECRET = "raafl-run-"
"""How a secret begins that `raafl key` has made for one run."""


@dataclass(frozen=True, slots=True)
class ClientKey:
    """Key with which one client authenticates."""

    client: int
    key: bytes = field(repr=False)

    def text(self) -> str:
        """Return the content of a key file for this client alone: ``raafl-client-ID:`` and 64 hexadecimal digits."""
        return f"{_CLIENT_KEY}{self.client}:{self.key.hex()}"


@dataclass(frozen=True, slots=True)
class Secret:
    """A run's secret, from which the key of each client is derived, or the key of one client alone.

    Attributes:
        key: the secret's bytes.
        client: None = a run's secret; else the only client whose key this is.
        path: file that it was read from.
    """

    key: bytes = field(repr=False)
    client: int | None = None
    path: str | None = field(default=None, compare=False)

    def for_client(self, client: int) -> ClientKey:
        """Return the key of ``client``.

        Raises:
            BadInput: ``client`` is no id, or this is the key of another client.
        """
        if not 0 < client < 2**32:
            raise BadInput(f"client is {client}: give a number of 1 to {2**32 - 1}")
        if self.client is None:
            return _client_key(self, client)
        if self.client != client:
            raise BadInput(
                f"client is {client}, but the secret is the key of client {self.client}: use --client {self.client}, or "
                f"ask the operator for the key of client {client}"
            )
        return ClientKey(client, self.key)


def load_secret(path: str | None = None) -> Secret:
    """Read a secret from the file ``path``, else from RAAFL_SECRET, else from the file that RAAFL_SECRET_FILE names.

    Surrounding white space is ignored. The form ``raafl-client-ID:HEX`` is the key of that client alone.

    Raises:
        BadInput: there is no secret, it is shorter than 16 bytes, or other users may read its file.
    """
    path = path or (None if os.environ.get("RAAFL_SECRET") else os.environ.get("RAAFL_SECRET_FILE"))
    if path:
        return replace(_parse(_read(path), f"secret_file is '{path}'"), path=path)
    value = os.environb.get(b"RAAFL_SECRET", b"")
    if not value:
        raise BadInput(
            f"no secret: give --secret_file FILE, or set RAAFL_SECRET_FILE or RAAFL_SECRET; this makes a file: {_MAKE}"
        )
    return _parse(value, "RAAFL_SECRET is set")


def server_handshake(
    stream: SocketStream, secret: Secret, encrypt: bool, claimed: Callable[[int], None] = lambda client: None
) -> tuple[int, RecordCipher | None]:
    """Run the server's side of the handshake; return the client's id, and the session's keys if it is encrypted.

    Args:
        stream: to the caller.
        secret: of the run.
        encrypt: encrypt the session.
        claimed: called with the id that the caller claims, before anything is verified or computed; may raise `Refused`.

    Raises:
        Refused: bad-magic, bad-version (after telling the client), wrong-secret, bad-share, or not-encrypted.
        PeerLost: the client closed the connection.
        PeerTimeout: the client was too slow.
    """
    start = _read_exactly(stream, _START.size)
    magic, version, flags = _START.unpack(start)
    if magic != MAGIC:
        raise Refused("bad-magic", f"{magic!r} is no raafl client")
    challenge = _START.pack(MAGIC, VERSION, 0) + os.urandom(_NONCE_BYTES)
    if version != VERSION:
        stream.write([challenge])
        raise Refused("bad-version", f"the client speaks version {version} of the handshake, this server {VERSION}")
    rest = _read_exactly(stream, _ID.size + _NONCE_BYTES)
    (client,) = _ID.unpack(rest[: _ID.size])
    claimed(client)
    stream.write([challenge])
    key = _client_key(secret, client)
    proof = _read_exactly(stream, _SHARE_BYTES + _MAC_BYTES)
    said = start + rest + challenge + proof[:_SHARE_BYTES]
    if not hmac.compare_digest(proof[_SHARE_BYTES:], _mac(key, b"client proof", said)):
        raise Refused("wrong-secret", f"the proof of client {client} is wrong")
    share, public = _share()
    confirm = _FLAGS.pack(_ENCRYPTED if encrypt else 0) + public
    said += proof[_SHARE_BYTES:] + confirm
    seal = _seal(key, share, proof[:_SHARE_BYTES], said, server=True) if encrypt else None
    stream.write([confirm + _mac(key, b"server proof", said)])
    if flags & _ENCRYPTED and not encrypt:
        raise Refused("not-encrypted", f"client {client} demands encryption, which is off here")
    return client, seal


def client_handshake(stream: SocketStream, key: ClientKey, demand_encryption: bool) -> RecordCipher | None:
    """Run the client's side of the handshake; return the session's keys if it is encrypted.

    Args:
        stream: connected to the server.
        key: of the client.
        demand_encryption: refuse a server that does not encrypt.

    Raises:
        Refused: bad-magic, bad-version, wrong-secret, bad-share, or not-encrypted.
        PeerLost: the server closed the connection.
        PeerTimeout: the server was too slow.
    """
    flags = _ENCRYPTED if demand_encryption else 0
    hello = _START.pack(MAGIC, VERSION, flags) + _ID.pack(key.client) + os.urandom(_NONCE_BYTES)
    stream.write([hello])
    start = _read_exactly(stream, _START.size)
    magic, version, _ = _START.unpack(start)
    if magic != MAGIC:
        raise Refused("bad-magic", f"what answers is no raafl server ({magic!r})")
    if version != VERSION:
        raise Refused(
            "bad-version",
            f"the server speaks version {version} of the handshake, this client {VERSION}: install the same raafl",
        )
    challenge = start + _read_exactly(stream, _NONCE_BYTES)
    share, public = _share()
    said = hello + challenge + public
    proof = _mac(key, b"client proof", said)
    stream.write([public + proof])
    try:
        answer = _read_exactly(stream, _FLAGS.size + _SHARE_BYTES + _MAC_BYTES)
    except PeerLost as lost:
        if lost.reason != "connection-closed":
            raise
        # A server says nothing to whom it does not know; other ends of a connection are resets.
        raise Refused("wrong-secret", f"the server does not take the proof of client {key.client}") from None
    confirm = answer[:-_MAC_BYTES]
    said += proof + confirm
    if not hmac.compare_digest(answer[-_MAC_BYTES:], _mac(key, b"server proof", said)):
        raise Refused("wrong-secret", f"the server does not know the secret of client {key.client}")
    (answered,) = _FLAGS.unpack(confirm[: _FLAGS.size])
    if answered & _ENCRYPTED:
        return _seal(key, share, confirm[_FLAGS.size :], said, server=False)
    if demand_encryption:
        raise Refused(
            "not-encrypted",
            "the server does not encrypt: start it with --encrypt true, or join with --encrypt false, too",
        )
    return None


def _client_key(secret: Secret, client: int) -> ClientKey:
    return ClientKey(client, derive(secret.key, b"raafl secret", b"raafl client %d" % client))


def _mac(key: ClientKey, label: bytes, said: bytes) -> bytes:
    return hmac.digest(derive(key.key, b"", b"raafl " + label), said, "sha256")


def _share() -> tuple[Any, bytes]:
    """Return a fresh X25519 key and its public share."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    private = X25519PrivateKey.generate()
    return private, private.public_key().public_bytes_raw()


def _seal(key: ClientKey, share: Any, peer: bytes, said: bytes, server: bool) -> RecordCipher:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    try:
        shared = share.exchange(X25519PublicKey.from_public_bytes(peer))
    except ValueError:
        raise Refused("bad-share", "the peer's X25519 share has no secret in it") from None
    salt = hashlib.sha256(said).digest()
    down, up = (derive(shared + key.key, salt, b"raafl seal " + way) for way in (b"to client", b"to server"))
    return RecordCipher(down, up) if server else RecordCipher(up, down)


def _read_exactly(stream: SocketStream, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    stream.read_into(memoryview(data))
    return bytes(data)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise BadInput(
                    f"secret_file is '{path}', which others may use (mode {stat.S_IMODE(mode):03o}): chmod 600 '{path}'"
                )
            return file.read(_MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise BadInput(f"secret_file is '{path}': {error.strerror}; this makes a secret: {_MAKE}") from None


def _parse(data: bytes, where: str) -> Secret:
    data = data.strip()
    if not MIN_SECRET_BYTES <= len(data) <= _MAX_SECRET_BYTES:
        size = f"more than {_MAX_SECRET_BYTES}" if len(data) > _MAX_SECRET_BYTES else str(len(data))
        raise BadInput(
            f"{where}, with a secret of {size} bytes: give {MIN_SECRET_BYTES} to {_MAX_SECRET_BYTES}; this makes one: {_MAKE}"
        )
    if not data.startswith(_CLIENT_KEY.encode()):
        return Secret(data)
    name, _, digits = data.decode(errors="replace").removeprefix(_CLIENT_KEY).partition(":")
    try:
        client, key = int(name), bytes.fromhex(digits)
    except ValueError:
        client, key = 0, b""
    if not 0 < client < 2**32 or len(key) != KEY_BYTES:
        raise BadInput(
            f"{where}, which is no client's key: give {_CLIENT_KEY}ID:HEX with {2 * KEY_BYTES} digits, whole"
        )
    return Secret(key, client)
