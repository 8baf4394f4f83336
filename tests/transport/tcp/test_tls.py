"""TLS under a connection: both directions at once, a slow peer that is no silent one, and certificates that are not taken."""

from __future__ import annotations

import datetime
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from raafl.errors import BadInput
from raafl.sites.authority import Authority, request
from raafl.sites.credentials import ReloadedContext, TlsFiles
from raafl.transport import PeerLost, PeerTimeout, Refused
from raafl.transport.tcp.connection import TcpConnection
from raafl.transport.tcp.listener import connect, proxy_for, tunnel
from raafl.transport.tcp.stream import TimeBudget, block
from tests.helpers.certificates import CertifiedSites, federation
from tests.transport.house import WAIT_S, House, nothing

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def ends():
    with House() as house, house.call() as client:
        yield house.admitted.get(timeout=WAIT_S)[0], client


def test_both_ways_at_once(ends):
    """One thread reads while another writes, at both ends: 8 MB each way, to the bit."""
    data = os.urandom(1 << 20) * 8
    got, threads = {}, []

    def read(name, end):
        got[name] = bytearray(len(data))
        end._stream.read_into(memoryview(got[name]))

    for name, end in enumerate(ends):
        threads += [
            threading.Thread(target=read, args=(name, end)),
            threading.Thread(target=end._stream.write, args=([data],)),
        ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert got[0] == got[1] == data
    assert [end._stream.num_read for end in ends] == [end._stream.num_written for end in ends] == [len(data)] * 2


def test_records_that_have_come_are_read_together(ends, monkeypatch):
    """Three records of 16 KiB under one lock."""
    server, client = ends
    data, calls = os.urandom(48 << 10), []
    attempt = server._stream._attempt
    monkeypatch.setattr(server._stream, "_attempt", lambda *words: calls.append(words) or attempt(*words))
    client._stream.write([data])
    until = time.monotonic() + WAIT_S
    while client._stream.num_queued() or not server._stream.poll(False, 0):  # until the server's end has it all
        assert time.monotonic() < until
        time.sleep(0.01)
    got = bytearray(len(data))
    server._stream.read_into(memoryview(got))
    assert got == data and len(calls) == 1 and server._stream.num_read == len(data)


def test_a_slow_reader_is_not_a_silent_one(ends):
    """A write of 256 KiB says nothing of what it has sent; the system does. The reader takes longer than the timeout, slowly."""
    server, client = ends
    for end, option in ((server, socket.SO_SNDBUF), (client, socket.SO_RCVBUF)):
        end._socket.sock.setsockopt(socket.SOL_SOCKET, option, 16 << 10)
    stop, piece = threading.Event(), bytearray(16 << 10)

    def sip():
        with suppress(PeerLost):
            while not stop.wait(0.02):
                client._stream.read_into(memoryview(piece))

    sipping = threading.Thread(target=sip)
    sipping.start()
    server._socket.writing = TimeBudget(0.5, 50_000.0)
    since = time.monotonic()
    server._stream.write([bytes(1 << 20)])  # 64 sips, of which four may be in buffers
    assert time.monotonic() - since > 1.0
    stop.set()
    server.close()
    sipping.join(WAIT_S)


def test_a_silent_reader_is_a_timeout(ends):
    ends[0]._socket.writing = TimeBudget(0.3, 1000.0)
    with pytest.raises(PeerTimeout):
        ends[0]._stream.write([bytes(32 << 20)])


def test_check_keeps_what_has_come_and_finds_a_peer_that_has_gone(ends):
    server, client = ends
    server.check()
    client._stream.write([b"abc"])
    piece = bytearray(3)
    block(server._socket.awaiting_first(WAIT_S))
    server.check()
    server._stream.read_into(memoryview(piece))
    assert piece == b"abc"
    client.close()
    with pytest.raises(PeerLost):
        for _ in range(1000):
            time.sleep(0.01)
            server.check()


def test_a_cut_says_why(ends):
    waiting = threading.Timer(0.1, ends[0].cut, args=("revoked", "the certificate of site 'x' was revoked"))
    waiting.start()
    with pytest.raises(PeerLost, match="revoked: the certificate of site 'x' was revoked"):
        ends[0].recv(nothing, WAIT_S)
    with pytest.raises(PeerLost, match="revoked"):
        ends[0].recv(nothing, WAIT_S)
    waiting.join()


def test_what_a_client_does_not_take_for_its_server(tmp_path):
    here = federation()
    elsewhere = CertifiedSites(tmp_path / "elsewhere", hosts=("server.example.org",))
    with House(credentials=elsewhere.server) as house:
        for files, why in (
            (elsewhere.site(), "certificate is not valid for '127.0.0.1': use a name that its certificate has, or"),
            (
                here.site(),
                "(unable to get local issuer|signature failure|self-signed).*: both ends need the same ca.crt",
            ),
        ):
            with pytest.raises(Refused, match=rf"bad-certificate: .*({why})"):
                house.call(1, files)
            assert house.reason() in ("bad-certificate", "closed")
    other = CertifiedSites(tmp_path / "other", "others")
    with House(credentials=other.server) as house, pytest.raises(Refused, match="not of the server of 'tests'"):
        house.call(1, replace(here.site(), ca=other.server.ca))


def test_a_certificate_that_names_no_site_or_another_federation_is_refused_in_words(tmp_path):
    """By an authority that both trust: its own PKI may have certificates for other purposes."""
    folder = tmp_path / "other"
    authority = Authority.create(folder, "tests")
    authority.issue_server(["127.0.0.1"])
    authority.federation = "another"
    authority.sign(request(folder, "north"))
    server, north = (
        TlsFiles(*(folder / name for name in ("ca.crt", f"{one}.crt", f"{one}.key"))) for one in ("server", "north")
    )
    with House(credentials=server) as house, pytest.raises(Refused, match="not of the server of 'another'"):
        house.call(1, north)


@pytest.mark.parametrize("early", ["north", "server"])
def test_a_certificate_that_is_not_valid_yet_is_refused_with_dates_and_clocks(tmp_path, monkeypatch, caplog, early):
    sites = CertifiedSites(tmp_path)
    north, later = sites.site(), datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=40)
    monkeypatch.setattr("raafl.sites.authority._now", lambda: later)
    sites.authority.renew(early)
    at_client = "certificate is not yet valid: compare the clocks of both machines"
    at_server = "by the clock there it is not valid yet, or it is not for the name"
    if early == "north":
        first = f"{later - datetime.timedelta(minutes=5):%Y-%m-%d %H:%M} UTC"
        dates = f"tls_cert is '.*/north.crt', which is valid from {first} to .* UTC"
        at_client, at_server = f"{at_server}.*{dates}, and this machine's clock says 20", at_client
    with House(credentials=sites.server) as house:
        with pytest.raises(Refused, match=f"bad-certificate: .*{at_client}"):
            house.call(1, north)
        assert house.reason() == "bad-certificate" and at_server in caplog.text


