"""Describe a group of clients whose updates are summed, derive its keys, and expand seeds to masks.

All cryptography is the library `cryptography`: X25519 to agree on keys, HKDF-SHA256 to derive them, AES-256 in counter mode to
expand a seed to a mask, AES-256-GCM to encrypt shares, Ed25519 to sign lists. Every key is used for one group, and for one purpose.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from raafl.errors import BadInput
from raafl.submodel import FULL, FlatTensors, Layout, Spec, Submodels
from raafl.submodel.extract import CopyPlan

SEED_BYTES = 32
TAG_BYTES = 16
COMMITMENT_BYTES = 16


class CannotOpen(Exception):
    """Raised if the sum of a group's updates cannot be unmasked.

    `reason`: reason code: too-few (too few members are left), bad-share (the members' shares do not restore a key),
    or bad-group (the group is not the one to which a client agreed).
    """

    def __init__(self, detail: str, reason: Literal["too-few", "bad-share", "bad-group"]) -> None:
        super().__init__(detail, reason)  # with both arguments the exception can be copied and pickled
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason}: {self.args[0]}"


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One client of a group in secure aggregation, as the other members of the group see it.

    With certificates the member's site signs everything but ``counted`` and ``site`` (`Group.statement`).
    """

    id: int  # id of the member's assignment, by which the group knows it
    mask_key: bytes  # public key by which other members agree on masks with it, 32 bytes
    share_key: bytes  # public key by which other members encrypt shares of their secrets for it, 32 bytes
    sign_key: bytes  # public key by which other members check its signatures of lists, 32 bytes (Ed25519)
    spec: Spec  # submodel of the member
    num_samples: int = 1  # number of samples on which the member says it trained
    num_steps: int = 1  # number of optimizer steps that the member says it made
    counted: int = 1  # number of samples by which the server weights its update, at most ``num_samples``
    version: int = 0  # global version from which the member trained
    max_share: float = 1.0  # largest share of an opened sum that this member's site accepts from one site; 1 = any
    start: str = ""  # digest of the values from which the member trained; "" = not stated
    # site in the member's certificate; "" = none, so that the member counts as a site of its own
    site: str = ""

    @property
    def owner(self) -> str | int:
        """The member's site, or its own id where it has no certificate."""
        return self.site or self.id


@dataclass(frozen=True)
class Group:
    """Group of clients in secure aggregation: the server can read only the sum of their updates."""

    id: str  # hex id of the group within the run
    members: tuple[GroupMember, ...]  # members in the order of their ids
    threshold: int  # number of members that must help to unmask the sum
    min_cover: int  # number of members that must have trained an element before the server learns its sum
    version: int = 0  # global version when the group was formed, from which the members' staleness is counted
    run: str = ""  # digest of the run's config and model, which each member must have, too
    equal: bool = False  # whether all members have the same weight, as with privacy on the server

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the whole group, as hexadecimal digits: members that are told of other groups never sign one list."""
        counts = [[member.counted, member.site] for member in self.members]
        head = [self.id, self.threshold, self.min_cover, self.version, self.run, self.equal]
        text = json.dumps([head, [self.statement(member) for member in self.members], counts])
        return hashlib.sha256(text.encode()).hexdigest()

    def statement(self, member: GroupMember) -> str:
        """Return the text that a member's site signs: the member's keys for this one task, and what the sum depends on."""
        return statement(self.run, member)

    def surplus(self, members: Collection[int]) -> str | None:
        """Return the site that has more members among some than may collude with the server; None if there is no such site.

        Two lists can each find ``threshold`` signatures only if ``2 threshold - members`` of the group sign both.
        """
        most = max(2 * self.threshold - len(self.members) - 1, 1)
        counts = Counter(self.by_id[member].owner for member in members)
        return next((str(owner) for owner, num in counts.items() if num > most), None)

    @cached_property
    def by_id(self) -> dict[int, GroupMember]:
        """Members of the group, by their id."""
        return {member.id: member for member in self.members}

    def point(self, member_id: int) -> int:
        """Return the number at which a member's Shamir shares are evaluated: 1 for the first member, 2 for the next."""
        return [member.id for member in self.members].index(member_id) + 1

    def coverage(self, layouts: IntegerLayouts) -> Coverage:
        """Divide the model's elements into cells: elements that the same members train are in one cell."""
        return Coverage(layouts, {member.id: member.spec for member in self.members})


def statement(run: str, member: GroupMember) -> str:
    """Return the text that a member's site signs before it knows the group; see `Group.statement`."""
    keys = [key.hex() for key in (member.mask_key, member.share_key, member.sign_key)]
    facts = [
        member.num_samples,
        member.num_steps,
        member.version,
        member.max_share,
        member.start,
        member.spec.to_json(),
    ]
    return "raafl round keys 2\n" + json.dumps([run, member.id, keys, facts], sort_keys=True)


def threshold_of(num_members: int, share: float) -> int:
    """Return the number of members that must help to unmask a group's sum: the smallest number above ``share`` of all."""
    return min(int(share * num_members + 1e-9) + 1, num_members)


def share_bytes(coverage: Coverage, sender: int) -> int:
    """Return the size in bytes of the encrypted message by which a member shares its secrets with one other member.

    The secrets are its private key and one seed for each of its cells (sets of elements that the same members train).
    """
    return SEED_BYTES * (1 + len(coverage.cells_in(sender))) + TAG_BYTES


def reveal_bytes(coverage: Coverage, member_id: int, survivors: frozenset[int], min_cover: int) -> int:
    """Return the number of bytes that a remaining member sends so that the server can remove a given member's masks."""
    return SEED_BYTES * (
        len(open_positions(coverage, member_id, survivors, min_cover)) if member_id in survivors else 1
    )


def open_positions(coverage: Coverage, member_id: int, survivors: frozenset[int], min_cover: int) -> list[int]:
    """Return the cells of a member that the server may unmask, as positions in the list of the member's cells.

    A cell is a set of elements that the same members train.
    """
    opened = set(coverage.open_cells(survivors, min_cover))
    return [place for place, cell in enumerate(coverage.cells_in(member_id)) if cell in opened]


def commitment(seed: bytes) -> bytes:
    """Return a digest by which a member commits to a random seed without revealing it."""
    return hashlib.blake2b(seed, digest_size=COMMITMENT_BYTES, person=b"raafl seed").digest()


def mask_seed(private: X25519PrivateKey, public: bytes, group: str, one: int, other: int) -> bytes:
    """Derive the seed of the mask that two members share; both derive the same seed."""
    low, high = sorted((one, other))
    return _agreed(private, public, f"raafl mask {group} {low} {high}")


def share_key(private: X25519PrivateKey, public: bytes, group: str, sender: int, receiver: int) -> bytes:
    """Derive the key that encrypts the shares from a sender to a receiver; each direction has its own key."""
    return _agreed(private, public, f"raafl share {group} {sender} {receiver}")


def _agreed(private: X25519PrivateKey, public: bytes, purpose: str) -> bytes:
    try:
        secret = private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:  # the key has a wrong length, or would make the secret predictable
        raise CannotOpen(f"a member's public key cannot be used: {error}", "bad-group") from None
    return HKDF(algorithm=SHA256(), length=SEED_BYTES, salt=None, info=purpose.encode()).derive(secret)


def expand(seed: bytes, num: int) -> np.ndarray:
    """Expand a seed to ``num`` random-looking 32-bit words, equal on every machine."""
    # the counter may start at 0, since a seed is used for one mask only
    stream = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor().update(bytes(4 * num))
    return np.frombuffer(stream, "<u4").astype(np.uint32, copy=False)


def add_mask_(words: np.ndarray, where: np.ndarray | slice, seed: bytes, sign: int) -> None:
    """Add a mask to the chosen elements of a member's encoded update, modulo 2^32, in place."""
    num = len(words) if isinstance(where, slice) else int(np.count_nonzero(where))
    combine: Callable[..., np.ndarray] = np.add if sign > 0 else np.subtract
    if isinstance(where, slice):
        combine(words, expand(seed, num), out=words)
    else:
        words[where] = combine(words[where], expand(seed, num))


def pair_sign(member_id: int, other: int) -> int:
    """Return the sign of a mask that two members share, for the first: 1 = add, -1 = subtract; the other does the opposite."""
    return 1 if member_id < other else -1


# Divide the elements of a group's submodels by the clients that have them, so that masks agree and elements of few
# clients stay hidden.
#
# A *cell* is the set of all elements that the same distinct submodels of a group contain. Server and clients find the
# same cells in the same order, since both derive them from the specs alone. Whole models have one cell; nested widths
# have one for each width.

_SPECS_AT_ONCE = 48
"""Distinct submodels that one pass tells apart: bits of a whole number of 63, less those of `MAX_CELLS`."""

MAX_CELLS = 4096
"""Cells of a group; each has a seed of 32 bytes, shared among all members."""


def _with_dtype(layout: Layout, dtype: torch.dtype) -> Layout:
    """Return the layout with another dtype for all tensors."""
    return Layout.pack((entry.name, entry.shape, dtype) for entry in layout.entries)


class IntegerLayouts:
    """Layouts of the integers that encode clients' updates in secure aggregation; each trained value becomes one int32.

    `submodels`: submodels of the model; all trained parameters must be float32.
    """

    def __init__(self, submodels: Submodels) -> None:
        """Create layouts of integers for the submodels' tensors, cached with the submodels."""
        self.submodels = submodels

    def layout(self, spec: Spec = FULL, dtype: torch.dtype = torch.int32) -> Layout:
        """Return the layout of the integers that encode a submodel's trained values."""
        spec = self.submodels.normal(spec.without_base)
        return self.submodels.cached(
            "integer layout", (spec, dtype), lambda: _with_dtype(self.submodels.layout(spec, "trained"), dtype)
        )

    def plan(self, spec: Spec, dtype: torch.dtype = torch.int32) -> CopyPlan:
        """Return the copy plan (which elements go where) between the encoded values of a submodel and of the whole model."""
        spec = self.submodels.normal(spec.without_base)

        def make() -> CopyPlan:
            return CopyPlan(spec, self.layout(FULL, dtype), self.layout(spec, dtype), self.submodels.selections(spec))

        return self.submodels.cached("integer plan", (spec, dtype), make)

    def zeros(self, spec: Spec = FULL, dtype: torch.dtype = torch.int32) -> FlatTensors:
        """Return a tensor of zeros on the CPU for the integers that encode a submodel's trained values."""
        return FlatTensors.zeros(self.layout(spec, dtype))


def buffer_of(flat: FlatTensors) -> torch.Tensor:
    """Return the one buffer with all elements of flat tensors that share a dtype; an empty one if there are no tensors."""
    return next(iter(flat.buffers.values()), torch.zeros(0, dtype=torch.int32))


class Coverage:
    """Division of a model's elements into cells: a cell has all elements that the same clients of a group train.

    A group is a set of clients whose updates are summed together in secure aggregation.

    Attributes:
        holders: ids of the clients (members of the group) that train the elements of a cell, for each cell.
        specs: submodel of each member, by id.
    """

    def __init__(self, layouts: IntegerLayouts, specs: Mapping[int, Spec]) -> None:
        """Divide the model's elements into cells, each of which the same members cover.

        Args:
            layouts: layouts of the model's integers.
            specs: submodel of each member, by its id.

        Raises:
            CannotOpen: bad-group: there are more than `MAX_CELLS` cells.
        """
        self._layouts = layouts
        self.specs = {member_id: layouts.submodels.normal(spec.without_base) for member_id, spec in specs.items()}
        distinct = list(dict.fromkeys(self.specs.values()))
        whole = layouts.zeros(dtype=torch.int64)  # the cell of each element, by the submodels that were looked at
        cells: list[frozenset[Spec]] = [frozenset()]
        for first in range(0, len(distinct), _SPECS_AT_ONCE):
            some, codes = distinct[first : first + _SPECS_AT_ONCE], buffer_of(whole)
            codes.bitwise_left_shift_(len(some))
            for bit, spec in enumerate(some):
                layouts.plan(spec, torch.int64).cover_(whole, 1 << bit)
            found, places = _numbered(codes.numpy(), len(some) + (len(cells) - 1).bit_length())
            if len(found) > MAX_CELLS:
                raise CannotOpen(
                    f"the submodels of {len(specs)} clients overlap in {len(found)} different ways or more, at most "
                    f"{MAX_CELLS} can be summed: use fewer rates or smaller groups",
                    "bad-group",
                )
            codes.copy_(torch.from_numpy(places))
            cells = [
                cells[code >> len(some)].union(spec for bit, spec in enumerate(some) if code >> bit & 1)
                for code in found.tolist()
            ]
        members: dict[Spec, list[int]] = {spec: [] for spec in distinct}
        for member_id, spec in self.specs.items():
            members[spec].append(member_id)
        self.holders = [frozenset(member_id for spec in specs for member_id in members[spec]) for specs in cells]
        self._whole = whole
        self._cells: dict[Spec, np.ndarray] = {}

    def cells_of(self, member_id: int) -> np.ndarray:
        """Return, for each element of a member's submodel in order, the index of its cell.

        A cell is a set of elements that the same members train.
        """
        spec = self.specs[member_id]
        if spec not in self._cells:
            plan = self._layouts.plan(spec, torch.int64)
            self._cells[spec] = buffer_of(plan.gather(self._whole)).numpy().astype(np.int16)
        return self._cells[spec]

    def cells_in(self, member_id: int) -> list[int]:
        """Return the cells (sets of elements that the same members train) in a member's submodel, ascending."""
        return [cell for cell, holders in enumerate(self.holders) if member_id in holders]

    def open_cells(self, survivors: frozenset[int], min_cover: int) -> list[int]:
        """Return the cells whose sums the server may learn: those that enough remaining members train, ascending.

        A cell is a set of elements that the same members train.

        Args:
            survivors: ids of the members that have not dropped out.
            min_cover: smallest number of members that must train a cell.
        """
        return [cell for cell, holders in enumerate(self.holders) if len(holders & survivors) >= min_cover]

    def shared_elements(self, member_id: int, other: int) -> np.ndarray | slice:
        """Return an index of the elements of a member's submodel that another member has, too: a boolean mask, or slice(None).

        Args:
            member_id: id of the member.
            other: id of the other member.
        """
        held = np.array([other in holders for holders in self.holders])
        cells = self.cells_of(member_id)
        return slice(None) if held[cells].all() else held[cells]

    def elements_in(self, member_id: int, cell: int) -> np.ndarray | slice:
        """Return an index of the elements of a member's submodel that lie in a cell: a boolean mask, or slice(None).

        A cell is a set of elements that the same members train.

        Args:
            member_id: id of the member.
            cell: number of the cell.
        """
        cells = self.cells_of(member_id)
        chosen = cells == cell
        return slice(None) if chosen.all() else chosen


def can_be_summed(layouts: IntegerLayouts, specs: Sequence[Spec]) -> bool:
    """Check whether clients with these submodels can be summed in one group, which has at most `MAX_CELLS` cells."""
    if 2 ** len(set(specs)) <= MAX_CELLS:
        return True
    try:
        Coverage(layouts, dict(enumerate(specs)))
    except CannotOpen:
        return False
    return True


def _numbered(codes: np.ndarray, num_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct values of ``codes`` in ascending order, and for each element the index of its value."""
    if num_bits > 16:
        found, places = np.unique(codes, return_inverse=True)
        return found, places.reshape(-1)
    found = np.flatnonzero(np.bincount(codes, minlength=1 << num_bits))
    places = np.zeros(1 << num_bits, np.int64)
    places[found] = np.arange(len(found))
    return found, places[codes]


LARGEST = 2**31 - 1
"""Largest whole number of 32 bits with a sign."""

OUT_OF_RANGE = "out-of-range"
"""Reason of a refusal: an element is beyond the bound, or not finite."""


class OutOfRange(ValueError):
    """Raised if an update has an element that fixed-point numbers cannot hold: it exceeds the bound or is not finite."""


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """Fixed-point format in which several clients' changes add up without overflow: values up to ``bound``, steps ``2**-bits``.

    An element is rounded towards zero by less than one step, so that rounding never increases the norm of an update.
    """

    bound: float  # largest absolute value B of an element
    num_members: int  # largest number K of updates in a sum

    def __post_init__(self) -> None:
        if self.bound * self.num_members > LARGEST / 2:
            raise BadInput(
                f"secure_aggregation.bound is {self.bound:g} for sums of {self.num_members} updates, which do not "
                "fit into 32 bits: give a smaller bound"
            )

    @property
    def bits(self) -> int:
        """Number of binary digits after the point: the most that leave room for a sum of `num_members` values up to `bound`."""
        return math.floor(math.log2(LARGEST / (self.num_members * self.bound)))

    @property
    def step(self) -> float:
        """Distance between two neighbouring fixed-point numbers."""
        return 2.0**-self.bits

    def scale(self, values: Tensor, clip_norm: float | None = None) -> float:
        """Return the factor, at most 1, by which a change must be multiplied to clip its norm.

        `clip_norm`: largest L2 norm of ``values``; None = no clipping.

        Raises:
            OutOfRange: after clipping, an element exceeds the bound or is not finite.
        """
        wide, factor = values.double(), 1.0
        if clip_norm is not None and (norm := float(torch.linalg.vector_norm(wide))) > clip_norm:
            factor = clip_norm / norm
        # `not` also refuses NaN
        if wide.numel() and not float(wide.abs().max()) * factor <= self.bound:
            raise OutOfRange(
                f"an element of the update is larger than {self.bound:g} (secure_aggregation.bound), or not finite: "
                "raise that bound, or set secure_aggregation.clip_norm"
            )
        return factor

    def encode(self, values: Tensor, share: float = 1.0, scale: float = 1.0) -> Tensor:
        """Encode ``share * scale * values`` as int32 multiples of the fixed-point step, on the device of ``values``."""
        wide = values.double() if scale == 1.0 else values.double() * scale
        return (wide * (share * 2.0**self.bits)).trunc_().to(torch.int32)

    def decode(self, total: Tensor) -> Tensor:
        """Convert a sum of encoded changes back to float64."""
        return total.double() * self.step


def add_(total: Tensor, more: Tensor | np.ndarray) -> None:
    """Add int32 tensors modulo 2^32, in place, on the CPU. NumPy does it, since torch does not define what an overflow gives."""
    words = total.numpy().view(np.uint32)
    other = more.numpy() if isinstance(more, Tensor) else more
    np.add(words, other.view(np.uint32), out=words)
