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

from raafl.parts.protect.secure.coverage import Ring, buffer_of
from raafl.parts.protect.secure.group import (
    SEED_BYTES,
    CannotOpen,
    Group,
    add_mask_,
    commitment,
    mask_seed,
    open_of,
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

    def join(self, group: Group, key: int, ring: Ring) -> tuple[dict[int, bytes], bytes]:
        """Agree to a group, and return what the other members need in order to remove this client's masks if it is lost.

        These are encrypted shares of the seeds from which its masks are drawn, by the key of the member that receives
        them, and commitments to the seeds.

        Args:
            group: description of the group that the server sent.
            key: key of this member.
            ring: layouts of the integers by which the model's values are masked and summed.

        Raises:
            CannotOpen: bad-group: the group is too small, has another threshold or min_cover than agreed, or lacks this
                member.
        """
        self._check(group, key)
        self.group, self.key, self.coverage = group, key, group.coverage(ring)
        self._seeds = [secrets.token_bytes(SEED_BYTES) for _ in self.coverage.own(key)]
        secret = self._masks.private_bytes_raw() + b"".join(self._seeds)
        pieces = share(secret, group.threshold, len(group.members))
        encrypted = {}
        for member, piece in zip(group.members, pieces, strict=True):
            if member.key == key:
                self._held[key] = piece
            else:
                one_way = share_key(self._shares, member.share_key, group.id, key, member.key)
                encrypted[member.key] = AESGCM(one_way).encrypt(_NONCE, piece, None)
        return encrypted, b"".join(map(commitment, self._seeds))

    def _check(self, group: Group, key: int) -> None:
        num = len(group.members)
        keys = [member.key for member in group.members]
        publics = {public for member in group.members for public in (member.mask_key, member.share_key)}
        if keys != sorted(set(keys)) or num > MAX_SHARES or len(publics) < 2 * num:
            raise CannotOpen("bad-group", "members are out of order, too many, or share a key")
        own = group.by_key.get(key)
        if own is None or (own.mask_key, own.share_key) != self.public:
            raise CannotOpen("bad-group", "this client is not in it by its own keys")
        if group.threshold < threshold_of(num, self._threshold) or num < self._min_cover:
            raise CannotOpen("bad-group", f"{group.threshold} of {num} members are to open it")
        if group.min_cover < self._min_cover:
            raise CannotOpen("bad-group", f"elements of {group.min_cover} clients are to be opened")

    def mask_(self, numbers: FlatTensors, encrypted: Mapping[int, bytes]) -> None:
        """Decrypt the other members' shares, and mask this client's numbers, in place.

        Args:
            numbers: encoded change of this client's submodel.
            encrypted: shares for this member, by sender; a missing sender has dropped out.

        Raises:
            CannotOpen: too-few: not enough members sent shares; bad-share: a share cannot be decrypted.
        """
        group, key = self.group, self.key
        if len(encrypted) + 1 < group.threshold:
            raise CannotOpen("too-few", f"{len(encrypted) + 1} members are left, {group.threshold} must help")
        for sender, text in encrypted.items():
            one_way = share_key(self._shares, group.by_key[sender].share_key, group.id, sender, key)
            try:
                self._held[sender] = AESGCM(one_way).decrypt(_NONCE, text, None)
            except InvalidTag:
                raise CannotOpen("bad-share", f"that of member {sender} was not made for this client") from None
        words = buffer_of(numbers).numpy().view(np.uint32)
        for cell, seed in zip(self.coverage.own(key), self._seeds, strict=True):
            add_mask_(words, self.coverage.within(key, cell), seed, 1)
        for other in encrypted:
            seed = mask_seed(self._masks, group.by_key[other].mask_key, group.id, key, other)
            add_mask_(words, self.coverage.common(key, other), seed, pair_sign(key, other))

    def reveal(self, survivors: Collection[int]) -> dict[int, bytes]:
        """Return the shares with which the server unmasks the sum, by member.

        A share belongs to a seed of a member that remains, or to the private key of one that dropped out. Both are
        never revealed of the same member. Seeds are revealed only for cells that enough members have.

        Args:
            survivors: keys of the members whose masked numbers the server has received.

        Raises:
            CannotOpen: too few members are left, this client is not among them, or it has revealed its shares before.
        """
        left = frozenset(survivors)
        if self._has_revealed or not left <= self._held.keys() or self.key not in left:
            raise CannotOpen("bad-group", "who has contributed is not as it was said")
        if len(left) < self.group.threshold:
            raise CannotOpen("too-few", f"{len(left)} members are left, {self.group.threshold} must help")
        self._has_revealed = True
        told = {}
        for member, piece in self._held.items():
            if member in left:
                places = open_of(self.coverage, member, left, max(self._min_cover, self.group.min_cover))
                told[member] = b"".join(_seed_at(piece, place) for place in places)
            else:
                told[member] = piece[:SEED_BYTES]
        return told


def _seed_at(piece: bytes, place: int) -> bytes:
    """Return a seed's part of a secret or of a share: the private key comes first."""
    start = SEED_BYTES * (1 + place)
    return piece[start : start + SEED_BYTES]
