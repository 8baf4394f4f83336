"""Sites sign the keys of their masked tasks: who puts other keys in between, or makes members up, is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raafl.certs.authority import Authority, request
from raafl.errors import BadInput
from raafl.parts.protect.secure.group import CannotOpen, Group, GroupMember
from raafl.parts.protect.secure.member import Member
from raafl.runtime.client.site_keys import SiteKeys
from raafl.runtime.secure_protocol import Formed
from raafl.submodel import FULL
from tests.helpers.certificates import CertifiedSites


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
        public = Member(2, 2 / 3).public
        members.append(GroupMember(number, *public, FULL))
        proofs[number] = site.prove(number, b"".join(public))
    return Group("ab", tuple(members), 3, 3), proofs


@pytest.fixture(scope="module")
def sites(world):
    return [keys_of(world, name) for name in ("north", "south", "east")]


def swapped(group, number):
    """The group with other keys of a member, as a server could put in between."""
    new = dict(zip(("mask_key", "share_key"), Member(2, 2 / 3).public, strict=True))
    return replace(group, members=tuple(replace(m, **new) if m.id == number else m for m in group.members))


def test_keys_that_sites_have_signed_pass_also_after_a_message(sites):
    group, proofs = group_of(sites)
    told = Formed.from_meta(Formed(group, 1.0, proofs).to_meta())
    for site in sites:
        site.check(told.group, told.proofs, 3)


def test_other_keys_and_members_that_nobody_certifies_are_found(world, sites, tmp_path):
    group, proofs = group_of(sites)
    with pytest.raises(CannotOpen, match="the keys of member 2 are not signed by site 'south'"):
        sites[0].check(swapped(group, 2), proofs, 3)
    with pytest.raises(CannotOpen, match="member 2 are of no site that the authority certifies"):
        sites[0].check(group, {key: proof for key, proof in proofs.items() if key != 2}, 3)
    with pytest.raises(CannotOpen, match="member 3 are not signed by site 'south'"):  # of another task
        sites[0].check(group, {**proofs, 3: proofs[2]}, 3)
    other = CertifiedSites(tmp_path / "strangers")  # of the same name
    for liar in (keys_of(other, "east"), keys_of(world, "server")):
        group, proofs = group_of([*sites[:2], liar])
        with pytest.raises(CannotOpen, match="member 3 are of no site"):
            sites[0].check(group, proofs, 3)


def test_one_site_in_several_roles_is_no_group(sites):
    """It would read the only other one's change from the sum."""
    group, proofs = group_of([sites[0], sites[1], sites[1]])
    with pytest.raises(CannotOpen, match=r"its clients are of 2 sites, secure_aggregation.min_cover is 3"):
        sites[0].check(group, proofs, 3)
    sites[0].check(group, proofs, 2)


@pytest.mark.parametrize("words", ["", "AAAA", "%", "MIIB " * 3, "x" * 9000])
def test_whatever_a_peer_calls_a_certificate_is_none(sites, words):
    group, proofs = group_of(sites)
    with pytest.raises(CannotOpen, match="member 2 are of no site"):
        sites[0].check(group, {**proofs, 2: replace(proofs[2], certificate=words)}, 3)


def test_a_certificate_that_has_expired_certifies_nothing(sites, world, monkeypatch):
    import datetime

    import raafl.certs.authority as authority

    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=40)
    monkeypatch.setattr(authority, "_now", lambda: past)
    keys = request(world.authority.folder, "west")
    world.authority.sign(keys)
    monkeypatch.undo()
    group, proofs = group_of([*sites[:2], keys_of(world, "west")])
    with pytest.raises(CannotOpen, match="member 3 are of no site"):
        sites[0].check(group, proofs, 3)


def test_files_that_are_of_no_use_are_named(tmp_path, world):
    Authority.create(tmp_path / "other", "other")
    files = world.site("north")
    with pytest.raises(BadInput, match=r"signing key is '.*missing.key', which cannot be read"):
        SiteKeys(files.ca, files.cert, tmp_path / "missing.key")
    with pytest.raises(BadInput, match="names no federation"):
        SiteKeys(files.ca, tmp_path / "other" / "ca.crt", files.key)
