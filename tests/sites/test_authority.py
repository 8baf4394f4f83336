"""Certificates of a federation, checked by OpenSSL's own verification where it matters: `ssl` in tests/transport/tcp."""

from __future__ import annotations

import datetime
import stat

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from raafl.errors import BadInput
from raafl.sites import certificates as files
from raafl.sites.authority import Authority, fingerprint, is_for, read_request, request, uris_of
from raafl.sites.certificates import read_list


@pytest.fixture
def authority(tmp_path):
    return Authority.create(tmp_path / "ca", "fed")


def names(certificate, kind):
    return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(kind)


def revoked_by(authority):
    return read_list(authority.folder / "revoked.crl", authority.certificate).serials


def test_a_key_stays_at_the_site_and_is_its_owners_alone(authority, tmp_path):
    made = request(tmp_path / "site", "north")
    assert sorted(path.name for path in (tmp_path / "site").iterdir()) == ["north.csr", "north.key"]
    signed = authority.sign(read_request((tmp_path / "site" / "north.csr").read_bytes(), "north.csr"))
    assert not list(authority.folder.rglob("north.key"))
    for path in (authority.folder / "ca.key", tmp_path / "site" / "north.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert fingerprint(signed.certificate) == fingerprint(made)
    key = files.read_key(tmp_path / "site" / "north.key")
    assert isinstance(key.curve, ec.SECP256R1)
    assert request(tmp_path / "site", "north").public_key() == made.public_key(), "asked again, the key stays"


def test_what_is_in_the_certificates(authority, tmp_path):
    server = authority.issue_server(["server.example.org", "10.0.0.1", "::1"], days=7)
    site = authority.sign(request(tmp_path, "north")).certificate
    assert names(server, x509.DNSName) == ["server.example.org"]
    assert [str(address) for address in names(server, x509.IPAddress)] == ["10.0.0.1", "::1"]
    assert uris_of(server) == ["raafl://fed/server"] and uris_of(site) == ["raafl://fed/site/north"]
    uses = [one.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value for one in (server, site)]
    assert list(uses[0]) == [ExtendedKeyUsageOID.SERVER_AUTH] and list(uses[1]) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert [is_for(one, server=kind) for one in (server, site) for kind in (True, False)] == [True, False, False, True]
    for certificate, days in ((server, 7), (site, 30)):
        left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
        assert datetime.timedelta(days=days - 0.01) < left <= datetime.timedelta(days=days)
        certificate.verify_directly_issued_by(authority.certificate)
        assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_renewed_and_revoked(authority, tmp_path):
    first = authority.sign(request(tmp_path, "north")).certificate
    authority.sign(request(tmp_path, "south"))
    second = authority.renew("north", days=60).certificate
    assert second.public_key() == first.public_key() and second.serial_number != first.serial_number
    assert files.read_certificate(authority.folder / "north.crt") == second
    assert [one.certificate.serial_number for one in authority.revoke("north")] == [
        first.serial_number,
        second.serial_number,
    ]
    revoked = revoked_by(authority)
    assert revoked == {first.serial_number, second.serial_number}
    assert {(one.holder.site, one.revoked) for one in authority.issued()} == {("north", True), ("south", False)}
    with pytest.raises(
        BadInput, match=r"'north' was revoked: remove north\.key, and make a new key with `raafl certs request"
    ):
        authority.renew("north")
    (tmp_path / "north.key").unlink()
    again = authority.sign(request(tmp_path, "north"))
    assert again.valid and authority.renew("north").valid
    assert revoked_by(authority) == revoked
    authority.revoke("south")
    assert len(revoked_by(authority)) == 3


@pytest.mark.parametrize("lost", ["the list", "the list's last rows", "a copy"])
def test_a_revocation_outlasts_the_loss_of_a_file(authority, tmp_path, lost):
    path = authority.folder / "revoked.crl"
    empty = path.read_bytes()
    serials = {authority.sign(request(tmp_path, name)).certificate.serial_number for name in ("north", "south")}
    authority.revoke("north")
    if lost == "the list":
        path.unlink()
    elif lost == "the list's last rows":
        path.write_bytes(empty)
    else:
        next((authority.folder / "issued").glob("north-*")).unlink()
    assert [one.revoked for one in authority.issued() if one.holder.site == "north"] == [True] * (lost != "a copy")
    assert len(authority.revoke("south")) == 1
    assert revoked_by(authority) == serials


def test_a_server_is_revoked_and_gets_a_new_key(authority):
    first = authority.issue_server(["h"])
    assert [one.certificate for one in authority.revoke("server")] == [first]
    assert revoked_by(authority) == {first.serial_number}
    with pytest.raises(BadInput, match=r"'server' was revoked: remove server\.key, .*`raafl certs server HOST\.\.\.`"):
        authority.renew("server")
    with pytest.raises(BadInput, match=r"server\.key' exists, and a key is never overwritten: remove it"):
        authority.issue_server(["h"])
    (authority.folder / "server.key").unlink()
    assert authority.issue_server(["h"]).public_key() != first.public_key() and authority.renew("server").valid


def test_a_second_key_for_a_name_is_refused_while_the_first_is_good(authority, tmp_path):
    authority.sign(request(tmp_path / "a", "north"))
    other = request(tmp_path / "b", "north")
    with pytest.raises(BadInput, match="valid certificate for another key: run `raafl certs revoke north` first"):
        authority.sign(other)
    authority.revoke("north")
    assert authority.sign(other).valid


def test_a_key_whose_certificate_was_revoked_gets_no_other(authority, tmp_path):
    """`raafl certs request` keeps a key that is there: the stolen one, unless somebody removes it."""
    authority.sign(request(tmp_path, "north"))
    authority.revoke("north")
    stolen = files.read_key(tmp_path / "north.key")
    for again in (request(tmp_path, "north"), csr(stolen, "south")):
        with pytest.raises(BadInput, match=r"has the key of a certificate that was revoked: remove (north|south)\.key"):
            authority.sign(again)
    (tmp_path / "north.key").unlink()
    assert authority.sign(request(tmp_path, "north")).valid


def csr(key, *names):
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names])
    return x509.CertificateSigningRequestBuilder(subject).sign(key, hashes.SHA256())


