"""A client's part in a group: share its seeds, mask its numbers, and help to open the sum (Bonawitz et al. 2017, figure 4).

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, for honest-but-curious
participants. A pair's mask covers the elements that both have. Where the paper has one seed b_u for a client's own mask, here is
one for each cell, so that members open only cells with enough contributors.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

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
"""Each key of `share_key` encrypts one message, so that a constant is no repetition."""


class Member:
    """A client's side of secure aggregation in one group; each group needs a new object, since its keys are used once.

    Attributes:
        public: public keys of the client, for masks and for shares.
    """

    def __init__(self, min_cover: int, threshold: float) -> None:
        """Draw the keys.

        Args:
            min_cover: least number of contributors to an element that is opened, by the client's own config.
            threshold: share of the members of which more must help, by the client's own config.
        """
        self._min_cover, self._threshold = min_cover, threshold
        self._masks, self._shares = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self.public = self._masks.public_key().public_bytes_raw(), self._shares.public_key().public_bytes_raw()
        self._held: dict[int, bytes] = {}  # shares of members' secrets, by member
        self._has_revealed = False

    def join(self, group: Group, member_id: int, layouts: IntegerLayouts) -> tuple[dict[int, bytes], bytes]:
        """Agree to a group, and share with its members the secrets from which this client's masks are drawn.

        With enough shares the server can remove the masks of a client that is lost. Returns an encrypted share for each
        other member, by its id, and commitments (digests) of the secret seeds.

        Args:
            group: description of the group that the server sent.
            member_id: id of this member.
            layouts: layouts of the integers by which the model's values are masked and summed.

        Raises:
            CannotOpen: bad-group: the group is too small, has another threshold or min_cover than agreed, or lacks this
                member.
        """
        self._check(group, member_id)
        self.group, self.id, self.coverage = group, member_id, group.coverage(layouts)
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
        publics = {public for member in group.members for public in (member.mask_key, member.share_key)}
        if keys != sorted(set(keys)) or num > MAX_SHARES or len(publics) < 2 * num:
            raise CannotOpen("the group's members are out of order, too many, or share a key", "bad-group")
        own = group.by_id.get(member_id)
        if own is None or (own.mask_key, own.share_key) != self.public:
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

    def mask_(self, numbers: FlatTensors, encrypted: Mapping[int, bytes]) -> None:
        """Decrypt the other members' shares, and mask this client's encoded update, in place.

        Args:
            numbers: encoded change of this client's submodel.
            encrypted: shares for this member, by sender; a missing sender has dropped out.

        Raises:
            CannotOpen: too-few: not enough members sent shares; bad-share: a share cannot be decrypted.
        """
        group, member_id = self.group, self.id
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
        words = buffer_of(numbers).numpy().view(np.uint32)
        for cell, seed in zip(self.coverage.cells_in(member_id), self._seeds, strict=True):
            add_mask_(words, self.coverage.elements_in(member_id, cell), seed, 1)
        for other in encrypted:
            seed = mask_seed(self._masks, group.by_id[other].mask_key, group.id, member_id, other)
            add_mask_(words, self.coverage.shared_elements(member_id, other), seed, pair_sign(member_id, other))

    def reveal(self, survivors: Collection[int]) -> dict[int, bytes]:
        """Return this client's shares of other members' secrets, by member id; the server needs them to unmask the sum.

        For a member whose update has arrived these are shares of the seeds of its masks. For a member that dropped out it
        is a share of its private key instead. They are never given together for one member: that would reveal its
        update. If too few of the arrived updates change the elements that a seed masks, its share is left out.

        Args:
            survivors: ids of the members whose masked updates the server has received.

        Raises:
            CannotOpen: too few members are left, this client is not among them, or it has revealed its shares before.
        """
        left = frozenset(survivors)
        if self._has_revealed or not left <= self._held.keys() or self.id not in left:
            raise CannotOpen(
                "this client has revealed its shares before, or the server names other members than before", "bad-group"
            )
        if len(left) < self.group.threshold:
            raise CannotOpen(
                f"{len(left)} members are left, {self.group.threshold} must help to unmask the sum", "too-few"
            )
        self._has_revealed = True
        told = {}
        for member, piece in self._held.items():
            if member in left:
                places = open_positions(self.coverage, member, left, max(self._min_cover, self.group.min_cover))
                told[member] = b"".join(_seed_at(piece, place) for place in places)
            else:
                told[member] = piece[:SEED_BYTES]
        return told


def _seed_at(piece: bytes, place: int) -> bytes:
    """Return a seed's part of a secret or of a share: the private key comes first."""
    start = SEED_BYTES * (1 + place)
    return piece[start : start + SEED_BYTES]
