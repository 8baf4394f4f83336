"""Open a group's sum on the server: restore the seeds that its members reveal, and take their masks off.

What remains on each update are the masks that the contributors share in pairs, which cancel in the sum alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from raafl.parts.protect.secure.coverage import Ring, buffer_of
from raafl.parts.protect.secure.group import (
    COMMITMENT_BYTES,
    SEED_BYTES,
    CannotOpen,
    Group,
    add_mask_,
    commitment,
    mask_seed,
    open_of,
    pair_sign,
)
from raafl.parts.protect.secure.shamir import combine
from raafl.submodel import FlatTensors


class Opening:
    """The server's side of unmasking the sum of one group.

    Attributes:
        group: description of the group and its members.
        coverage: cells of the members' submodels.
        commitments: digests by which each member committed to its seeds.
    """

    def __init__(self, group: Group, ring: Ring) -> None:
        """Prepare; the members' commitments are added as they arrive."""
        self.group, self.coverage = group, group.coverage(ring)
        self.commitments: dict[int, bytes] = {}
        self._own: dict[int, dict[int, bytes]] = {}
        self._dropped: dict[int, X25519PrivateKey] = {}

    def restore(self, survivors: frozenset[int], revealed: Mapping[int, Mapping[int, bytes]]) -> None:
        """Restore the seeds of the remaining members, and the private keys of those that dropped out, from the revealed shares.

        Args:
            survivors: keys of the members whose masked numbers have arrived.
            revealed: shares that each helping member revealed, by member; see `Member.reveal`.

        Raises:
            CannotOpen: too-few: not enough members helped; bad-share: their shares restore no key.
        """
        group = self.group
        if len(revealed) < group.threshold:
            raise CannotOpen("too-few", f"{len(revealed)} members helped, {group.threshold} must")
        helpers = sorted(revealed)[: group.threshold]
        for key in self.commitments:
            pieces = {group.point(helper): revealed[helper][key] for helper in helpers}
            secret = combine(pieces)
            if key in survivors:
                self._take_seeds(key, secret, survivors)
            else:
                self._take_key(key, secret)

    def _take_seeds(self, key: int, secret: bytes, survivors: frozenset[int]) -> None:
        cells, self._own[key] = self.coverage.own(key), {}
        for number, place in enumerate(open_of(self.coverage, key, survivors, self.group.min_cover)):
            seed = secret[number * SEED_BYTES : (number + 1) * SEED_BYTES]
            said = self.commitments[key][place * COMMITMENT_BYTES : (place + 1) * COMMITMENT_BYTES]
            if commitment(seed) != said:
                raise CannotOpen("bad-share", f"of a seed of member {key}")
            self._own[key][cells[place]] = seed

    def _take_key(self, key: int, secret: bytes) -> None:
        private = X25519PrivateKey.from_private_bytes(secret)
        if private.public_key().public_bytes_raw() != self.group.by_key[key].mask_key:
            raise CannotOpen("bad-share", f"of the key of member {key}")
        self._dropped[key] = private

    def unmask_(self, key: int, numbers: FlatTensors) -> None:
        """Remove all masks from a member's numbers, in place, for the cells whose sums the server may learn.

        Args:
            key: key of the member, which has not dropped out.
            numbers: masked numbers that the member sent.
        """
        words = buffer_of(numbers).numpy().view(np.uint32)
        for cell, seed in self._own[key].items():
            add_mask_(words, self.coverage.within(key, cell), seed, -1)
        for other, private in self._dropped.items():
            seed = mask_seed(private, self.group.by_key[key].mask_key, self.group.id, key, other)
            add_mask_(words, self.coverage.common(key, other), seed, -pair_sign(key, other))
