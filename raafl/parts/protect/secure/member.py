"""A client's part in a group: share its seeds, mask its numbers, sign who is there, and help to open the sum.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, figure 4 with the consistency
round, for servers that lie (`raafl.parts.protect.secure.agreement`). A pair's mask covers the elements that both have. Where the
paper has one seed b_u for a client's own mask, here is one for each cell, so that members open only cells with enough contributors.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from raafl.parts.protect.secure.agreement import check_cover, check_facts, is_signed, lists_text, senders_text
from raafl.parts.protect.secure.coverage import IntegerLayouts, buffer_of
from raafl.parts.protect.secure.group import (
    SEED_BYTES,
    CannotOpen,
    Group,
    add_mask_,
    commitment,
    mask_seed,
    open_positions,
    pair_sign,
    share_key,
    threshold_of,
)
from raafl.parts.protect.secure.shamir import MAX_SHARES, share
from raafl.submodel import FlatTensors

_NONCE = bytes(12)
"""Constant nonce, safe since each key of `share_key` encrypts only one message."""


class Member:
    """A client's side of secure aggregation in one group; each group needs a new object, since its keys are used once.

    `public`: public keys of the client: for masks, for shares, and for signatures. The last one is no site's: with
    certificates the site's own key signs all three (`Group.statement`), which delegates to a key that is good for one
    group and for one client of the site.
    """

    def __init__(self, min_cover: int, threshold: float, same_values: bool = False) -> None:
        """Draw the member's keys; the limits are those of the client's own config.

        `same_values`: whether only members that received the same values as this one are taken to hide it.
        """
        self._same_values = same_values
        self._min_cover, self._threshold = min_cover, threshold
        self._masks, self._shares = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._signs = Ed25519PrivateKey.generate()
        self.public = (
            self._masks.public_key().public_bytes_raw(),
            self._shares.public_key().public_bytes_raw(),
            self._signs.public_key().public_bytes_raw(),
        )
        self._held: dict[int, bytes] = {}  # shares of members' secrets, by member
        self._has_joined = self._has_masked = self._has_revealed = False
        self._survivors: frozenset[int] | None = None  # the list that this client has signed

    def join(
        self, group: Group, member_id: int, layouts: IntegerLayouts, weights: Mapping[int, float] | None = None
    ) -> tuple[dict[int, bytes], bytes]:
        """Agree to a group, and share with its members the secrets from which this client's masks are drawn.

        With enough shares the server can remove the masks of a client that is lost. Returns an encrypted share for each
        other member, by its id, and commitments (digests) of the secret seeds.

        `weights`: weight of each member's change in the sum, by its id; None = equal ones.

        Raises:
            CannotOpen: bad-group: the group is too small, has another threshold or min_cover than agreed, lacks this
                member, or its sums would be of one site.
        """
        self._check(group, member_id)
        self._has_joined = True
        self.group, self.id, self.coverage = group, member_id, group.coverage(layouts)
        self._weights = dict.fromkeys(group.by_id, 1.0) if weights is None else dict(weights)
        self._check_cover(frozenset(group.by_id))
        self._seeds = [secrets.token_bytes(SEED_BYTES) for _ in self.coverage.cells_in(member_id)]
        secret = self._masks.private_bytes_raw() + b"".join(self._seeds)
        pieces = share(secret, group.threshold, len(group.members))
        encrypted = {}
        for member, piece in zip(group.members, pieces, strict=True):
            if member.id == member_id:
                self._held[member_id] = piece
            else:
                one_way = share_key(self._shares, member.share_key, group.id, member_id, member.id)
                encrypted[member.id] = AESGCM(one_way).encrypt(_NONCE, piece, None)
        return encrypted, b"".join(map(commitment, self._seeds))

    def _check(self, group: Group, member_id: int) -> None:
        num = len(group.members)
        keys = [member.id for member in group.members]
        publics = {key for member in group.members for key in (member.mask_key, member.share_key, member.sign_key)}
        if keys != sorted(set(keys)) or num > MAX_SHARES or len(publics) < 3 * num:
            raise CannotOpen("the group's members are out of order, too many, or share a key", "bad-group")
        if self._has_joined:
            raise CannotOpen("this client has joined a group with these keys before", "bad-group")
        own = group.by_id.get(member_id)
        if own is None or (own.mask_key, own.share_key, own.sign_key) != self.public:
            raise CannotOpen("the group does not list this client with its own public keys", "bad-group")
        least = threshold_of(num, self._threshold)
        if group.threshold < least or num < self._min_cover:
            raise CannotOpen(
                f"in this group of {num}, {group.threshold} members could unmask the sum; this client's secure_aggregation "
                f"wants groups of at least {self._min_cover}, and {least} members to unmask this one: give server and client "
                "the same secure_aggregation",
                "bad-group",
            )
        if group.min_cover < self._min_cover:
            raise CannotOpen(
                f"secure_aggregation.min_cover is {group.min_cover} on the server, but {self._min_cover} on this client: "
                "give both the same",
                "bad-group",
            )
        check_facts(group)
        others = [member.id for member in group.members if member.owner != own.owner]
        if (site := group.surplus(others)) is not None:
            raise CannotOpen(
                f"so many of this group's {num} clients are of site '{site}' that it could help the server to read others: "
                "use fewer clients of one site, or a higher secure_aggregation.threshold",
                "bad-group",
            )

    def _check_cover(self, survivors: frozenset[int]) -> None:
        for alike_to in (None, self.id) if self._same_values else (None,):
            check_cover(self.group, self.coverage, self._weights, survivors, self._least, alike_to)

    @property
    def _least(self) -> int:
        """Return the smallest number of surviving members, and of their sites, in a cell whose sum may be unmasked."""
        return max(self._min_cover, self.group.min_cover)

    def mask_(self, numbers: FlatTensors, encrypted: Mapping[int, bytes]) -> bytes:
        """Decrypt the other members' shares, and mask this client's encoded update, in place; return a signature of the senders.

        Raises:
            CannotOpen: too-few: not enough members sent shares; bad-share: a share cannot be decrypted; bad-group: it has
                masked numbers before.
        """
        group, member_id = self.group, self.id
        if self._has_masked:  # the same masks over two updates would reveal their difference
            raise CannotOpen("this client has masked an update for this group before", "bad-group")
        if len(encrypted) + 1 < group.threshold:
            raise CannotOpen(
                f"{len(encrypted) + 1} members are left, {group.threshold} must help to unmask the sum", "too-few"
            )
        for sender, text in encrypted.items():
            one_way = share_key(self._shares, group.by_id[sender].share_key, group.id, sender, member_id)
            try:
                self._held[sender] = AESGCM(one_way).decrypt(_NONCE, text, None)
            except InvalidTag:
                raise CannotOpen(f"member {sender}'s share was not encrypted for this client", "bad-share") from None
        self._has_masked = True
        words = buffer_of(numbers).numpy().view(np.uint32)
        for cell, seed in zip(self.coverage.cells_in(member_id), self._seeds, strict=True):
            add_mask_(words, self.coverage.elements_in(member_id, cell), seed, 1)
        for other in encrypted:
            seed = mask_seed(self._masks, group.by_id[other].mask_key, group.id, member_id, other)
            add_mask_(words, self.coverage.shared_elements(member_id, other), seed, pair_sign(member_id, other))

        return self._signs.sign(senders_text(group, self._held))

    def sign(self, survivors: Mapping[int, bytes]) -> bytes:
        """Agree to a list of survivors; return this client's signature of that list and of its list of senders.

        Raises:
            CannotOpen: too-few: too few members are left; bad-group: this client is not among them or has signed before, one
                of them was told of another group or of other senders, or a sum would be of too few sites, or of one.
        """
        group, left = self.group, frozenset(survivors)
        if not self._has_masked or self._survivors is not None or not left <= self._held.keys() or self.id not in left:
            raise CannotOpen(
                "this client has signed a list before, or the server names other members than before", "bad-group"
            )
        if len(left) < group.threshold:
            raise CannotOpen(f"{len(left)} members are left, {group.threshold} must help to unmask the sum", "too-few")
        text = senders_text(group, self._held)
        for member in sorted(left):
            if not is_signed(text, survivors[member], group.by_id[member].sign_key):
                raise CannotOpen(
                    f"member {member} has not signed that it knows the same group and the same senders", "bad-group"
                )
        self._check_cover(left)
        self._survivors = left
        return self._signs.sign(lists_text(group, self._held, left))

    def reveal(self, signatures: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return this client's shares of other members' secrets, by member id; the server needs them to unmask the sum.

        For a member whose update has arrived these are shares of the seeds of its masks. For a member that dropped out it
        is a share of its private key instead. They are never given together for one member: that would reveal its
        update. If too few of the arrived updates change the elements that a seed masks, its share is left out.

        Raises:
            CannotOpen: too-few: fewer than ``threshold`` members signed what this client signed; bad-group: this client
                has signed nothing, or has revealed its shares before.
        """
        group, left = self.group, self._survivors
        if left is None or self._has_revealed:
            raise CannotOpen(
                "this client has revealed its shares before, or signed no list of the members that are left",
                "bad-group",
            )
        text = lists_text(group, self._held, left)
        num_agree = 1 + sum(
            member in group.by_id and member != self.id and is_signed(text, signature, group.by_id[member].sign_key)
            for member, signature in signatures.items()
        )
        if num_agree < group.threshold:
            raise CannotOpen(
                f"{num_agree} members signed the same lists of members as this client, {group.threshold} must",
                "too-few",
            )
        self._has_revealed = True
        told = {}
        for member, piece in self._held.items():
            if member in left:
                places = open_positions(self.coverage, member, left, self._least)
                told[member] = b"".join(_seed_at(piece, place) for place in places)
            else:
                told[member] = piece[:SEED_BYTES]
        return told


def _seed_at(piece: bytes, place: int) -> bytes:
    """Return the bytes of the seed number ``place`` in a secret or a share, which begin with the private key."""
    start = SEED_BYTES * (1 + place)
    return piece[start : start + SEED_BYTES]
