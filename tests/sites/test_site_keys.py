"""Sites sign the keys of their masked tasks: who puts other keys in between, or makes members up, is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raafl.errors import BadInput
from raafl.parts.protect.secure.group import CannotOpen, Group, GroupMember, statement
from raafl.parts.protect.secure.member import Member
from raafl.sites.authority import Authority, fingerprint, request
from raafl.sites.certificates import read_certificate
from raafl.sites.secure_client import SiteKeys
from raafl.sites.secure_messages import Formed
from raafl.submodel import FULL, Spec
from tests.helpers.certificates import CertifiedSites

HALF = Spec.select({"hidden": range(2)})


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return CertifiedSites(tmp_path_factory.mktemp("certs"))


def keys_of(world, name):
    files = world.site(name) if name != "server" else world.server
    return SiteKeys(files.ca, files.cert, files.key)


def group_of(sites):
    """A group of one new member for each site, whose tasks are 1, 2, ...; their proofs."""
    members, proofs = [], {}
    for number, site in enumerate(sites, 1):
        members.append(GroupMember(number, *Member(2, 2 / 3).public, FULL, 100, 5, 100, 4, site=site.site))
        proofs[number] = site.prove(statement("run", members[-1]))
    return Group("ab", tuple(members), 3, 3, 4, "run"), proofs


@pytest.fixture(scope="module")
def sites(world):
    return [keys_of(world, name) for name in ("north", "south", "east")]


def swapped(group, number):
    """The group with other keys of a member, as a server could put in between."""
    return changed(
        group, number, **dict(zip(("mask_key", "share_key", "sign_key"), Member(2, 2 / 3).public, strict=True))
    )


def changed(group, number, **fields):
    """The group with other fields of a member."""
    return replace(group, members=tuple(replace(m, **fields) if m.id == number else m for m in group.members))


def test_keys_that_sites_have_signed_pass_also_after_a_message(sites):
    group, proofs = group_of(sites)
    told = Formed.from_meta(Formed(group, proofs).to_meta())
    for site in sites:
        site.check(told.group, told.proofs)
        site.check(changed(group, 2, counted=7), proofs)  # the server may count fewer, which `Member` bounds


@pytest.mark.parametrize(
    "fields",
    [
        {"num_samples": 999},
        {"num_steps": 6},
        {"version": 3},
        {"spec": HALF},
        {"max_share": 0.5},
        {"start": "ab"},
        {"id": 4},
    ],
    ids=str,
)
def test_what_a_site_said_of_its_task_cannot_be_changed(sites, fields):
    group, proofs = group_of(sites)
    with pytest.raises(CannotOpen, match="are not signed by site 'east'"):
        sites[0].check(changed(group, 3, **fields), {**proofs, 4: proofs[3]})
    with pytest.raises(CannotOpen, match="are not signed by site 'north'"):
        sites[1].check(replace(group, run="another"), proofs)


def test_a_policy_pins_the_sites_that_may_be_summed_with(world, sites):
    group, proofs = group_of(sites)
    files, prints = world.site("north"), {}
    for name in ("south", "east"):
        prints[name] = fingerprint(read_certificate(world.site(name).cert))
    for partners in (["south", "east"], ["south", f"east@{prints['east']}"]):
        SiteKeys(files.ca, files.cert, files.key, partners=partners).check(group, proofs)
    for partners in (["south"], ["south", f"east@{prints['south']}"], []):
        with pytest.raises(CannotOpen, match=r"which policy.partners does not list"):
            SiteKeys(files.ca, files.cert, files.key, partners=partners).check(group, proofs)


def test_other_keys_and_members_that_nobody_certifies_are_found(world, sites, tmp_path):
    group, proofs = group_of(sites)
    with pytest.raises(CannotOpen, match="the keys of member 2 are not signed by site 'south'"):
        sites[0].check(swapped(group, 2), proofs)
    with pytest.raises(CannotOpen, match="member 2 are of no site that the authority certifies"):
        sites[0].check(group, {key: proof for key, proof in proofs.items() if key != 2})
    with pytest.raises(CannotOpen, match="member 3 are not signed by site 'south'"):  # of another task
        sites[0].check(group, {**proofs, 3: proofs[2]})
    other = CertifiedSites(tmp_path / "strangers")  # of the same name
    for liar in (keys_of(other, "east"), keys_of(world, "server")):
        group, proofs = group_of([*sites[:2], liar])
        with pytest.raises(CannotOpen, match="member 3 are of no site"):
            sites[0].check(group, proofs)


def test_a_member_is_of_the_site_that_its_certificate_names(sites):
    group, proofs = group_of(sites)
    with pytest.raises(CannotOpen, match="member 3 are not signed by site 'east'"):
        sites[0].check(changed(group, 3, site="west"), proofs)


@pytest.mark.parametrize("words", ["", "AAAA", "%", "MIIB " * 3, "x" * 9000])
def test_whatever_a_peer_calls_a_certificate_is_none(sites, words):
    group, proofs = group_of(sites)
    with pytest.raises(CannotOpen, match="member 2 are of no site"):
        sites[0].check(group, {**proofs, 2: replace(proofs[2], certificate=words)})


def test_a_certificate_that_has_expired_certifies_nothing(sites, world, monkeypatch):
    import datetime

    import raafl.sites.authority as authority

    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=40)
    monkeypatch.setattr(authority, "_now", lambda: past)
    keys = request(world.authority.folder, "west")
    world.authority.sign(keys)
    monkeypatch.undo()
    group, proofs = group_of([*sites[:2], keys_of(world, "west")])
    with pytest.raises(CannotOpen, match="member 3 are of no site"):
        sites[0].check(group, proofs)


def test_files_that_are_of_no_use_are_named(tmp_path, world):
    Authority.create(tmp_path / "other", "other")
    files = world.site("north")
    with pytest.raises(BadInput, match=r"signing key is '.*missing.key', which cannot be read"):
        SiteKeys(files.ca, files.cert, tmp_path / "missing.key")
    with pytest.raises(BadInput, match="names no federation"):
        SiteKeys(files.ca, tmp_path / "other" / "ca.crt", files.key)
