"""A client's part in a group: share its seeds, mask its numbers, sign who is there, and help to open the sum.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, figure 4 with the consistency
round, for servers that lie (`raafl.parts.protect.secure.member`). A pair's mask covers the elements that both have. Where the
paper has one seed b_u for a client's own mask, here is one for each cell, so that members open only cells with enough contributors.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import reduce

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from raafl.parts.protect.secure.group import (
    COMMITMENT_BYTES,
    SEED_BYTES,
    CannotOpen,
    Coverage,
    Group,
    GroupMember,
    IntegerLayouts,
    add_mask_,
    buffer_of,
    commitment,
    mask_seed,
    open_positions,
    pair_sign,
    share_key,
    threshold_of,
)
from raafl.submodel import FlatTensors, Spec

_NONCE = bytes(12)
"""Constant nonce, safe since each key of `share_key` encrypts only one message."""


class Member:
    """A client's side of secure aggregation in one group; each group needs a new object, since its keys are used once.

    `public`: public keys of the client: for masks, for shares, and for signatures. The last one is no site's: with
    certificates the site's own key signs all three (`Group.statement`), which delegates to a key that is good for one
    group and for one client of the site.
    """

    def __init__(self, min_cover: int, threshold: float, same_values: bool = False) -> None:
        """Draw the member's keys, and store the limits that the client's own config sets.

        `same_values`: whether a sum hides this member only among members that received the same values.
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
        self._held: dict[int, bytes] = {}  # by member: share of its secrets that this client stores
        self._has_joined = self._has_masked = self._has_revealed = False
        self._survivors: frozenset[int] | None = None  # list of survivors that this client has signed

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
        """Return the number of members, and of sites, that must have trained a cell before its sum may be unmasked."""
        return max(self._min_cover, self.group.min_cover)

    def mask_(self, numbers: FlatTensors, encrypted: Mapping[int, bytes]) -> bytes:
        """Decrypt the other members' shares, and mask this client's encoded update, in place; return a signature of the senders.

        Raises:
            CannotOpen: too-few: not enough members sent shares; bad-share: a share cannot be decrypted; bad-group: it has
                masked numbers before.
        """
        group, member_id = self.group, self.id
        if self._has_masked:  # two updates under the same masks would reveal their difference
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
    """Return seed number ``place`` of a secret, or of a share of it, in which the seeds follow the private key."""
    start = SEED_BYTES * (1 + place)
    return piece[start : start + SEED_BYTES]


# Share a secret among clients, so that any `threshold` of them can restore it, and fewer learn nothing (Shamir 1979).
#
# Each byte is shared separately, over GF(2^8) modulo x^8 + x^4 + x^3 + x + 1, as in draft-mcgrew-tss-03, whose test
# vectors our tests check.

MAX_SHARES = 255  # GF(256) has 255 points other than 0, at which the polynomial has the secret as its value


def _tables() -> tuple[np.ndarray, np.ndarray]:
    """Return tables of GF(256): powers of 3 up to the largest sum of two logarithms, 509, and logarithms to base 3."""
    powers, logs, value = np.zeros(510, np.uint8), np.zeros(256, np.int64), 1
    for exponent in range(255):
        powers[exponent] = powers[exponent + 255] = value
        logs[value] = exponent
        value ^= value << 1  # multiplies by 3; the next line reduces by the field's polynomial
        value ^= 0x11B if value & 0x100 else 0
    return powers, logs


_POWERS, _LOGS = _tables()


def _times(values: np.ndarray, factor: int) -> np.ndarray:
    """Multiply bytes in GF(256) by a factor other than 0."""
    return np.where(values == 0, 0, _POWERS[_LOGS[values] + _LOGS[factor]]).astype(np.uint8)


def share(secret: bytes, threshold: int, num: int) -> list[bytes]:
    """Split a secret into shares, any ``threshold`` of which restore it; each is as long as the secret.

    The shares are numbered 1, 2, and so on.
    """
    if not 1 <= threshold <= num <= MAX_SHARES:
        raise ValueError(
            f"threshold is {threshold} of {num} shares: give 1 to {MAX_SHARES} shares, and a threshold of at most "
            "as many"
        )
    # the secret is the constant term, which Horner's scheme adds last
    texts = [*(secrets.token_bytes(len(secret)) for _ in range(threshold - 1)), secret]
    rows = [np.frombuffer(text, np.uint8) for text in texts]
    return [reduce(lambda total, row: _times(total, point) ^ row, rows).tobytes() for point in range(1, num + 1)]


