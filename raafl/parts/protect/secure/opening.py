"""Open a group's sum on the server: restore the seeds that its members reveal, and take their masks off.

What remains on each update are the masks that the contributors share in pairs, which cancel in the sum alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from raafl.parts.protect.secure.coverage import IntegerLayouts, buffer_of
from raafl.parts.protect.secure.group import (
    COMMITMENT_BYTES,
    SEED_BYTES,
    CannotOpen,
    Group,
    add_mask_,
    commitment,
    mask_seed,
    open_positions,
    pair_sign,
)
from raafl.parts.protect.secure.shamir import combine
from raafl.submodel import FlatTensors


class Opening:
    """The server's side of unmasking the sum of one group's updates.

    `group`: description of the group and its members.
    `coverage`: cells (sets of elements that the same members train) of the members' submodels.
    `commitments`: digests by which each member committed to its seeds.
    """

    def __init__(self, group: Group, layouts: IntegerLayouts) -> None:
        """Start without commitments, which are added as the members send them."""
        self.group, self.coverage = group, group.coverage(layouts)
        self.commitments: dict[int, bytes] = {}
        self._own: dict[int, dict[int, bytes]] = {}
        self._dropped: dict[int, X25519PrivateKey] = {}

    def restore(self, survivors: frozenset[int], revealed: Mapping[int, Mapping[int, bytes]]) -> None:
        """Restore, from revealed shares, the mask seeds of members that remain, and the private keys of those that dropped out.

        Raises:
            CannotOpen: too-few: not enough members helped; bad-share: their shares restore no key.
        """
        group = self.group
        if len(revealed) < group.threshold:
            raise CannotOpen(f"{len(revealed)} members helped to unmask the sum, {group.threshold} must", "too-few")
        helpers = sorted(revealed)[: group.threshold]
        for member_id in self.commitments:
            pieces = {group.point(helper): revealed[helper][member_id] for helper in helpers}
            secret = combine(pieces)
            if member_id in survivors:
                self._take_seeds(member_id, secret, survivors)
            else:
                self._take_key(member_id, secret)

    def _take_seeds(self, member_id: int, secret: bytes, survivors: frozenset[int]) -> None:
        cells, self._own[member_id] = self.coverage.cells_in(member_id), {}
        for number, place in enumerate(open_positions(self.coverage, member_id, survivors, self.group.min_cover)):
            seed = secret[number * SEED_BYTES : (number + 1) * SEED_BYTES]
            said = self.commitments[member_id][place * COMMITMENT_BYTES : (place + 1) * COMMITMENT_BYTES]
            if commitment(seed) != said:
                raise CannotOpen(f"the revealed shares give a wrong seed for member {member_id}", "bad-share")
            self._own[member_id][cells[place]] = seed

    def _take_key(self, member_id: int, secret: bytes) -> None:
        private = X25519PrivateKey.from_private_bytes(secret)
        if private.public_key().public_bytes_raw() != self.group.by_id[member_id].mask_key:
            raise CannotOpen(f"the revealed shares give a wrong private key for member {member_id}", "bad-share")
        self._dropped[member_id] = private

    def unmask_(self, member_id: int, numbers: FlatTensors) -> None:
        """Remove from a member's update, in place, the masks that would not cancel in the sum over all members.

        Elements that too few members train stay masked, since the server may not learn their sums.
        """
        words = buffer_of(numbers).numpy().view(np.uint32)
        for cell, seed in self._own[member_id].items():
            add_mask_(words, self.coverage.elements_in(member_id, cell), seed, -1)
        for other, private in self._dropped.items():
            seed = mask_seed(private, self.group.by_id[member_id].mask_key, self.group.id, member_id, other)
            add_mask_(words, self.coverage.shared_elements(member_id, other), seed, -pair_sign(member_id, other))
