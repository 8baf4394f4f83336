"""Run a group's whole protocol within one process: for simulations with masks, and for tests."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping

from raafl.parts.protect.secure.coverage import Ring
from raafl.parts.protect.secure.group import Group, GroupMember, threshold_of
from raafl.parts.protect.secure.member import Member
from raafl.parts.protect.secure.opening import Opening
from raafl.submodel import FlatTensors, Spec


def mask_and_open_(
    numbers: Mapping[int, FlatTensors], specs: Mapping[int, Spec], ring: Ring, min_cover: int, threshold: float,
    dropped: Collection[int] = (),
) -> None:  # fmt: skip
    """Run the whole protocol of one group in this process: mask every member's numbers, then unmask their sum.

    Afterwards ``numbers`` contains what the server would have in a real run.

    Args:
        numbers: encoded changes by the member's key; changed in place.
        specs: submodel of each member, by key.
        ring: layouts of the integers that replace the model's values.
        min_cover: smallest number of members that must have trained an element for it to be unmasked.
        threshold: share of the members; more than this share must help to unmask.
        dropped: keys of the members that drop out after sending their shares; their numbers stay masked.

    Raises:
        CannotOpen: too few members are left.
    """
    members = {key: Member(min_cover, threshold) for key in sorted(numbers)}
    group = Group(
        secrets.token_hex(16), tuple(GroupMember(key, *member.public, specs[key]) for key, member in members.items()),
        threshold_of(len(members), threshold), min_cover,
    )  # fmt: skip
    opening = Opening(group, ring)
    encrypted = {}
    for key, member in members.items():
        encrypted[key], opening.commitments[key] = member.join(group, key, ring)
    for key, member in members.items():
        member.mask_(numbers[key], {sender: texts[key] for sender, texts in encrypted.items() if sender != key})
    survivors = frozenset(members) - frozenset(dropped)
    opening.restore(survivors, {key: members[key].reveal(survivors) for key in sorted(survivors)})
    for key in survivors:
        opening.unmask_(key, numbers[key])