def combine(shares: Mapping[int, bytes]) -> bytes:
    """Restore a secret that `share` has split; fewer shares than its ``threshold``, or wrong ones, give a wrong secret."""
    total = np.zeros(len(next(iter(shares.values()))), np.uint8)
    for point, text in shares.items():
        exponent = sum(int(_LOGS[other]) - int(_LOGS[other ^ point]) for other in shares if other != point)
        total ^= _times(np.frombuffer(text, np.uint8), int(_POWERS[exponent % 255]))
    return total.tobytes()


# Sign and check the lists of members on which a group agrees before a member reveals shares (Bonawitz et al. 2017, round 3).
#
# A malicious server could tell members different lists, to get the seeds of a client from some members and the keys of
# its pairwise masks from others. So each member signs two texts, each of them once:
# 1. with its masked numbers, the list of *senders*: the members whose shares it has, and with whom it shares masks;
# 2. later that list and the list of *survivors*: the members whose masked numbers have arrived.
# A member reveals shares only if ``threshold`` members have signed its second text, and accepts as survivors only
# members that have signed its first text.
#
# Let fewer than ``2 threshold - n`` of the n members help the server. Two different second texts cannot both have
# ``threshold`` signatures, since an honest member signs one. So honest members reveal shares for one pair of lists only:
# of each member its seeds or its key, never both. A survivor shares masks with every sender, so in an opened cell the
# masks between its honest holders remain, and cancel only in the sum. The signature of the first text also covers the
# group's digest: keys, weights, versions and submodels of all members, as the signer saw them.

SIGNATURE_BYTES = 64


def senders_text(group: Group, senders: Iterable[int]) -> bytes:
    """Return the text that a member signs with its masked numbers."""
    return f"raafl round senders 1\n{group.run}\n{group.digest}\n{_listed(senders)}".encode()


def lists_text(group: Group, senders: Iterable[int], survivors: Iterable[int]) -> bytes:
    """Return the text that a member signs before it reveals anything."""
    return f"raafl round lists 1\n{group.run}\n{group.digest}\n{_listed(senders)}\n{_listed(survivors)}".encode()


def _listed(members: Iterable[int]) -> str:
    return " ".join(map(str, sorted(members)))


