"""Lists of revoked certificates: number and date, and the newest that was seen stays in force, across restarts too."""

from __future__ import annotations

import datetime
import threading

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes

from raafl.errors import BadInput
from raafl.sites import certificates as files
from raafl.sites.authority import Authority, request
from raafl.sites.certificates import Revocations, parse_list, read_list

DAY = datetime.timedelta(days=1)


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "raafl" / "revoked"


@pytest.fixture
def authority(tmp_path):
    return Authority.create(tmp_path / "ca", "fed")


@pytest.fixture
def lists(authority, tmp_path):
    """The three lists of an authority that has revoked first nobody, then north, then south; and the serial numbers."""
    path, made, serials = authority.folder / "revoked.crl", [], []
    for site in (None, "north", "south"):
        if site is not None:
            serials.append(authority.sign(request(tmp_path, site)).certificate.serial_number)
            authority.revoke(site)
        made.append(path.read_bytes())
    return path, made, serials


def of(authority):
    """What a process that begins now goes by."""
    return Revocations(authority.folder / "revoked.crl", authority.folder / "ca.crt")


def test_each_list_has_a_number_and_a_date_and_the_numbers_grow(authority, lists):
    _, made, serials = lists
    read = [parse_list(pem, authority.certificate, "x") for pem in made]
    assert read[0].number < read[1].number < read[2].number
    assert read[0].date <= read[1].date <= read[2].date
    assert [one.serials for one in read] == [frozenset(), {serials[0]}, set(serials)]
    now = datetime.datetime.now(datetime.UTC)
    assert now - read[2].date < datetime.timedelta(minutes=6) and read[2].next_update > now + DAY


def test_the_number_grows_though_the_last_list_is_lost_or_the_clock_goes_back(authority, lists, tmp_path, monkeypatch):
    path, made, _ = lists
    last = parse_list(made[2], authority.certificate, "x").number
    past = datetime.datetime.now(datetime.UTC) - 30 * DAY
    monkeypatch.setattr("raafl.sites.authority._now", lambda: past)
    authority.sign(request(tmp_path, "east"))
    authority.revoke("east")
    assert read_list(path, authority.certificate).number == last + 1
    monkeypatch.setattr("raafl.sites.authority._now", lambda: past + 31 * DAY)
    path.unlink()
    authority.sign(request(tmp_path, "west"))
    authority.revoke("west")
    found = read_list(path, authority.certificate)
    assert found.number > last + 1 and len(found.serials) == 4


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("now", ["an older list", "no list"])
def test_nobody_goes_back_to_an_older_list(authority, lists, caplog, restarted, now):
    path, made, serials = lists
    seen = of(authority)
    assert seen.read() == set(serials)
    path.write_bytes(made[1]) if now == "an older list" else path.unlink()
    if restarted:
        seen = of(authority)
        assert seen.read() == set(serials), "the newest list stays in force, with a warning"
        assert "which stays in force: get the newest list" in caplog.text
        assert seen.latest() == seen.latest() == set(serials) and len(caplog.records) == 1, "it is not said again"
    with pytest.raises(BadInput, match=r"(older than|but this machine has seen the revocation list) number \d+"):
        seen.read()
    assert seen.latest() == set(serials)
    path.write_bytes(made[2])
    assert seen.read() == seen.latest() == set(serials)


def test_of_processes_that_see_other_lists_at_once_none_forgets_the_newest(authority, lists, tmp_path):
    path, made, serials = lists
    path.unlink()
    many = []
    for number in range(12):
        own = tmp_path / f"{number}.crl"
        own.write_bytes(made[number % 3])
        many.append(Revocations(own, authority.folder / "ca.crt"))
    threads = [threading.Thread(target=one.latest) for one in many]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert of(authority).read() == set(serials)


def test_a_list_without_a_number_goes_by_its_date_and_is_older_than_any_with_one(authority, lists):
    """As another PKI makes them."""
    path, made, serials = lists

    def plain(days, *revoked):
        date = datetime.datetime.now(datetime.UTC) + days * DAY
        builder = x509.CertificateRevocationListBuilder(
            authority.certificate.subject,
            date,
            date + 100 * DAY,
            [],
            [x509.RevokedCertificateBuilder(serial, date).build() for serial in revoked],
        )
        path.write_bytes(files.to_pem(builder.sign(authority._key, hashes.SHA256())))

    seen = of(authority)
    plain(-2, 5)
    assert seen.read() == {5}
    plain(-1, 5, 6)
    assert seen.read() == {5, 6}
    plain(-2, 5)
    with pytest.raises(BadInput, match=r"without a number of .*, older than without a number of"):
        seen.read()
    path.write_bytes(made[2])
    assert seen.read() == set(serials)
    plain(0)
    with pytest.raises(BadInput, match=r"without a number of .*, older than number \d+"):
        seen.read()


@pytest.mark.parametrize("damage", ["damaged", "of another authority", "not a file", "no folder"])
def test_a_memory_that_cannot_be_used_is_a_warning(authority, lists, state, tmp_path, caplog, monkeypatch, damage):
    serials = lists[2]
    of(authority).read()
    (file,) = state.glob("*.crl")
    if damage == "damaged":
        file.write_bytes(file.read_bytes()[:-60])
    elif damage == "of another authority":
        other = Authority.create(tmp_path / "other", "fed")
        file.write_bytes((other.folder / "revoked.crl").read_bytes())
    elif damage == "not a file":
        file.unlink()
        file.mkdir()
    else:
        monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
        assert of(authority).read() == set(serials)
        assert "cannot be remembered" in caplog.text and "after a restart an older one would count" in caplog.text
        return
    assert of(authority).read() == set(serials)
    assert "the newest revocation list seen so far is not known" in caplog.text


def test_another_authority_is_another_memory(authority, lists, tmp_path):
    of(authority).read()
    other = Authority.create(tmp_path / "other", "fed")
    assert of(other).read() == frozenset()


def test_a_list_whose_next_update_is_overdue_is_refused(authority, monkeypatch):
    path, until = authority.folder / "revoked.crl", authority.certificate.not_valid_after_utc
    assert read_list(path, authority.certificate).serials == frozenset()

    class Later(datetime.datetime):
        @classmethod
        def now(cls, zone=None):
            return until + DAY

    monkeypatch.setattr("raafl.sites.certificates.datetime.datetime", Later)
    with pytest.raises(BadInput, match=f"is out of date since {until:%Y-%m-%d}"):
        of(authority).read()


def test_a_list_of_another_authority_revokes_nobody(authority, tmp_path):
    other = Authority.create(tmp_path / "other", "fed")
    with pytest.raises(BadInput, match="is not a revocation list signed by the authority"):
        read_list(other.folder / "revoked.crl", authority.certificate)
    revocations = Revocations(other.folder / "revoked.crl", authority.folder / "ca.crt")
    for _ in range(2):
        with pytest.raises(BadInput, match="is not a revocation list signed by the authority"):
            revocations.latest()
