"""Issue, renew and revoke the certificates of a federation: a certificate authority that is a folder of files.

``ca.crt`` and ``ca.key`` are the authority, ``issued/`` has a copy of each certificate it signed, ``revoked.crl`` the list of
those it took back (RFC 5280), ``NAME.crt`` the latest certificate of each holder. Keys are ECDSA P-256. The copy of a revoked
certificate ends with ``.revoked.crt``, so that revocations outlast a list that is lost or replaced by an older one.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from raafl.errors import BadInput
from raafl.sites import certificates as files
from raafl.sites.certificates import Holder, RevocationList, check_name, holder_of, parse_list

DAYS = 30
"""Validity of a certificate unless asked otherwise."""

MAX_DAYS = 398
_AUTHORITY_DAYS = 5 * 365
_REVOKED = ".revoked.crt"
# certificates are valid from five minutes before their creation, for machines whose clocks are late
_SKEW = datetime.timedelta(minutes=5)
_USES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate that an authority issued."""

    certificate: x509.Certificate  # the certificate itself, as X.509
    holder: Holder  # server or site that the certificate names
    revoked: bool  # whether the authority has revoked the certificate

    @property
    def days_left(self) -> float:
        """Days until the certificate expires; negative = it has expired."""
        return (self.certificate.not_valid_after_utc - _now()).total_seconds() / 86400

    @property
    def valid(self) -> bool:
        """Whether the certificate can be used: neither revoked nor expired."""
        return not self.revoked and self.days_left > 0


