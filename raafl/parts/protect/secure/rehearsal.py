"""Run a group's whole protocol within one process: for simulations with masks, and for tests."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping

from raafl.parts.protect.secure.coverage import IntegerLayouts
from raafl.parts.protect.secure.group import Group, GroupMember, threshold_of
from raafl.parts.protect.secure.member import Member
from raafl.parts.protect.secure.opening import Opening
from raafl.submodel import FlatTensors, Spec


def mask_and_open_(
    numbers: Mapping[int, FlatTensors],
    specs: Mapping[int, Spec],
    layouts: IntegerLayouts,
    min_cover: int,
    threshold: float,
    dropped: Collection[int] = (),
) -> None:
    """Run the whole secure aggregation of one group in this process: mask every member's update, then unmask their sum.

    Afterwards ``numbers`` contains what the server would have in a real run.

    Raises:
        CannotOpen: too few members are left.
    """
    members = {number: Member(min_cover, threshold) for number in sorted(numbers)}
    group = Group(
        secrets.token_hex(16),
        tuple(GroupMember(number, *member.public, specs[number]) for number, member in members.items()),
        threshold_of(len(members), threshold),
        min_cover,
    )
    opening = Opening(group, layouts)
    encrypted = {}
    for number, member in members.items():
        encrypted[number], opening.commitments[number] = member.join(group, number, layouts)
    masked = {}
    for number, member in members.items():
        pieces = {sender: texts[number] for sender, texts in encrypted.items() if sender != number}
        masked[number] = member.mask_(numbers[number], pieces)
    survivors = frozenset(members) - frozenset(dropped)
    left = {number: masked[number] for number in sorted(survivors)}
    signed = {number: members[number].sign(left) for number in left}
    opening.restore(survivors, {number: members[number].reveal(signed) for number in left})
    for number in survivors:
        opening.unmask_(number, numbers[number])
