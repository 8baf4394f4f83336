"""Define the messages of secure aggregation, in which a group masks its updates and the sum is revealed, and their checks.

They travel as questions, replies and the update of the task at hand (`raafl.runtime.protocol`); tensors are bytes, but for the
masked numbers.

======== ========================= ============================ ===========================================
step     message                   fields                       tensors
======== ========================= ============================ ===========================================
ready    QUESTION                  those of `Answer`, `Claim`   `keys`: three public keys
.        REPLY                     `Formed`                     none
shares   QUESTION                  none                         `shares` for the others, and `commitments`
.        REPLY                     `Members` that sent theirs   `shares` from the others
masked   QUESTION                  `Signed` senders             the masked numbers
.        REPLY                     `Signatures` of the senders  none
signed   QUESTION                  `Signed` lists               none
.        REPLY                     `Signatures` of the lists    none
opened   UPDATE                    none                         `revealed`
======== ========================= ============================ ===========================================
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from raafl.core.types import Assignment
from raafl.parts.protect.secure.group import COMMITMENT_BYTES, Coverage, Group, GroupMember, reveal_bytes, share_bytes
from raafl.parts.protect.secure.member import SIGNATURE_BYTES
from raafl.runtime.fields import Meta, count_of, text_of
from raafl.runtime.protocol import Answer
from raafl.sanitize import sanitize_text
from raafl.submodel import FlatTensors, Layout, Spec, SpecError
from raafl.transport import Refused

KEY_BYTES = 32
MAX_PROOF_CHARACTERS = 8000
MAX_NAME = 64
"""Characters of a group's or a site's name, and of a digest."""


@dataclass(frozen=True, slots=True)
class KeyProof:
    """Proof that a client's keys, and what it says of its task, are a site's; both are empty without certificates."""

    # the site's certificate and any intermediate ones; each is base64 of DER, separated by spaces
    certificate: str = ""
    signature: str = ""  # signature of `Group.statement` by the site's key, in base64

    def to_meta(self) -> dict[str, Any]:
        """Convert the proof to JSON fields of a message."""
        return {"site_certificate": self.certificate, "key_signature": self.signature} if self.signature else {}

    @classmethod
    def from_meta(cls, meta: Meta) -> Self:
        """Read the proof from the JSON fields of a message; raise `Refused` if a field is not a short text."""
        return cls(text_of(meta, "site_certificate", MAX_PROOF_CHARACTERS), text_of(meta, "key_signature"))


@dataclass(frozen=True, slots=True)
class Claim:
    """Statement of a client about itself before its group is formed, beside its keys and its answer."""

    run: str = ""  # digest of the client's config and model
    start: str = ""  # digest of what the client received for the task; "" = not stated
    site: str = ""  # name of the client's site; "" = it has no certificate
    max_share: float = 1.0  # largest share of an opened sum that the client's site lets one site have
    proof: KeyProof = field(default_factory=KeyProof)  # signature of the client's site, with its certificate

    def to_meta(self) -> dict[str, Any]:
        """Convert the claim to JSON fields of a message."""
        own = {"run": self.run, "start": self.start, "site": self.site, "max_share": self.max_share}
        return {**own, **self.proof.to_meta()}

    @classmethod
    def from_meta(cls, meta: Meta) -> Self:
        """Read the claim from the JSON fields of a message; raise `Refused` if a field is invalid."""
        run, start, site = (text_of(meta, name, MAX_NAME) for name in ("run", "start", "site"))
        return cls(run, start, site, _share(meta.get("max_share")), KeyProof.from_meta(meta))

    def member(self, assignment: Assignment, keys: bytes, answer: Answer, counted: int | None = None) -> GroupMember:
        """Return the client as a member of a group.

        `counted`: number of samples by which it is weighted; None = all.
        """
        mask, share, sign = (keys[place : place + KEY_BYTES] for place in range(0, 3 * KEY_BYTES, KEY_BYTES))
        counted = answer.num_samples if counted is None else counted
        return GroupMember(
            assignment.id,
            mask,
            share,
            sign,
            assignment.spec.without_base,
            answer.num_samples,
            answer.num_steps,
            counted,
            assignment.version,
            self.max_share,
            self.start,
            self.site,
        )


@dataclass(frozen=True, slots=True)
class Formed:
    """Message that tells a client which group it belongs to."""

    group: Group  # the group and all its members
    # proof of each member's keys, by member; members without certificates are left out
    proofs: Mapping[int, KeyProof] = field(default_factory=dict)

    def to_meta(self) -> dict[str, Any]:
        """Convert the message to its JSON fields."""
        group = self.group
        specs = list(dict.fromkeys(member.spec for member in group.members))
        members = [
            [
                one.id,
                one.mask_key.hex(),
                one.share_key.hex(),
                one.sign_key.hex(),
                specs.index(one.spec),
                one.num_samples,
                one.num_steps,
                one.counted,
                one.version,
                one.max_share,
                one.start,
                one.site,
            ]
            for one in group.members
        ]
        return {
            "group": group.id,
            "threshold": group.threshold,
            "min_cover": group.min_cover,
            "version": group.version,
            "run": group.run,
            "equal": group.equal,
            "specs": [spec.to_json() for spec in specs],
            "members": members,
            **(
                {"proofs": [[key, one.certificate, one.signature] for key, one in self.proofs.items()]}
                if self.proofs
                else {}
            ),
        }

    @classmethod
    def from_meta(cls, meta: Meta) -> Self:
        """Read the message from its JSON fields; raise `Refused` if it is invalid."""
        try:
            specs = [Spec.from_json(one) for one in meta["specs"]]
            members = tuple(_member(row, specs) for row in meta["members"])
            proofs = {
                count_of({"key": key}, "key", 1): KeyProof.from_meta(KeyProof(certificate, signature).to_meta())
                for key, certificate, signature in meta.get("proofs", [])
            }
        except (SpecError, KeyError, TypeError, ValueError, IndexError) as error:
            raise Refused("bad-json", f"group: {sanitize_text(error)}") from None
        name, run = (text_of(meta, field, MAX_NAME) for field in ("group", "run"))
        numbers = (count_of(meta, "threshold", 1), count_of(meta, "min_cover", 1), count_of(meta, "version"))
        return cls(Group(name, members, *numbers, run, meta.get("equal") is True), proofs)


def _member(row: Sequence[Any], specs: Sequence[Spec]) -> GroupMember:
    """Read a group member from its row of a message; raises `Refused`, or errors such as KeyError for a malformed row."""
    key, mask, share, sign, place, num_samples, num_steps, counted, version, max_share, start, site = row
    said = {
        "key": key,
        "samples": num_samples,
        "steps": num_steps,
        "counted": counted,
        "version": version,
        "start": start,
        "site": site,
    }
    return GroupMember(
        count_of(said, "key", 1),
        _key(mask),
        _key(share),
        _key(sign),
        specs[count_of({"spec": place}, "spec")],
        count_of(said, "samples", 1),
        count_of(said, "steps"),
        count_of(said, "counted", 1),
        count_of(said, "version"),
        _share(max_share),
        text_of(said, "start", MAX_NAME),
        text_of(said, "site", MAX_NAME),
    )


def _share(value: object) -> float:
    """Read a share, a number above 0 and up to 1; raise `Refused` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise Refused("bad-json", f"max_share is {sanitize_text(value, 40)}")
    return float(value)