def test_requests_that_are_not_signed(authority):
    for made, why in (
        (csr(rsa.generate_private_key(65537, 2048), "north"), "key is not an ECDSA P-256 key"),
        (csr(ec.generate_private_key(ec.SECP256R1())), "names no site"),
        (csr(ec.generate_private_key(ec.SECP256R1()), "../../etc"), "site is '../../etc'"),
        (csr(ec.generate_private_key(ec.SECP256R1()), "server"), "site is 'server'"),
    ):
        with pytest.raises(BadInput, match=why):
            authority.sign(made)
    good = files.to_pem(csr(ec.generate_private_key(ec.SECP256R1()), "north"))
    broken = bytearray(x509.load_pem_x509_csr(good).public_bytes(files.serialization.Encoding.DER))
    broken[-1] ^= 1
    with pytest.raises(BadInput, match="not signed by its own key"):
        authority.sign(x509.load_der_x509_csr(bytes(broken)))
    with pytest.raises(BadInput, match="'x' has no signing request"):
        read_request(b"PK\3\4", "x")
    assert authority.issued() == []


def test_bad_input(authority, tmp_path):
    with pytest.raises(BadInput, match="which has no certificate authority: make one with `raafl certs init`"):
        Authority(tmp_path)
    with pytest.raises(BadInput, match=r"ca\.key' exists, and a key is never overwritten"):
        Authority.create(authority.folder, "fed")
    for host in ("", "host:80", "https://host"):
        with pytest.raises(BadInput, match="without a port"):
            authority.issue_server([host])
    with pytest.raises(BadInput, match="days is 399: give 1 to 398"):
        authority.issue_server(["h"], 399)
    with pytest.raises(BadInput, match="'east' has no certificate here: give one of these: none"):
        authority.revoke("east")
    authority.issue_server(["h"])
    (authority.folder / "ca.key").chmod(0o640)
    with pytest.raises(BadInput, match=r"other users can access \(mode 640\): chmod 600"):
        Authority(authority.folder)
