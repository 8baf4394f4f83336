"""Define the messages of secure aggregation, in which a group masks its updates and the sum is revealed, and their checks.

They travel as questions, replies and the update of the task at hand (`raafl.runtime.protocol`); tensors are bytes, but for the
masked numbers.

======== ========================= ============================ ===========================================
step     message                   fields                       tensors
======== ========================= ============================ ===========================================
ready    QUESTION                  those of `Answer`, `KeyProof` `keys`: two public keys
.        REPLY                     `Formed`                     none
shares   QUESTION                  none                         `shares` for the others, and `commitments`
.        REPLY                     `Members` that sent theirs   `shares` from the others
masked   QUESTION                  none                         the masked numbers
.        REPLY                     `Members` that sent theirs   none
opened   UPDATE                    none                         `revealed`
======== ========================= ============================ ===========================================
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from raafl.parts.protect.secure.coverage import Coverage
from raafl.parts.protect.secure.group import COMMITMENT_BYTES, Group, GroupMember, reveal_bytes, share_bytes
from raafl.runtime.fields import Meta, count_of, text_of
from raafl.sanitize import sanitize_text
from raafl.submodel import FlatTensors, Layout, Spec, SpecError
from raafl.transport import Refused

KEY_BYTES = 32
MAX_PROOF_CHARACTERS = 8000


@dataclass(frozen=True, slots=True)
class KeyProof:
    """Proof that a client's public keys belong to a site; both fields are empty if clients have no certificates.

    Attributes:
        certificate: the site's certificate and any intermediate ones; each is base64 of DER, separated by spaces.
        signature: signature of `signed_text`, in base64.
    """

    certificate: str = ""
    signature: str = ""

    def to_meta(self) -> dict[str, Any]:
        """Convert the proof to JSON fields of a message."""
        return {"site_certificate": self.certificate, "key_signature": self.signature} if self.signature else {}

    @classmethod
    def from_meta(cls, meta: Meta) -> Self:
        """Read the proof from the JSON fields of a message; raise `Refused` if a field is not a short text."""
        return cls(text_of(meta, "site_certificate", MAX_PROOF_CHARACTERS), text_of(meta, "key_signature"))


def signed_text(assignment: int, keys: bytes) -> str:
    """Return the text that a site signs to prove that a client's keys are its own.

    Args:
        assignment: id of the client's task, unique in the run.
        keys: public key for masks, followed by the public key for secret shares.
    """
    return f"raafl round keys 1\n{assignment}\n{keys.hex()}"


@dataclass(frozen=True, slots=True)
class Formed:
    """Message that tells a client which group it belongs to.

    Attributes:
        group: the group and all its members.
        share: factor, from 0 to 1, by which this client multiplies its update.
        proofs: proof of each member's keys, by member; members without certificates are left out.
    """

    group: Group
    share: float
    proofs: Mapping[int, KeyProof] = field(default_factory=dict)

    def to_meta(self) -> dict[str, Any]:
        """Convert the message to its JSON fields."""
        specs = list(dict.fromkeys(member.spec for member in self.group.members))
        members = [
            [member.id, member.mask_key.hex(), member.share_key.hex(), specs.index(member.spec)]
            for member in self.group.members
        ]
        return {
            "group": self.group.id, "threshold": self.group.threshold, "min_cover": self.group.min_cover,
            "share": self.share, "specs": [spec.to_json() for spec in specs], "members": members,
            **({"proofs": [[key, one.certificate, one.signature] for key, one in self.proofs.items()]} if self.proofs else {}),
        }  # fmt: skip

    @classmethod
    def from_meta(cls, meta: Meta) -> Self:
        """Read the message from its JSON fields; raise `Refused` if it is invalid."""
        try:
            specs = [Spec.from_json(one) for one in meta["specs"]]
            members = tuple(
                GroupMember(count_of({"key": key}, "key", 1), _key(mask), _key(share), specs[place])
                for key, mask, share, place in meta["members"]
            )
            proofs = {
                count_of({"key": key}, "key", 1): KeyProof.from_meta(KeyProof(certificate, signature).to_meta())
                for key, certificate, signature in meta.get("proofs", [])
            }
            share = float(meta["share"])
            if not 0 <= share <= 1 or not isinstance(meta["group"], str) or len(meta["group"]) > 64:
                raise ValueError("share is not from 0 to 1, or group is no text of at most 64 characters")
        except (SpecError, KeyError, TypeError, ValueError, IndexError) as error:
            raise Refused("bad-json", f"group: {sanitize_text(error)}") from None
        group = Group(meta["group"], members, count_of(meta, "threshold", 1), count_of(meta, "min_cover", 1))
        return cls(group, share, proofs)


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


# ---- tensors ----


def layout_of(**sizes: int) -> Layout:
    """Return the tensor layout in which byte strings are sent.

    Args:
        sizes: length of each byte string, by name; an empty one takes one byte, since a message may not lack tensors.
    """
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
    """Return the number of bytes that a member sends to each other member in secret shares.

    Args:
        coverage: cells (pieces of the model) that each member's submodel covers.
        sender: task id of the member that sends.
        receivers: task ids of members; the sender itself is left out.
    """
    return dict.fromkeys((key for key in receivers if key != sender), share_bytes(coverage, sender))


def sizes_for(coverage: Coverage, receiver: int, senders: Iterable[int]) -> dict[int, int]:
    """Return the number of bytes that a member receives from each other member in secret shares.

    Args:
        coverage: cells (pieces of the model) that each member's submodel covers.
        receiver: task id of the member that receives.
        senders: task ids of members; the receiver itself is left out.
    """
    return {key: share_bytes(coverage, key) for key in senders if key != receiver}


def reveal_sizes(coverage: Coverage, senders: Iterable[int], arrived: frozenset[int], min_cover: int) -> dict[int, int]:
    """Return the number of bytes that a member sends to the server about each member of its group at the end.

    These bytes are secret shares, from which the server removes the masks from the sum of the updates.

    Args:
        coverage: cells (pieces of the model) that each member's submodel covers.
        senders: task ids of the members that sent shares.
        arrived: task ids of the members whose masked updates arrived.
        min_cover: smallest number of members that must cover a cell whose sum is revealed.
    """
    return {key: reveal_bytes(coverage, key, arrived, min_cover) for key in senders}


def shares_layout(coverage: Coverage, sender: int, receivers: Iterable[int]) -> Layout:
    """Return the tensor layout of the message in which a member sends its secret shares.

    Args:
        coverage: cells (pieces of the model) that each member's submodel covers.
        sender: task id of the member.
        receivers: task ids of all members.
    """
    total = sum(sizes_from(coverage, sender, receivers).values())
    return layout_of(shares=total, commitments=COMMITMENT_BYTES * len(coverage.cells_in(sender)))