class Authority:
    """Certificate authority of one federation.

    `folder`: folder of the authority's files.
    `certificate`: certificate of the authority itself.
    `federation`: name of the federation.
    """

    def __init__(self, folder: Path) -> None:
        """Read the authority's certificate and key from ``folder``; raise `BadInput` if it has none."""
        if not files.is_file(folder / "ca.key"):
            raise BadInput(
                f"folder is '{folder}', which has no certificate authority: make one with `raafl certs init`"
            )
        self.folder = folder
        self.certificate = files.read_certificate(folder / "ca.crt")
        self._key = files.read_key(folder / "ca.key")
        self.federation = str(self.certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)

    @classmethod
    def create(cls, folder: Path, federation: str) -> Authority:
        """Create the authority of a new federation; raise `BadInput` if the folder has one already."""
        check_name("federation", federation)
        key = files.new_key(folder / "ca.key")
        name = _common_name(federation)
        certificate = (
            _builder(name, name, key.public_key(), _now() + datetime.timedelta(days=_AUTHORITY_DAYS))
            .add_extension(x509.BasicConstraints(True, 0), True)
            .add_extension(_key_usage("key_cert_sign", "crl_sign"), True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .sign(key, hashes.SHA256())
        )
        files.write(folder / "ca.crt", files.to_pem(certificate))
        authority = cls(folder)
        authority._write_revoked([])
        return authority

    def issue_server(self, hosts: Sequence[str], days: int = DAYS) -> x509.Certificate:
        """Create a key and certificate for the server; ``hosts`` are the host names and IP addresses by which clients reach it."""
        names = [_host(host) for host in hosts]
        if not names:
            raise BadInput("HOST is missing: give the host names and IP addresses that clients use for the server")
        self._check_days(days)
        key = files.new_key(self.folder / "server.key")
        return self._issue(Holder(self.federation), key.public_key(), names, days)

    def sign(self, request: x509.CertificateSigningRequest, days: int = DAYS) -> Issued:
        """Issue a certificate for a site's signing request.

        Raises:
            BadInput: the request is damaged, its key is that of a revoked certificate, or the site has a valid certificate
                for another key.
        """
        self._check_days(days)
        site, key = request_site(request), request.public_key()
        for issued in self.issued():
            same_key = _spki(issued.certificate.public_key()) == _spki(key)
            if issued.revoked and same_key:
                raise BadInput(
                    f"the request of site '{site}' has the key of a certificate that was revoked: remove {site}.key there, and "
                    f"make a new key with `raafl certs request {site}`"
                )
            if issued.holder.site == site and issued.valid and not same_key:
                raise BadInput(
                    f"site is '{site}', which has a valid certificate for another key: run `raafl certs revoke "
                    f"{site}` first, or use another site name"
                )
        holder = Holder(self.federation, site)
        return Issued(self._issue(holder, key, [], days), holder, revoked=False)

    def renew(self, name: str, days: int = DAYS) -> Issued:
        """Issue a new certificate with the same key for a site, or for ``server``.

        Raises:
            BadInput: the site has no certificate, or only revoked ones.
        """
        self._check_days(days)
        mine = [issued for issued in self._certificates_of(name) if not issued.revoked]
        if not mine:
            remedy = f"`raafl certs request {name}` at the site" if name != "server" else "`raafl certs server HOST...`"
            raise BadInput(f"'{name}' was revoked: remove {name}.key, and make a new key with {remedy}")
        last = max(mine, key=lambda issued: issued.certificate.not_valid_before_utc)
        hosts = last.certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = [found for found in hosts if not isinstance(found, x509.UniformResourceIdentifier)]
        return Issued(self._issue(last.holder, last.certificate.public_key(), names, days), last.holder, revoked=False)

    def revoke(self, name: str) -> list[Issued]:
        """Revoke every certificate of a site, or of ``server``; return those that were valid before.

        The list is written with all earlier revocations, even if it was lost, and with a higher number than each before.

        Raises:
            BadInput: the site has no certificate.
        """
        mine = self._certificates_of(name)
        revoked = self._revoked() | {issued.certificate.serial_number for issued in mine}
        for path, certificate in self._copies():
            if certificate.serial_number in revoked and not path.name.endswith(_REVOKED):
                files.move(path, path.with_suffix(_REVOKED))
        self._write_revoked(sorted(revoked))
        return [issued for issued in mine if issued.valid]

    def issued(self) -> list[Issued]:
        """Return all certificates that the authority has issued, in the order in which they expire."""
        revoked, found = self._revoked(), []
        for _, certificate in self._copies():
            if (holder := holder_of(uris_of(certificate))) is not None:
                found.append(Issued(certificate, holder, certificate.serial_number in revoked))
        return sorted(found, key=lambda issued: issued.certificate.not_valid_after_utc)

    def _copies(self) -> list[tuple[Path, x509.Certificate]]:
        return [(path, files.read_certificate(path)) for path in (self.folder / "issued").glob("*.crt")]

    def _revoked(self) -> frozenset[int]:
        """Collect the serial numbers of revoked certificates, from the revocation list and from files ending in .revoked.crt."""
        listed = self._list()
        return (frozenset() if listed is None else listed.serials) | {
            copy.serial_number for path, copy in self._copies() if path.name.endswith(_REVOKED)
        }

    def _list(self) -> RevocationList | None:
        path = self.folder / "revoked.crl"
        return parse_list(files.read(path), self.certificate, str(path)) if path.is_file() else None

    def _certificates_of(self, name: str) -> list[Issued]:
        mine = [issued for issued in self.issued() if (issued.holder.site or "server") == name]
        if not mine:
            known = ", ".join(sorted({issued.holder.site or "server" for issued in self.issued()})) or "none"
            raise BadInput(f"'{name}' has no certificate here: give one of these: {known}")
        return mine

    def _issue(
        self, holder: Holder, key: PublicKeyTypes, hosts: Sequence[x509.GeneralName], days: int
    ) -> x509.Certificate:
        name = holder.site or "server"
        until = min(_now() + datetime.timedelta(days=days), self.certificate.not_valid_after_utc)
        use = ExtendedKeyUsageOID.SERVER_AUTH if holder.site is None else ExtendedKeyUsageOID.CLIENT_AUTH
        assert isinstance(key, ec.EllipticCurvePublicKey)
        certificate = (
            _builder(self.certificate.subject, _common_name(name), key, until)
            .add_extension(x509.BasicConstraints(False, None), True)
            .add_extension(_key_usage("digital_signature"), True)
            .add_extension(x509.ExtendedKeyUsage([use]), False)
            .add_extension(x509.SubjectAlternativeName([*hosts, x509.UniformResourceIdentifier(holder.uri)]), False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), False)
            .sign(self._key, hashes.SHA256())
        )
        files.write(self.folder / "issued" / f"{name}-{certificate.serial_number:x}.crt", files.to_pem(certificate))
        files.write(self.folder / f"{name}.crt", files.to_pem(certificate))
        return certificate

    def _write_revoked(self, serials: Sequence[int]) -> None:
        now, last = _now(), self._list()
        # each list needs a larger number than the last one; the time is larger even if the last list was lost
        number = max(int(now.timestamp()), 0 if last is None or last.number is None else last.number + 1)
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(now - _SKEW)
            .next_update(self.certificate.not_valid_after_utc)
            .add_extension(x509.CRLNumber(number), False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), False)
        )
        for serial in serials:
            builder = builder.add_revoked_certificate(
                x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
            )
        files.write(self.folder / "revoked.crl", files.to_pem(builder.sign(self._key, hashes.SHA256())))

    @staticmethod
    def _check_days(days: int) -> None:
        if not 1 <= days <= MAX_DAYS:
            raise BadInput(f"days is {days}: give 1 to {MAX_DAYS}")