def _key(text: object) -> bytes:
    key = bytes.fromhex(text) if isinstance(text, str) else b""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a public key has {len(key)} bytes, but must have {KEY_BYTES}")
    return key


@dataclass(frozen=True, slots=True)
class Members:
    """Message that tells the members of a group which of them have completed the previous step of the protocol.

    Attributes:
        keys: task ids of the members whose message of that step has arrived, ascending.
    """

    keys: tuple[int, ...]

    def to_meta(self) -> dict[str, Any]:
        """Convert the message to its JSON fields."""
        return {"members": list(self.keys)}

    @classmethod
    def from_meta(cls, meta: Meta, among: Collection[int]) -> Self:
        """Read the message from its JSON fields; raise `Refused` unless it lists members of ``among`` in ascending order."""
        keys = meta.get("members")
        if not isinstance(keys, list) or not all(type(key) is int for key in keys) or keys != sorted(set(keys)):
            raise Refused("bad-json", "members is no ascending list of numbers")
        if not set(keys) <= set(among):
            raise Refused("bad-json", "members names one that is not in the group")
        return cls(tuple(keys))


@dataclass(frozen=True, slots=True)
class Signed:
    """Message with a member's signature of the list of senders, or of both lists (`raafl.parts.protect.secure.member`)."""

    signature: bytes

    def to_meta(self) -> dict[str, Any]:
        """Convert the message to its JSON fields."""
        return {"signature": self.signature.hex()}

    @classmethod
    def from_meta(cls, meta: Meta) -> Self:
        """Read the message from its JSON fields; raise `Refused` unless it has a signature of the right length."""
        return cls(_signature(meta.get("signature")))


