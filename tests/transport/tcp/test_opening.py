"""What a certificate must be for, and a certificate of the server that was revoked."""

from __future__ import annotations

import random
import socket
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import ExtendedKeyUsageOID

from raafl.errors import BadInput, parse_address
from raafl.parts.protect.secure.group import CannotOpen
from raafl.sites import certificates as pem
from raafl.sites.authority import uris_of
from raafl.sites.certificates import holder_of
from raafl.sites.credentials import TlsFiles
from raafl.sites.secure_client import SiteKeys
from raafl.transport import ConnectOptions, Refused
from raafl.transport.tcp.listener import Listener, connect
from raafl.transport.tcp.transport import TcpTransport
from tests.helpers.certificates import CertifiedSites
from tests.sites.test_site_keys import group_of
from tests.transport.hostile import Server, answered
from tests.transport.house import House
from tests.transport.test_hostile import Relay

CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
OTHER, ANY = ExtendedKeyUsageOID.EMAIL_PROTECTION, ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE


@pytest.fixture
def sites(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return CertifiedSites(tmp_path / "certs")


def with_uses(sites, files, *uses):
    """Put the authority's signature on a copy of a certificate with other extended key usages; none = without the extension."""
    old = pem.read_certificate(files.cert)
    builder = x509.CertificateBuilder(
        old.issuer,
        old.subject,
        old.public_key(),
        x509.random_serial_number(),
        old.not_valid_before_utc,
        old.not_valid_after_utc,
    )
    for one in old.extensions:
        if not isinstance(one.value, x509.ExtendedKeyUsage):
            builder = builder.add_extension(one.value, one.critical)
    if uses:
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), False)
    path = files.cert.with_suffix(f".{len(uses)}")
    pem.write(path, pem.to_pem(builder.sign(sites.authority._key, hashes.SHA256())))
    return replace(files, cert=path)


class Careless(TlsFiles):
    """Files of a peer that does not look at its own certificate."""

    def __init__(self, files):
        super().__init__(files.ca, files.cert, files.key, files.crl)

    def check(self):
        return holder_of(uris_of(pem.read_certificate(self.cert)))


@pytest.mark.parametrize("uses", [(), (SERVER,), (OTHER,), (ANY,)], ids=["none", "server", "mail", "any"])
def test_a_certificate_without_client_auth_is_no_clients(sites, uses):
    files = with_uses(sites, sites.site(), *uses)
    with House(credentials=sites.server) as house:
        with pytest.raises(BadInput, match=r"refuses: get a certificate with the extended key usage clientAuth"):
            house.call(1, files)
        with pytest.raises(
            Refused, match=r"bad-certificate: .*(needs the extended key usage clientAuth|another purpose)"
        ):
            house.call(1, Careless(files))
        assert house.reason() == "bad-certificate" and house.admitted.empty()
        with house.call(1, with_uses(sites, sites.site(), CLIENT, OTHER)):
            assert house.admitted.get(timeout=30)[1] == 1


@pytest.mark.parametrize("uses", [(), (CLIENT,), (ANY,)], ids=["none", "client", "any"])
def test_a_certificate_without_server_auth_is_no_servers(sites, uses):
    files = with_uses(sites, sites.server, *uses)
    with pytest.raises(BadInput, match="the extended key usage serverAuth"):
        files.check()
    with House(credentials=Careless(files)) as house:
        with pytest.raises(Refused, match=r"bad-certificate: .*(no extended key usage serverAuth|purpose)"):
            house.call(1, sites.site())
        assert house.admitted.empty()


def test_a_member_of_a_group_needs_a_certificate_for_clients_that_was_not_revoked(sites):
    files = {name: sites.site(name) for name in ("north", "south", "east")}
    members = {name: SiteKeys(one.ca, one.cert, one.key) for name, one in files.items()}
    group, proofs = group_of(list(members.values()))
    members["north"].check(group, proofs)
    serial = pem.read_certificate(files["east"].cert).serial_number
    north = files["north"]
    aware = SiteKeys(north.ca, north.cert, north.key, lambda: frozenset({serial}))
    with pytest.raises(CannotOpen, match="member 3 are of no site"):
        aware.check(group, proofs)
    plain = with_uses(sites, files["east"])
    group, proofs = group_of([members["north"], members["south"], SiteKeys(plain.ca, plain.cert, plain.key)])
    with pytest.raises(CannotOpen, match="member 3 are of no site"):
        members["north"].check(group, proofs)


