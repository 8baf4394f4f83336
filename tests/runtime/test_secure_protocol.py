"""A peer's words about groups are checked before anything is made of them."""

from __future__ import annotations

import pytest

from raafl.parts.protect.secure.group import Group, GroupMember
from raafl.runtime.secure_protocol import Formed, Members, layout_of, split, to_bytes, to_tensors
from raafl.submodel import FULL, Spec
from raafl.transport import Refused

HALF = Spec.select({"hidden": range(2)})
MEMBERS = tuple(
    GroupMember(key, bytes([key]) * 32, bytes([key + 9]) * 32, spec) for key, spec in ((3, FULL), (4, HALF))
)
META = Formed(Group("ab", MEMBERS, 2, 2), 0.25).to_meta()


def test_a_group_comes_back_as_it_was():
    assert Formed.from_meta(META) == Formed(Group("ab", MEMBERS, 2, 2), 0.25)
    assert META["specs"] == [{}, HALF.to_json()]


@pytest.mark.parametrize(
    "changes",
    [
        {"members": 3}, {"members": [[3, "00", "00", 0]]}, {"members": [["x", "00" * 32, "00" * 32, 0]]},
        {"members": [[3, "00" * 32, "00" * 32, 7]]}, {"specs": [7]}, {"share": 1.5}, {"share": float("nan")}, {"share": "a"},
        {"group": 5}, {"group": "a" * 65}, {"threshold": 0}, {"threshold": True}, {"min_cover": -1}, {"members": [[1, 2]]},
    ],
    ids=str,
)  # fmt: skip
def test_anything_else_is_refused(changes):
    with pytest.raises(Refused):
        Formed.from_meta({**META, **changes})


@pytest.mark.parametrize("keys", [None, "34", [4, 3], [3, 3], [3, True], [5], [3.0]], ids=str)
def test_members_are_an_ascending_list_of_those_in_the_group(keys):
    assert Members.from_meta({"members": [3, 4]}, {3, 4, 6}).keys == (3, 4)
    with pytest.raises(Refused, match="members"):
        Members.from_meta({"members": keys}, {3, 4, 6})


def test_pieces_join_and_split():
    flat = to_tensors(shares=b"abcde", commitments=b"")
    assert flat.layout == layout_of(shares=5, commitments=0)
    assert split(to_bytes(flat, "shares"), {1: 2, 7: 3}) == {1: b"ab", 7: b"cde"}