@dataclass(frozen=True, slots=True)
class Signatures:
    """Message that passes the members' signatures on: of the senders by those that survive, or of both lists."""

    by_member: Mapping[int, bytes]  # signature of each member that sent one, by its task's id, ascending

    def to_meta(self) -> dict[str, Any]:
        """Convert the message to its JSON fields."""
        keys = sorted(self.by_member)
        return {**Members(tuple(keys)).to_meta(), "signatures": [self.by_member[key].hex() for key in keys]}

    @classmethod
    def from_meta(cls, meta: Meta, among: Collection[int]) -> Self:
        """Read the message from its JSON fields; raise `Refused` unless members of ``among`` have a signature each."""
        keys, signatures = Members.from_meta(meta, among).keys, meta.get("signatures")
        if not isinstance(signatures, list) or len(signatures) != len(keys):
            raise Refused("bad-json", "signatures is no list with one for each member")
        return cls(dict(zip(keys, map(_signature, signatures), strict=True)))


def _signature(text: object) -> bytes:
    try:
        signature = bytes.fromhex(text) if isinstance(text, str) and len(text) == 2 * SIGNATURE_BYTES else b""
    except ValueError:
        signature = b""
    if len(signature) != SIGNATURE_BYTES:
        raise Refused("bad-json", f"a signature has not {SIGNATURE_BYTES} bytes in hexadecimal digits")
    return signature


# ---- tensors ----


def layout_of(**sizes: int) -> Layout:
    """Return the tensor layout in which byte strings are sent."""
    return Layout.pack((name, (max(size, 1),), torch.uint8) for name, size in sizes.items())


def to_tensors(**texts: bytes) -> FlatTensors:
    """Convert named byte strings to uint8 tensors, in the layout of `layout_of`."""
    made = {name: torch.frombuffer(bytearray(text or b"\0"), dtype=torch.uint8) for name, text in texts.items()}
    return FlatTensors.from_named(made)


def to_bytes(flat: FlatTensors, name: str) -> bytes:
    """Return the byte string ``name`` from tensors that `to_tensors` made."""
    return flat[name].cpu().numpy().tobytes()


def split(text: bytes, sizes: Mapping[int, int]) -> dict[int, bytes]:
    """Split a joined byte string into pieces; ``sizes`` has the number of bytes of each member's piece, in order."""
    pieces, start = {}, 0
    for key, size in sizes.items():
        pieces[key] = text[start : start + size]
        start += size
    return pieces


def sizes_from(coverage: Coverage, sender: int, receivers: Iterable[int]) -> dict[int, int]:
    """Return the number of bytes that a member sends to each other member in secret shares."""
    return dict.fromkeys((key for key in receivers if key != sender), share_bytes(coverage, sender))


def sizes_for(coverage: Coverage, receiver: int, senders: Iterable[int]) -> dict[int, int]:
    """Return the number of bytes that a member receives from each other member in secret shares."""
    return {key: share_bytes(coverage, key) for key in senders if key != receiver}


def reveal_sizes(coverage: Coverage, senders: Iterable[int], arrived: frozenset[int], min_cover: int) -> dict[int, int]:
    """Return the number of bytes that a member sends to the server about each member of its group at the end.

    These bytes are secret shares, from which the server removes the masks from the sum of the updates.
    """
    return {key: reveal_bytes(coverage, key, arrived, min_cover) for key in senders}


def shares_layout(coverage: Coverage, sender: int, receivers: Iterable[int]) -> Layout:
    """Return the tensor layout of the message in which a member sends its secret shares."""
    total = sum(sizes_from(coverage, sender, receivers).values())
    return layout_of(shares=total, commitments=COMMITMENT_BYTES * len(coverage.cells_in(sender)))
