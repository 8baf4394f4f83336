"""A peer's words about groups are checked before anything is made of them."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from raafl.parts.protect.secure.group import Group, GroupMember, statement
from raafl.sites.secure_messages import (
    Claim,
    Formed,
    KeyProof,
    Members,
    Signatures,
    Signed,
    layout_of,
    split,
    to_bytes,
    to_tensors,
)
from raafl.submodel import FULL, Spec
from raafl.transport import Refused

HALF = Spec.select({"hidden": range(2)})
MEMBERS = tuple(
    GroupMember(
        key,
        bytes([key]) * 32,
        bytes([key + 9]) * 32,
        bytes([key + 20]) * 32,
        spec,
        70,
        9,
        60,
        5,
        0.8,
        "feed",
        f"s{key}",
    )
    for key, spec in ((3, FULL), (4, HALF))
)
GROUP = Group("ab", MEMBERS, 2, 2, 6, "run", True)
META = Formed(GROUP).to_meta()
ROW = META["members"][0]


def test_a_group_comes_back_as_it_was():
    found = Formed.from_meta(json.loads(json.dumps(META)))
    assert found == Formed(GROUP) and found.group.digest == GROUP.digest
    assert META["specs"] == [{}, HALF.to_json()]


@pytest.mark.parametrize("field", ["id", "threshold", "min_cover", "version", "run", "equal"])
def test_every_field_of_a_group_changes_its_digest(field):
    value = getattr(GROUP, field)
    other = {str: "other", bool: False}.get(type(value), 44)
    assert replace(GROUP, **{field: other}).digest != GROUP.digest


@pytest.mark.parametrize("field", [one.name for one in fields(GroupMember)])
def test_every_field_of_a_member_changes_the_digest_and_what_its_site_signs(field):
    value = getattr(MEMBERS[0], field)
    other = {bytes: b"\x77" * 32, Spec: HALF, float: 0.5, str: "other"}.get(type(value), 44)
    changed = replace(MEMBERS[0], **{field: other})
    assert replace(GROUP, members=(changed, MEMBERS[1])).digest != GROUP.digest
    assert (statement("run", changed) != statement("run", MEMBERS[0])) == (field not in ("counted", "site"))
    assert statement("another", MEMBERS[0]) != statement("run", MEMBERS[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"members": 3},
        {"members": [ROW[:11]]},
        {"members": [["x", *ROW[1:]]]},
        {"members": [[*ROW[:3], "00", *ROW[4:]]]},
        {"members": [[*ROW[:4], 7, *ROW[5:]]]},
        {"members": [[*ROW[:4], -1, *ROW[5:]]]},
        {"specs": [7]},
        *(
            {"members": [[*ROW[:place], wrong, *ROW[place + 1 :]]]}
            for place, wrong in (
                (5, 0),
                (6, -1),
                (7, True),
                (8, -1),
                (9, 1.5),
                (9, float("nan")),
                (9, "a"),
                (9, 0),
                (10, 5),
                (10, "x" * 65),
                (11, "\n"),
            )
        ),
        {"version": None},
        {"run": 5},
        {"group": 5},
        {"group": "a" * 65},
        {"threshold": 0},
        {"threshold": True},
        {"min_cover": -1},
        {"members": [[1, 2]]},
    ],
    ids=str,
)
def test_anything_else_is_refused(changes):
    with pytest.raises(Refused):
        Formed.from_meta({**META, **changes})


@pytest.mark.parametrize("keys", [None, "34", [4, 3], [3, 3], [3, True], [5], [3.0]], ids=str)
def test_members_are_an_ascending_list_of_those_in_the_group(keys):
    assert Members.from_meta({"members": [3, 4]}, {3, 4, 6}).keys == (3, 4)
    with pytest.raises(Refused, match="members"):
        Members.from_meta({"members": keys}, {3, 4, 6})


def test_a_claim_comes_back_as_it_was_and_anything_else_is_refused():
    claim = Claim("run", "start", "north", 0.9, KeyProof("AAAA", "BBBB"))
    assert Claim.from_meta(json.loads(json.dumps(claim.to_meta()))) == claim
    for wrong in (
        {"run": 5},
        {"start": "x" * 65},
        {"site": None},
        {"max_share": 0},
        {"max_share": True},
        {"max_share": "1"},
    ):
        with pytest.raises(Refused):
            Claim.from_meta({**claim.to_meta(), **wrong})


def test_signatures_have_64_bytes_and_a_member_each():
    told = Signatures({3: bytes(64), 6: b"a" * 64})
    assert Signatures.from_meta(told.to_meta(), {3, 4, 6}) == told
    assert Signed.from_meta(Signed(b"b" * 64).to_meta()) == Signed(b"b" * 64)
    for wrong in (None, "00", "zz" * 64, ["00" * 64], {}, [None, None], ["00" * 64, "00" * 63]):
        with pytest.raises(Refused, match="signature"):
            Signatures.from_meta({**told.to_meta(), "signatures": wrong}, {3, 4, 6})
        with pytest.raises(Refused, match="signature"):
            Signed.from_meta({"signature": wrong})


def test_pieces_join_and_split():
    flat = to_tensors(shares=b"abcde", commitments=b"")
    assert flat.layout == layout_of(shares=5, commitments=0)
    assert split(to_bytes(flat, "shares"), {1: 2, 7: 3}) == {1: b"ab", 7: b"cde"}