def is_signed(text: bytes, signature: bytes, key: bytes) -> bool:
    """Check whether a text has a member's signature; False for malformed keys and signatures, too."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def check_facts(group: Group) -> None:
    """Check what the weights of a group depend on, and that members that say so started from the same values.

    Raises:
        CannotOpen: bad-group: a member counts for more samples than it says, or trained from a version that is not there
            yet, or members of one version and submodel received different values.
    """
    starts: dict[tuple[int, Spec], str] = {}
    for member in group.members:
        if not 1 <= member.counted <= member.num_samples or not 0 <= member.version <= group.version:
            raise CannotOpen(
                f"the server counts {member.counted} of the {member.num_samples} samples of member {member.id}, which "
                f"trained from version {member.version} of {group.version}",
                "bad-group",
            )
        start = starts.setdefault((member.version, member.spec), member.start)
        # if one member alone had received another model, the sum over that model would be this member's update
        if member.start and start != member.start:
            raise CannotOpen(
                f"member {member.id} received other values of version {member.version} than another one", "bad-group"
            )


def check_cover(
    group: Group,
    coverage: Coverage,
    weights: Mapping[int, float],
    survivors: frozenset[int],
    min_cover: int,
    alike_to: int | None = None,
) -> None:
    """Check that each cell whose sum these survivors would open hides each of its sites.

    `alike_to`: member whose cells alone are checked, and only members that received the same values as it are taken to
    hide it: a server can give others a model from which they learn nothing. None = all cells and members.

    Raises:
        CannotOpen: bad-group: a cell has survivors of too few sites, or nearly all of its sum would be of one site.
    """
    most = min(member.max_share for member in group.members)
    cells = coverage.open_cells(survivors, min_cover)
    hiding = survivors
    if alike_to is not None:
        cells = [cell for cell in cells if alike_to in coverage.holders[cell]]
        hiding = survivors & _alike(group, alike_to)
    for cell in cells:
        parts: dict[str | int, float] = {}
        for number in sorted(coverage.holders[cell] & hiding):
            member = group.by_id[number]
            if member.site and not member.num_steps:  # a member without steps hides no other member's update
                continue
            parts[member.owner] = parts.get(member.owner, 0.0) + weights[number]
        if len(parts) < min_cover:
            raise CannotOpen(
                f"elements of the model would be summed over clients of {len(parts)} sites that trained"
                f"{'' if alike_to is None else ' from the same values (policy.same_values)'}, and "
                f"secure_aggregation.min_cover is {min_cover}: use clients of more sites",
                "bad-group",
            )
        owner, largest = max(parts.items(), key=lambda part: part[1])
        if largest > most * sum(parts.values()):
            raise CannotOpen(
                f"{largest / (sum(parts.values()) or 1):.1%} of a sum would be of {_named(owner)}, and the policy of a site "
                f"allows max_share {most:g}: use more clients or more equal numbers of samples, or lower guard.max_weight",
                "bad-group",
            )


def _alike(group: Group, member_id: int) -> frozenset[int]:
    """Return the members with the submodel, version and received values of member ``member_id``; empty if it states none."""
    own = group.by_id[member_id]
    start = own.version, own.spec, own.start
    return frozenset(one.id for one in group.members if own.start and (one.version, one.spec, one.start) == start)


def _named(owner: str | int) -> str:
    return f"site '{owner}'" if isinstance(owner, str) else f"member {owner}"


# Unmask a group's sum on the server, by the seeds that its members reveal.
#
# The masks that two contributors share remain on each of their updates, and cancel only in the sum.


class Opening:
    """The server's side of unmasking the sum of one group's updates.

    `group`: description of the group and its members.
    `coverage`: cells (sets of elements that the same members train) of the members' submodels.
    `commitments`: digests by which each member committed to its seeds.
    """

    def __init__(self, group: Group, layouts: IntegerLayouts) -> None:
        """Prepare to unmask a group's sum; the members' commitments are added as they arrive."""
        self.group, self.coverage = group, group.coverage(layouts)
        self.commitments: dict[int, bytes] = {}
        self._own: dict[int, dict[int, bytes]] = {}
        self._dropped: dict[int, X25519PrivateKey] = {}

    def restore(self, survivors: frozenset[int], revealed: Mapping[int, Mapping[int, bytes]]) -> list[int]:
        """Restore, from revealed shares, the mask seeds of members that remain, and the private keys of those that dropped out.

        Where more members have helped than must, one whose share is wrong is left out: the others' fit the commitments.

        Returns:
            Members that were left out, ascending.

        Raises:
            CannotOpen: too-few: not enough members helped; bad-share: their shares restore no key.
        """
        helpers = sorted(revealed)
        if len(helpers) < self.group.threshold:
            raise CannotOpen(f"{len(helpers)} members helped to unmask the sum, {self.group.threshold} must", "too-few")
        for member_id in self.commitments:
            try:
                self._take(member_id, survivors, revealed, helpers)
            except CannotOpen:
                if (fit := self._without_one(member_id, survivors, revealed, helpers)) is None:
                    raise
                helpers = fit
        return sorted(revealed.keys() - set(helpers))

    def _without_one(
        self,
        member_id: int,
        survivors: frozenset[int],
        revealed: Mapping[int, Mapping[int, bytes]],
        helpers: Sequence[int],
    ) -> list[int] | None:
        """Return the helpers without the one whose share of a member's secrets is wrong; None if too few others are left."""
        if len(helpers) == self.group.threshold:
            return None
        for suspect in helpers[: self.group.threshold]:
            others = [helper for helper in helpers if helper != suspect]
            with suppress(CannotOpen):
                self._take(member_id, survivors, revealed, others)
                return others
        return None

    def _take(
        self,
        member_id: int,
        survivors: frozenset[int],
        revealed: Mapping[int, Mapping[int, bytes]],
        helpers: Sequence[int],
    ) -> None:
        """Restore what one member's masks come from, by the shares of the first helpers, as many as must help."""
        chosen = helpers[: self.group.threshold]
        secret = combine({self.group.point(helper): revealed[helper][member_id] for helper in chosen})
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