def test_a_site_with_the_newest_list_connects_to_no_server_with_a_revoked_certificate(sites, caplog):
    """Somebody has the server's key; the site's list comes, goes, and is replaced by an older one."""
    path = sites.authority.folder / "revoked.crl"
    old, files = path.read_bytes(), replace(sites.site(), crl=path)
    with House(credentials=sites.server) as house:

        def transport():
            return TcpTransport(ConnectOptions(address=house.listener.address, credentials=files, client=1))

        running = transport()
        running.connect().close()
        sites.authority.revoke("server")
        new = path.read_bytes()
        for change in (lambda: None, path.unlink, lambda: path.write_bytes(old), lambda: path.write_bytes(new[:99])):
            change()
            with pytest.raises(Refused, match=r"revoked: .*the server's certificate was revoked"):
                running.connect()
        path.write_bytes(old)
        with pytest.raises(Refused, match="the server's certificate was revoked"):
            transport().connect()
        assert "older than number" in caplog.text and "which stays in force" in caplog.text


def impostors(sites, other):
    """Who might answer in the server's place, by name: files of a server, as a listener loads them."""
    site, files = sites.site("mallory"), sites.server
    return {
        "a site": site,
        "a site with serverAuth": with_uses(sites, site, SERVER),
        "a site with both uses": with_uses(sites, site, SERVER, CLIENT),
        "another authority of the same name": other.server,
        "another authority, with this one's list": replace(other.server, ca=files.ca),
        "the server's certificate for clients": with_uses(sites, files, CLIENT),
        "the server's certificate for nothing": with_uses(sites, files),
        "the other's site": other.site("mallory"),
    }


class Anyone(Listener):
    """A listener that takes whoever calls for a site of the federation."""

    def __init__(self, files, heard):
        files = Careless(files)
        super().__init__("127.0.0.1:0", files, lambda pair, peer: heard.append(peer), lambda reason: None)
        self._login._federation = "tests"


@pytest.mark.parametrize("number", range(8))
def test_nobody_else_is_taken_for_the_server_and_nobody_hears_a_client(sites, tmp_path, number):
    other, heard = CertifiedSites(tmp_path / "other"), []
    name, files = list(impostors(sites, other).items())[number]
    with Anyone(files, heard) as listener, pytest.raises(Refused, match=r"bad-certificate|tls-failed"):
        connect(listener.address, 1, sites.site().client_login(), timeout_s=30)
    assert heard == [], name


def recorded(server, relay):
    """Return what a client says to the server in one session, as it travels."""
    said = []
    relay.meddle = lambda data: (said.append(data), data)[1]
    with connect(relay.address, 2, server.theirs.client_login(), timeout_s=30) as pair:
        assert answered(pair, 1) and answered(pair, 2)
    return b"".join(said)


def replays(num, seed):
    """Send a recorded session again, whole, cut, or with another one's end; return why each was turned away."""
    rng, seen = random.Random(seed), Counter()
    with Server() as server:
        with Relay(parse_address(server.listener.address)) as relay:
            data = recorded(server, relay)
        with Relay(parse_address(server.listener.address)) as relay:
            other = recorded(server, relay)
        before = len(server.sessions)
        for _ in range(num):
            cut = rng.randrange(len(data))
            sent = rng.choice([data, data[:cut], data[:cut] + other[cut:], data + data, other[cut:]])
            with server.raw() as sock, suppress(OSError):
                sock.sendall(sent)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
            seen[server.turned_away.get(timeout=30)] += 1
        assert len(server.sessions) == before, "none became a client"
    return seen


def test_a_recorded_session_played_again_is_nobody():
    assert sum(replays(25, 1).values()) == 25


@pytest.mark.slow("a thousand handshakes")
@pytest.mark.long("test_a_recorded_session_played_again_is_nobody")
def test_many_recorded_sessions_played_again(capsys):
    seen = replays(1000, 2)
    with capsys.disabled():
        print(f" 1000 replays: {dict(seen)} ", end="")
