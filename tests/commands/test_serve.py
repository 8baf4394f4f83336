"""What `raafl serve` reads before it listens, and goes by while it runs."""

from __future__ import annotations

from argparse import Namespace

import pytest

from raafl.commands.serve import allow_list
from raafl.errors import BadInput
from raafl.sites.authority import Authority, request
from raafl.sites.credentials import TlsFiles


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    authority = Authority.create(tmp_path, "tests")
    authority.issue_server(["localhost"])
    authority.sign(request(tmp_path, "north"))
    authority.revoke("north")
    (tmp_path / "sites.yaml").write_text("north: {clients: [1]}\n")
    return tmp_path


def sites_of(folder, crl=None):
    files = TlsFiles.find(folder, server=True, given={**dict.fromkeys(("ca", "cert", "key")), "crl": crl})
    return allow_list(Namespace(certs=str(folder), sites=None), files)


@pytest.mark.parametrize("named", [False, True])
def test_a_revocation_list_that_disappears_stays_in_force(folder, named, caplog):
    path = folder / "revoked.crl"
    sites, text = sites_of(folder, str(path) if named else None), path.read_bytes()
    (before,) = sites._revoked.value
    for damaged in (path.unlink, path.touch, lambda: path.write_bytes(text[:-60])):
        damaged()
        assert not any(sites.reread() for _ in range(3)) and sites._revoked.value == {before}
    assert [message.split(":")[0] for message in caplog.messages] == [
        "the earlier list of revoked certificates stays in force"
    ] * 2, "missing, and then no list"
    path.write_bytes(text)
    assert not any(sites.reread() for _ in range(3)) and sites._revoked.value == {before}


def test_no_revocation_list_is_none_until_there_is_one(folder):
    path = folder / "revoked.crl"
    text = path.read_bytes()
    path.unlink()
    with pytest.raises(BadInput, match=r"tls_crl is '.*', which does not exist: name a revocation list"):
        sites_of(folder, str(path))
    sites = sites_of(folder)
    assert sites._revoked.value == frozenset()
    path.write_bytes(text)
    assert not sites.reread() and sites.reread() and len(sites._revoked.value) == 1
    path.unlink()
    assert not any(sites.reread() for _ in range(3)) and len(sites._revoked.value) == 1


def test_a_restarted_server_goes_by_the_newest_list_that_it_has_seen(folder, caplog):
    path = folder / "revoked.crl"
    (north,) = sites_of(folder)._revoked.value
    path.unlink()
    assert sites_of(folder)._revoked.value == {north}
    assert "is missing, but this machine has seen the revocation list number" in caplog.text


def test_a_folder_in_the_place_of_a_list_is_bad_input(folder):
    (folder / "revoked.crl").unlink()
    (folder / "revoked.crl").mkdir()
    with pytest.raises(BadInput, match=r"'.*revoked\.crl' cannot be read: Is a directory"):
        sites_of(folder)
    (folder / "sites.yaml").unlink()
    (folder / "sites.yaml").mkdir()
    with pytest.raises(BadInput, match=r"sites is '.*', which cannot be read \(Is a directory\): list the sites there"):
        sites_of(folder)