def test_a_renewed_certificate_is_taken_up_without_a_restart(tmp_path):
    sites = CertifiedSites(tmp_path)
    with House(credentials=sites.server) as house:
        serials = set()
        for _ in range(2):
            with house.call(1, sites.site()) as client:
                serials.add(client._socket.sock.getpeercert()["serialNumber"])
                house.admitted.get(timeout=WAIT_S)
            sites.authority.renew("server")
        assert len(serials) == 2


def test_a_new_certificate_that_is_of_no_use_is_named_once_and_the_earlier_one_stays(tmp_path, caplog):
    sites = CertifiedSites(tmp_path)
    files, other = sites.server, sites.site()
    context = ReloadedContext(files)
    before, right = context.get(), files.cert.read_bytes()
    for damage, why in (
        (lambda: files.cert.write_bytes(other.cert.read_bytes()), "not a certificate and its key without a passphrase"),
        (files.cert.unlink, "which does not exist"),
        (lambda: (files.cert.write_bytes(right), files.key.chmod(0o640)), "other users can access"),
    ):
        caplog.clear()
        damage()
        assert all(context.get() is before for _ in range(3))
        (message,) = caplog.messages
        assert message.startswith("the earlier certificate of the server stays in use: tls_") and why in message
    files.key.chmod(0o600)
    with caplog.at_level("INFO"):
        assert context.get() is not before and "are in use from now on" in caplog.text


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"ca": "none"}, "tls_ca is 'none', which does not exist: make one with `raafl certs`"),
        ({"key": "ca.key"}, "not a certificate and its key without a passphrase"),
        ({"ca": "server.key"}, "tls_ca is .*, which has no certificate in PEM"),
        (
            {"cert": "ca.crt", "key": "ca.key"},
            "names no federation: get a certificate whose subject alternative names have the URI",
        ),
    ],
)
def test_files_that_are_of_no_use(files, why):
    folder = federation().authority.folder
    changed = {name: folder / file if (folder / file).exists() else type(folder)(file) for name, file in files.items()}
    with pytest.raises(BadInput, match=why):
        found = replace(federation().server, **changed)
        found.context(server=True)
        found.check()


