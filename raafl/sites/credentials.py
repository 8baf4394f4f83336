"""Load certificates for the connections of a server and its sites: TLS 1.3 alone, with a certificate at both ends.

The authority is the federation's own, never the system's.
"""

from __future__ import annotations

import datetime
import hmac
import logging
import os
import ssl
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cryptography import x509

from raafl.errors import BadInput
from raafl.sites.authority import is_for, uris_of
from raafl.sites.certificates import RESERVED, Holder, Revocations, holder_of, is_file, is_missing
from raafl.transport.codec import Refused
from raafl.transport.tcp.credentials import TOKEN_BYTES, ClientLogin, Credentials, Proof, ServerLogin
from raafl.transport.tcp.handover import digest_of, preamble
from raafl.transport.tcp.stream import SocketStream, Waits, block
from raafl.transport.tcp.tls import REFUSED_THERE, TlsStream

ALPN = "raafl"
_MINUTE = "%Y-%m-%d %H:%M UTC"
_log = logging.getLogger(__name__)
_REMEDY = "make one with `raafl certs`, or name it with --tls_ca, --tls_cert and --tls_key"


@dataclass(frozen=True)
class TlsFiles(Credentials):
    """PEM files of one side of mutual TLS."""

    certified: ClassVar[bool] = True
    ca: Path  # certificates of the authorities that may have issued the other side's certificate
    cert: Path  # certificate of this side, followed by any intermediate certificates
    key: Path  # private key of this side, readable by its owner alone
    # list of revoked certificates, a file that may be missing; None = not checked, as on a client
    crl: Path | None = None
    # name of the run that this side offers or asks for; None = the server has a single run
    run: str | None = None

    @classmethod
    def find(cls, folder: Path, *, server: bool, given: dict[str, str | None]) -> TlsFiles:
        """Return the paths of the certificate files.

        A path that the user has not given is looked up in the folder of `raafl certs`.

        `given`: path that the user has named, or None, by field of `TlsFiles`: ``ca``, ``cert``, ``key`` and ``crl``.

        Raises:
            BadInput: a file is missing, or it is not clear which certificate to take.
        """
        named = {name: None if path is None else Path(path) for name, path in given.items()}
        ca, cert, key, crl = named["ca"], named["cert"], named["key"], named["crl"]
        if (cert is None) != (key is None):
            raise BadInput("--tls_cert and --tls_key belong together: give both, or neither")
        if cert is None or key is None:
            name = "server" if server else _site_in(folder)
            cert, key = folder / f"{name}.crt", folder / f"{name}.key"
        if crl is not None and is_missing(crl):
            raise BadInput(f"tls_crl is '{crl}', which does not exist: name a revocation list, or leave --tls_crl out")
        return cls(ca or folder / "ca.crt", cert, key, crl or folder / "revoked.crl")

    def check(self) -> Holder:
        """Return the site or server that the certificate names; raise `BadInput` if the certificate or its key cannot be used."""
        state = self.key.stat()
        mode = stat.S_IMODE(state.st_mode)
        # Kubernetes and systemd hand keys over in files that root owns and a group may read
        handed_over = state.st_uid == 0 and os.geteuid() != 0
        if mode & (stat.S_IRWXO | (stat.S_IWGRP | stat.S_IXGRP if handed_over else stat.S_IRWXG)):
            raise BadInput(
                f"tls_key is '{self.key}', which other users can access (mode {mode:03o}): chmod 600 '{self.key}'"
            )
        certificate = x509.load_pem_x509_certificate(self.cert.read_bytes())
        if certificate.not_valid_after_utc < (now := datetime.datetime.now(datetime.UTC)):
            raise BadInput(
                f"tls_cert is '{self.cert}', which expired on {certificate.not_valid_after_utc:%Y-%m-%d}: have it renewed "
                f"with `raafl certs renew`, or set this machine's clock, which says {now:%Y-%m-%d}"
            )
        holder = holder_of(uris_of(certificate))
        if holder is None:
            raise BadInput(
                f"tls_cert is '{self.cert}', which names no federation: get a certificate whose subject alternative "
                "names have the URI raafl://FEDERATION/server, or raafl://FEDERATION/site/SITE"
            )
        if not is_for(certificate, server=holder.site is None):
            use = "serverAuth" if holder.site is None else "clientAuth"
            raise BadInput(
                f"tls_cert is '{self.cert}', which the other end refuses: get a certificate with the extended key usage {use}"
            )
        return holder

    def dates(self) -> str:
        """Return the dates of the certificate's validity, and the time on this machine's clock, as text.

        Only the other side's clock decides whether it accepts the certificate, so a date to come is no `BadInput` here.
        """
        certificate = x509.load_pem_x509_certificate(self.cert.read_bytes())
        first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        return (
            f"tls_cert is '{self.cert}', which is valid from {first:{_MINUTE}} to {last:{_MINUTE}}, and this machine's clock "
            f"says {datetime.datetime.now(datetime.UTC):{_MINUTE}}"
        )

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Return a TLS 1.3 context that requires a certificate of the other side; raise `BadInput` if a file cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.set_alpn_protocols([ALPN])
        context.options |= ssl.OP_NO_TICKET
        if server:
            context.num_tickets = 0
        for name, path in (("tls_ca", self.ca), ("tls_cert", self.cert), ("tls_key", self.key)):
            if not is_file(path):
                raise BadInput(f"{name} is '{path}', which does not exist: {_REMEDY}")
        try:
            context.load_verify_locations(self.ca)
        except (ssl.SSLError, OSError):
            raise BadInput(f"tls_ca is '{self.ca}', which has no certificate in PEM: {_REMEDY}") from None
        try:
            # an empty passphrase: OpenSSL would otherwise ask for one at the terminal, and block an unattended server
            context.load_cert_chain(self.cert, self.key, password=lambda: b"")
        except (ssl.SSLError, OSError) as error:
            why = getattr(error, "reason", None) or error.strerror or error
            raise BadInput(
                f"tls_cert is '{self.cert}' and tls_key '{self.key}', which are not a certificate and its key "
                f"without a passphrase ({why}): {_REMEDY}"
            ) from None
        return context

    def server_login(self) -> ServerLogin:
        """Return the server's login: a certificate that is read again when it changes; raises `BadInput`."""
        return _ServerTls(self)

    def client_login(self) -> ClientLogin:
        """Return the client's login: a certificate that is read for each connection; raises `BadInput`."""
        return _ClientTls(self)