def request(folder: Path, site: str) -> x509.CertificateSigningRequest:
    """Create a site's private key, unless it exists, and write a signing request to ``SITE.csr``; return the request."""
    check_name("site", site)
    path = folder / f"{site}.key"
    key = files.read_key(path) if path.exists() else files.new_key(path)
    made = x509.CertificateSigningRequestBuilder(_common_name(site)).sign(key, hashes.SHA256())
    files.write(folder / f"{site}.csr", files.to_pem(made))
    return made


def read_request(data: bytes, where: str) -> x509.CertificateSigningRequest:
    """Parse a signing request; ``where`` is the file's name for the message of a `BadInput`."""
    try:
        return x509.load_pem_x509_csr(data)
    except ValueError:
        raise BadInput(f"'{where}' has no signing request: give the file that `raafl certs request` made") from None


def request_site(request: x509.CertificateSigningRequest) -> str:
    """Return the name of the site in a signing request; raise `BadInput` if its key or its signature is invalid."""
    names = request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    key = request.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1 | ec.SECP384R1):
        raise BadInput("the request's key is not an ECDSA P-256 key: make the request with `raafl certs request`")
    if len(names) != 1 or not request.is_signature_valid:
        raise BadInput(
            "the request is not signed by its own key, or names no site: ask the site to make it again with `raafl "
            "certs request`"
        )
    return check_name("site", str(names[0].value))


def fingerprint(thing: x509.Certificate | x509.CertificateSigningRequest) -> str:
    """Return the SHA-256 of a public key in short groups, which two people can compare over the phone."""
    digest = hashlib.sha256(_spki(thing.public_key())).hexdigest().upper()
    return ":".join(digest[place : place + 4] for place in range(0, 64, 4))


def uris_of(certificate: x509.Certificate) -> list[str]:
    """Return the URIs in a certificate's subject alternative names."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)


def is_for(certificate: x509.Certificate, *, server: bool) -> bool:
    """Check whether a certificate has the extended key usage of a server (``serverAuth``) or of a client (``clientAuth``)."""
    use = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
    try:
        return use in certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (x509.ExtensionNotFound, ValueError):
        return False


def _spki(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    try:
        if not host or ":" in host or "/" in host:
            raise ValueError(host)
        return x509.DNSName(host.encode("idna").decode("ascii"))
    except (ValueError, UnicodeError):
        raise BadInput(f"HOST is '{host}': give a host name or an IP address, without a port") from None


def _key_usage(*uses: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{use: use in uses for use in _USES})


def _builder(
    issuer: x509.Name, subject: x509.Name, key: ec.EllipticCurvePublicKey, until: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - _SKEW)
        .not_valid_after(until)
    )


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
