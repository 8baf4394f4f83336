"""Describe a group of clients whose updates are summed, derive its keys, and expand seeds to masks.

All cryptography is the library `cryptography`: X25519 to agree on keys, HKDF-SHA256 to derive them, AES-256 in counter mode to
expand a seed to a mask, AES-256-GCM to encrypt shares. Every key is used for one group, and for one purpose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from raafl.parts.protect.secure.coverage import Coverage, Ring
from raafl.submodel import Spec

SEED_BYTES = 32
TAG_BYTES = 16
COMMITMENT_BYTES = 16


class CannotOpen(Exception):
    """Raised if the sum of a group's updates cannot be unmasked.

    Attributes:
        reason: reason code: too-few (too few members are left), bad-share (the members' shares do not restore a key),
            or bad-group (the group is not the one to which a client agreed).
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One member of a group, as the other members see it.

    Attributes:
        key: number of the member: the id of its assignment.
        mask_key: public key with which others agree on masks, 32 bytes.
        share_key: public key with which others encrypt shares, 32 bytes.
        spec: submodel of the member.
    """

    key: int
    mask_key: bytes
    share_key: bytes
    spec: Spec


@dataclass(frozen=True)
class Group:
    """Group of clients of whose updates the server can read only the sum.

    Attributes:
        id: hex text that identifies the group within the run.
        members: members of the group, ordered by key.
        threshold: number of members that must help to unmask the sum.
        min_cover: number of members that must have trained an element for the server to learn its sum.
    """

    id: str
    members: tuple[GroupMember, ...]
    threshold: int
    min_cover: int

    @cached_property
    def by_key(self) -> dict[int, GroupMember]:
        """Members of the group by key."""
        return {member.key: member for member in self.members}

    def point(self, key: int) -> int:
        """Return the point, from 1, at which a member's Shamir shares are evaluated."""
        return [member.key for member in self.members].index(key) + 1

    def coverage(self, ring: Ring) -> Coverage:
        """Divide the model's elements into cells, by which members have them."""
        return Coverage(ring, {member.key: member.spec for member in self.members})


def threshold_of(num_members: int, share: float) -> int:
    """Return the number of members that must help to unmask a sum: more than the share ``share`` of all.

    Args:
        num_members: number of members in the group.
        share: share of the members, from 0.5 to below 1.
    """
    return min(int(share * num_members + 1e-9) + 1, num_members)


def share_bytes(coverage: Coverage, sender: int) -> int:
    """Return the bytes of one encrypted message with a sender's shares: of its private key, and of a seed for each of its cells.

    Args:
        coverage: cells of the group's submodels.
        sender: key of the member that sends.
    """
    return SEED_BYTES * (1 + len(coverage.own(sender))) + TAG_BYTES


def reveal_bytes(coverage: Coverage, key: int, survivors: frozenset[int], min_cover: int) -> int:
    """Return the number of bytes that each remaining member reveals about a member; arguments as for `open_of`."""
    return SEED_BYTES * (len(open_of(coverage, key, survivors, min_cover)) if key in survivors else 1)


def open_of(coverage: Coverage, key: int, survivors: frozenset[int], min_cover: int) -> list[int]:
    """Return the cells of a member that the server may unmask, as positions among the member's own cells.

    Args:
        coverage: cells of the group's submodels.
        key: key of the member.
        survivors: keys of the members that have sent their numbers.
        min_cover: smallest number of survivors that must have a cell.
    """
    opened = set(coverage.open_cells(survivors, min_cover))
    return [place for place, cell in enumerate(coverage.own(key)) if cell in opened]


def commitment(seed: bytes) -> bytes:
    """Return a digest by which a member commits to a random seed without revealing it."""
    return hashlib.blake2b(seed, digest_size=COMMITMENT_BYTES, person=b"raafl seed").digest()


def mask_seed(private: X25519PrivateKey, public: bytes, group: str, one: int, other: int) -> bytes:
    """Derive the seed of the mask that two members share; both get the same one.

    Args:
        private: one member's private key for masks.
        public: the other member's public key for masks.
        group: id of the group.
        one: key of one of the members.
        other: key of the other member.
    """
    low, high = sorted((one, other))
    return _agreed(private, public, f"raafl mask {group} {low} {high}")


def share_key(private: X25519PrivateKey, public: bytes, group: str, sender: int, receiver: int) -> bytes:
    """Derive the key that encrypts the shares from a sender to a receiver; each direction has its own key.

    Args:
        private: one member's private key for shares.
        public: the other member's public key for shares.
        group: id of the group.
        sender: key of the member that encrypts.
        receiver: key of the member that decrypts.
    """
    return _agreed(private, public, f"raafl share {group} {sender} {receiver}")


def _agreed(private: X25519PrivateKey, public: bytes, purpose: str) -> bytes:
    try:
        secret = private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:  # of a wrong length, or one of the few points that give away the result
        raise CannotOpen("bad-group", f"a public key cannot be used: {error}") from None
    return HKDF(algorithm=SHA256(), length=SEED_BYTES, salt=None, info=purpose.encode()).derive(secret)


def expand(seed: bytes, num: int) -> np.ndarray:
    """Expand a seed to ``num`` random-looking 32-bit words, equal on every machine.

    Args:
        seed: secret seed to be expanded.
        num: number of words.
    """
    # the counter starts at 0: a seed is expanded for one mask only
    stream = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor().update(bytes(4 * num))
    return np.frombuffer(stream, "<u4").astype(np.uint32, copy=False)


def add_mask_(words: np.ndarray, where: np.ndarray | slice, seed: bytes, sign: int) -> None:
    """Add a mask to the chosen elements of a member's numbers, modulo 2^32, in place.

    Args:
        words: numbers of the member, uint32.
        where: elements to mask: a boolean mask over ``words``, or a slice of all.
        seed: seed from which the mask is expanded.
        sign: direction: 1 adds the mask, -1 subtracts it.
    """
    num = len(words) if isinstance(where, slice) else int(np.count_nonzero(where))
    combine: Callable[..., np.ndarray] = np.add if sign > 0 else np.subtract
    if isinstance(where, slice):
        combine(words, expand(seed, num), out=words)
    else:
        words[where] = combine(words[where], expand(seed, num))


def pair_sign(key: int, other: int) -> int:
    """Return the sign with which a member adds the mask that it shares with another; the other one uses the opposite.

    Args:
        key: key of the member.
        other: key of the other member.
    """
    return 1 if key < other else -1