class ReloadedContext:
    """TLS context of a server, loaded again when one of its files has changed, so that a renewed certificate needs no restart."""

    def __init__(self, files: TlsFiles) -> None:
        """Load the TLS files; raise `BadInput` if one is missing or invalid."""
        self._files, self._lock = files, threading.Lock()
        self._stamp, self._context = self._look(), files.context(server=True)
        self._warned = ""

    def get(self) -> ssl.SSLContext:
        """Return the context of the present files; if they cannot be used at the moment, warn and return the previous context."""
        with self._lock:
            stamp = self._look()
            if stamp != self._stamp:
                try:
                    context = self._files.context(server=True)
                    self._files.check()
                # a file may be half written now, so the next connection tries again
                except (ValueError, OSError) as error:
                    self._warn(str(error))
                else:
                    self._context, self._stamp, self._warned = context, stamp, ""
                    _log.info("the server's TLS files have changed, and are in use from now on")
            return self._context

    def _warn(self, problem: str) -> None:
        if problem != self._warned:
            _log.warning("the earlier certificate of the server stays in use: %s", problem)
        self._warned = problem

    def _look(self) -> list[tuple[int, ...]]:
        return [stamp_of(path) for path in (self._files.ca, self._files.cert, self._files.key)]


def stamp_of(path: Path) -> tuple[int, ...]:
    """Return inode, size and times of change of a file, by which a change is noticed; zeros if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0, 0)
    # ctime, since chmod leaves the size and mtime as they are
    return (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _site_in(folder: Path) -> str:
    """Find the only certificate in a folder that has its private key beside it; return the site's name, or raise `BadInput`."""
    found = sorted(
        file.stem for file in folder.glob("*.key") if file.stem not in RESERVED and is_file(file.with_suffix(".crt"))
    )
    if len(found) == 1:
        return found[0]
    if found:
        raise BadInput(f"'{folder}' has certificates of {', '.join(found)}: name one with --tls_cert and --tls_key")
    raise BadInput(
        f"'{folder}' has no site's certificate with its key: run `raafl certs request SITE`, have the request "
        "signed, and put SITE.crt and ca.crt there; or name your files with --tls_ca, --tls_cert and --tls_key"
    )