def test_files_in_a_folder_that_this_user_may_not_read_are_bad_input(tmp_path, monkeypatch):
    def is_file(path):
        raise PermissionError(13, "Permission denied", str(path))

    sites = CertifiedSites(tmp_path)
    monkeypatch.setattr(type(tmp_path), "is_file", is_file)
    for use in (lambda: sites.server.context(server=True), lambda: Authority(tmp_path)):
        with pytest.raises(BadInput, match=r"'.*ca\.(crt|key)' cannot be read: Permission denied: check the path"):
            use()


def test_a_key_that_others_may_read_is_refused(tmp_path):
    sites = CertifiedSites(tmp_path)
    sites.server.key.chmod(0o644)
    with pytest.raises(BadInput, match=r"other users can access \(mode 644\): chmod 600"):
        sites.server.check()


@pytest.mark.parametrize(("mode", "taken"), [(0o400, True), (0o440, True), (0o460, False), (0o444, False)])
def test_a_key_that_root_has_may_be_read_by_the_group_of_another_user(tmp_path, monkeypatch, mode, taken):
    """As Kubernetes mounts a secret."""
    sites = CertifiedSites(tmp_path)
    sites.server.key.chmod(mode)
    state = sites.server.key.stat()
    owner = os.stat_result((*state[:4], 0, *state[5:]))
    monkeypatch.setattr("raafl.transport.tcp.credentials.os.geteuid", lambda: 10001)
    monkeypatch.setattr(type(sites.server.key), "stat", lambda *_, **__: owner)
    if taken:
        sites.server.check()
        return
    with pytest.raises(BadInput, match=rf"other users can access \(mode {mode:o}\)"):
        sites.server.check()


def test_which_files_are_meant(tmp_path):
    sites = CertifiedSites(tmp_path)
    none = dict.fromkeys(("ca", "cert", "key", "crl"))
    crl = tmp_path / "revoked.crl"
    assert TlsFiles.find(tmp_path, server=True, given=none) == replace(sites.server, crl=crl)
    with pytest.raises(BadInput, match="has no site's certificate with its key"):
        TlsFiles.find(tmp_path, server=False, given=none)
    sites.site("north")
    assert TlsFiles.find(tmp_path, server=False, given=none) == replace(sites.site("north"), crl=crl)
    sites.site("south")
    with pytest.raises(BadInput, match="has certificates of north, south: name one"):
        TlsFiles.find(tmp_path, server=False, given=none)
    with pytest.raises(BadInput, match="--tls_cert and --tls_key belong together"):
        TlsFiles.find(tmp_path, server=False, given={**none, "cert": "x"})
    crl.unlink()
    with pytest.raises(BadInput, match=r"tls_crl is '.*', which does not exist: name a revocation list"):
        TlsFiles.find(tmp_path, server=True, given={**none, "crl": str(crl)})