@dataclass(frozen=True, slots=True)
class _Certificate:
    """Certificate that a peer presented: its holder, serial number, and whether it allows the peer's role (server or client)."""

    holder: Holder | None
    serial: int
    is_for_its_role: bool

    @classmethod
    def proven(cls, stream: SocketStream, *, server: bool) -> Waits[_Certificate]:
        """Do the TLS handshake and return the peer's certificate; ``server``: whether the peer acts as the server."""
        assert isinstance(stream, TlsStream) and isinstance(stream.sock, ssl.SSLSocket)
        yield from stream.shaking_hands()
        if stream.sock.selected_alpn_protocol() != ALPN:
            raise Refused("bad-magic", "the other end speaks TLS, but is not raafl's")
        try:
            # a certificate without the extension "extended key usage" is allowed any role, as OpenSSL does
            found = x509.load_der_x509_certificate(stream.sock.getpeercert(binary_form=True) or b"")
            return cls(holder_of(uris_of(found)), found.serial_number, is_for(found, server=server))
        except (ValueError, x509.InvalidVersion):
            raise Refused("bad-certificate", "it cannot be read") from None


class _ServerTls(ServerLogin):
    """Server's login over TLS: it admits clients whose certificate names a site of the server's own federation."""

    def __init__(self, files: TlsFiles) -> None:
        self._context = ReloadedContext(files)
        self._federation = files.check().federation
        self._run = None if files.run is None else digest_of(files.run)

    def context(self) -> ssl.SSLContext:
        return self._context.get()

    def begin(self, stream: SocketStream) -> Waits[Callable[[bytes], Proof]]:
        certificate = yield from _Certificate.proven(stream, server=False)

        def check(token: bytes) -> Proof:
            holder = certificate.holder
            if holder is None or holder.site is None:
                raise Refused("bad-certificate", "it names no site: it needs the URI raafl://FEDERATION/site/SITE")
            if holder.federation != self._federation:
                raise Refused(
                    "bad-certificate",
                    f"it is of federation '{holder.federation}', this server of '{self._federation}'",
                )
            if not certificate.is_for_its_role:
                raise Refused("bad-certificate", "it is for no client: it needs the extended key usage clientAuth")
            # the digest sent before TLS chose this process, but was not protected; the one within TLS decides
            if self._run is not None and not hmac.compare_digest(token, self._run):
                raise Refused("wrong-run", "the client asks for another run than the one to which it was led")
            return holder.site, certificate.serial

        return check


class _ClientTls(ClientLogin):
    """Client's login over TLS: it trusts only a server whose certificate names the client's own federation."""

    def __init__(self, files: TlsFiles) -> None:
        self._files, self._federation = files, ""
        self._revoked: Callable[[], frozenset[int]] = frozenset
        if files.crl is not None:
            self._revoked = Revocations(files.crl, files.ca).latest
            self._revoked()  # fail now, not at the first connection, if the revocation list cannot be read
        self._token = bytes(TOKEN_BYTES)
        if files.run is not None:
            self.preamble, self._token = preamble(files.run), digest_of(files.run)

    def context(self) -> ssl.SSLContext:
        context = self._files.context(server=False)
        self._federation = self._files.check().federation
        return context

    def begin(self, stream: SocketStream) -> bytes:
        certificate = block(_Certificate.proven(stream, server=True))
        if certificate.holder != Holder(self._federation):
            raise Refused("bad-certificate", f"the server's certificate is not of the server of '{self._federation}'")
        if not certificate.is_for_its_role:
            raise Refused("bad-certificate", "the server's certificate has no extended key usage serverAuth")
        if certificate.serial in self._revoked():
            raise Refused("revoked", "the server's certificate was revoked")
        return self._token

    def explain(self, refused: Refused) -> str:
        return f" ({self._files.dates()})" if refused.detail.startswith(REFUSED_THERE) else ""