# ---- proxies ----


class Proxy(threading.Thread):
    """An HTTP proxy that knows CONNECT alone, for one connection; ``said`` is its request."""

    def __init__(self, answer=b"HTTP/1.1 200 Connection established\r\nVia: test\r\n\r\n"):
        super().__init__(daemon=True)
        self.listener, self.said, self._answer = socket.create_server(("127.0.0.1", 0)), b"", answer
        self.url = f"http://user:p%40ss@127.0.0.1:{self.listener.getsockname()[1]}"

    def run(self):
        client, _ = self.listener.accept()
        while not self.said.endswith(b"\r\n\r\n"):
            self.said += client.recv(1)
        client.sendall(self._answer)
        if b" 200 " in self._answer:
            host, port = self.said.split()[1].decode().rsplit(":", 1)
            server = socket.create_connection((host, int(port)))
            back = threading.Thread(target=self._pump, args=(server, client), daemon=True)
            back.start()
            self._pump(client, server)
            back.join(WAIT_S)
            server.close()
        client.close()
        self.listener.close()

    def _pump(self, source, sink):
        try:
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def test_through_a_proxy():
    proxy = Proxy()
    proxy.start()
    with House() as house:
        with connect(
            house.listener.address, 1, house.theirs.client_login(), timeout_s=WAIT_S, proxy=proxy.url
        ) as client:
            pair, *_ = house.admitted.get(timeout=WAIT_S)
            client._stream.write([b"abc"])
            got = bytearray(3)
            pair._stream.read_into(memoryview(got))
            assert got == b"abc"
        pair.close()
        proxy.join(WAIT_S)
    lines = proxy.said.decode().splitlines()
    assert lines[0] == f"CONNECT {house.listener.address} HTTP/1.1"
    assert "Proxy-Authorization: Basic dXNlcjpwQHNz" in lines  # user:p@ss


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 403 Forbidden\r\n\r\n", b"SSH-2.0-x\r\n\r\n", b"", b"x" * (20 << 10)],
    ids=["403", "ssh", "end", "long"],
)
def test_a_proxy_that_does_not_lead_there(answer):
    proxy = Proxy(answer)
    proxy.start()
    with pytest.raises((PeerLost, OSError)):
        tunnel(proxy.url, "server.example.org", 443, 5.0)
    proxy.join(WAIT_S)


def test_which_proxy(monkeypatch):
    for name in ("https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert proxy_for("server.example.org", None) is None
    assert proxy_for("127.0.0.1", "proxy:3128") == "http://proxy:3128"
    monkeypatch.setenv("https_proxy", "http://proxy.example.org:8080")
    monkeypatch.setenv("no_proxy", "inside.example.org")
    assert proxy_for("server.example.org", None) == "http://proxy.example.org:8080"
    assert proxy_for("server.example.org", "none") is None
    assert [proxy_for(host, None) for host in ("inside.example.org", "127.0.0.1", "localhost", "::1")] == [None] * 4
    for bad in ("https://proxy:1", "http://proxy", "socks5://p:1", "http://p:x"):
        with pytest.raises(BadInput, match="give http://HOST:PORT, or none"):
            proxy_for("server.example.org", bad)


def test_a_connection_says_whether_it_is_encrypted(ends):
    assert all(isinstance(end, TcpConnection) and end.is_encrypted for end in ends)
    assert ends[0]._socket.sock.version() == "TLSv1.3" and ends[0]._socket.sock.selected_alpn_protocol() == "raafl"


TLS_MODULES = (
    "raafl.sites",
    "raafl.transport.tcp.tls",
    "raafl.transport.tcp.listener",
    "raafl.transport.tcp.credentials",
)


@pytest.mark.slow("a process of its own: what a rank of torchrun imports")
def test_ranks_of_torchrun_import_none_of_it():
    code = (
        f"import sys, raafl.runtime.over_ranks; sys.exit(any(name.startswith({TLS_MODULES!r}) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=80, check=False).returncode == 0
