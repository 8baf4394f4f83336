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

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch

from raafl.core.coordinator import Coordinator
from raafl.core.restoring import group_from_json
from raafl.core.types import Assignment, SumGroup, Update
from raafl.errors import TaskFailed
from raafl.log import warn_once
from raafl.parts.protect.secure.group import (
    COMMITMENT_BYTES,
    OUT_OF_RANGE,
    CannotOpen,
    Coverage,
    Group,
    GroupMember,
    IntegerLayouts,
    OutOfRange,
    can_be_summed,
    reveal_bytes,
    share_bytes,
)
from raafl.parts.protect.secure.member import SIGNATURE_BYTES, mask_and_open_
from raafl.parts.protect.secure.merge import SecureSum, smallest_group
from raafl.parts.trigger import Buffered
from raafl.runfolder.schema import JournalRow
from raafl.runtime.extensions import ReplayExtension
from raafl.runtime.protocol import Answer, Meta, count_of, text_of
from raafl.runtime.simulation import ClockExtension, Due, Simulation, item_from_plain, item_to_plain
from raafl.sanitize import sanitize_text
from raafl.submodel import FlatTensors, Layout, Spec, SpecError
from raafl.transport import Refused

_log = logging.getLogger(__name__)
KEY_BYTES = 32
MAX_PROOF_CHARACTERS = 8000
MAX_NAME = 64
"""Characters of a group's or a site's name, and of a digest."""


@dataclass(frozen=True, slots=True)
class KeyProof:
    """Proof that a client's keys and claims come from a site; both fields are empty without certificates."""

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
    max_share: float = 1.0  # the client's site takes part only if no site has a larger share of a sum
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
    """Parse one group member from its row of a message; raise `Refused`, or an error such as KeyError if it is malformed."""
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
    """Parse a fraction, above 0 and at most 1; raise `Refused` for anything else."""
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
    """Message with members' signatures: of the list of senders by the surviving members, or of both lists."""

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


# ---- send byte strings as tensors ----


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


NOT_OPENED = "not-opened"
"""Reason of a refusal: the sum that contains the update could not be opened."""

UNCERTIFIED = (
    "secure aggregation: clients have no certificates, so it protects from a server that follows the protocol and reads "
    "along, and not from one that lies to its clients (docs/secure-aggregation.md)"
)
"""Note at the start of a run with secure aggregation whose keys nobody certifies."""


@dataclass(frozen=True)
class SecureGroups:
    """Rules by which clients form groups for secure aggregation: only the sum of a group's updates becomes known."""

    coordinator: Coordinator  # coordinator of the run; read only
    merge: SecureSum  # merge of the run, which merges sums of updates

    @classmethod
    def of(cls, coordinator: Coordinator) -> Self | None:
        """Return the rules by which the clients of a run form groups; None if the run has no secure aggregation."""
        merge = coordinator.algorithm.merge
        return cls(coordinator, merge) if isinstance(merge, SecureSum) else None

    @property
    def least(self) -> int:
        """Smallest number of clients in a group, so that the sum of their updates does not reveal a single update."""
        return smallest_group(self.merge.options)

    def is_complete(self, ready: Collection[int]) -> bool:
        """Check whether a group is complete, so that its updates are summed now instead of waiting for more clients."""
        trigger, num_out = self.coordinator.algorithm.trigger, self.coordinator.roster.num_out
        if isinstance(trigger, Buffered) and len(ready) >= trigger.size:
            return True
        waits = isinstance(trigger, Buffered) or self.coordinator.fleet.rules.waits_for_groups
        return num_out == len(ready) >= (self.least if waits else 1)

    def num_together(self, specs: Sequence[Spec]) -> int:
        """Return the number of clients of a group, from the first, that are summed at once: all, or a half and so on.

        It is not all if submodels overlap in too many ways for one sum; the others, `least` or more, are summed next.
        """
        num, layouts = len(specs), IntegerLayouts(self.coordinator.state.submodels)
        while num // 2 >= self.least and not can_be_summed(layouts, specs[:num]):
            num = -(-num // 2)
        return num

    def scale(self, assignments: Iterable[Assignment]) -> float:
        """Return the largest weight of an update in a group; all weights are divided by it, so that none is above 1.

        Weights are based on the number of samples that each client reported when it joined.
        """
        clients = self.coordinator.roster.clients
        return max((self._product(one, clients[one.client].num_samples) for one in assignments), default=1.0) or 1.0

    def share(self, assignment: Assignment, num_samples: int, scale: float) -> float:
        """Return the factor, from 0 to 1, by which a client multiplies its update before masking."""
        return min(self._product(assignment, num_samples) / scale, 1.0)

    def _product(self, assignment: Assignment, num_samples: int) -> float:
        client = self.coordinator.roster.clients[assignment.client]
        counted = self.coordinator.admission.counted_samples(client, num_samples)
        weight, factor = self.merge.weigh(counted, self.coordinator.state.version - assignment.version)
        return weight * factor

    def encode(self, assignment: Assignment, update: Update, scale: float) -> None:
        """Replace a trained update by the whole numbers that a real client would mask and send in its place.

        The update is refused if a value is too large to be encoded.
        """
        update.metrics, update.extra = {}, {}
        if update.refusal is not None:
            return
        submodels = self.coordinator.state.submodels
        try:
            share, clip = self.share(assignment, update.num_samples, scale), self.merge.scale(update.tensors)
            update.tensors = self.merge.encoded(submodels, assignment.spec, update.tensors, share, clip)
        except OutOfRange:
            update.refusal = OUT_OF_RANGE

    def form_group(self, pairs: Sequence[tuple[Assignment, Update]], scale: float) -> None:
        """Put encoded updates into one group whose sum is merged; refuse them if there are too few to hide each other.

        With the option ``simulate_masks`` the masks are added and removed, as in a run with real clients.
        """
        masked, opened = self.merge.options.simulate_masks, len(pairs) >= self.least
        if masked and opened:
            numbers = {assignment.id: update.tensors for assignment, update in pairs}
            specs = {assignment.id: assignment.spec for assignment, _ in pairs}
            layouts, options = IntegerLayouts(self.coordinator.state.submodels), self.merge.options
            try:
                mask_and_open_(numbers, specs, layouts, self.merge.min_cover, options.threshold)
            except CannotOpen as error:
                warn_once(_log, f"a sum could not be read: {error}")
                opened = False
        group = SumGroup(tuple(assignment.id for assignment, _ in pairs), scale, masked)
        for _, update in pairs:
            update.group, update.refusal = (group, None) if opened else (None, NOT_OPENED)


class SimulatedSums(ClockExtension):
    """Groups in a simulation: tasks that are over wait for the others of their group, and are summed with them."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        groups = SecureGroups.of(simulation.coordinator)
        assert groups is not None
        self._groups = groups
        self._ready: dict[int, Due] = {}  # trained updates by assignment id, which wait until their group is complete

    def arrives(self, due: Due) -> bool:
        """Keep a task that is over until its group is complete."""
        self._ready[due.assignment.id] = due
        return True

    def turned(self) -> None:
        """Train, encode and sum the tasks of a group once all of its clients are ready."""
        simulation = self.simulation
        while not simulation.reason and simulation.error is None and self._groups.is_complete(self._ready):
            self._sum()

    def _sum(self) -> None:
        groups, simulation = self._groups, self.simulation
        dues = list(self._ready.values())[: groups.merge.point.num_members]
        if groups.merge.options.simulate_masks:
            dues = dues[: groups.num_together([due.assignment.spec for due in dues])]
        scale = groups.scale(due.assignment for due in dues)
        updates = []
        try:
            for due in dues:
                update = simulation.trained(due)
                # encode into other storage: the trainer reuses its own for the next task
                groups.encode(due.assignment, update, scale)
                updates.append(update)
        except TaskFailed as failed:  # when the run is resumed, all tasks of the group are trained again
            simulation.error = failed
            return
        for due in dues:
            simulation.forget_task(due)
            del self._ready[due.assignment.id]
        sound = [(due.assignment, update) for due, update in zip(dues, updates, strict=True) if update.refusal is None]
        groups.form_group(sound, scale)
        simulation.tell_group(updates)

    def cancelled(self, client: int, tasks: Iterable[int]) -> None:
        """Continue without the tasks of a client that was lost."""
        for number in tasks:
            self._ready.pop(number, None)

    def save(self) -> dict[str, Any]:
        """Return the tasks that wait."""
        return {"ready": [item_to_plain(due) for due in self._ready.values()]}

    def restore(self, data: dict[str, Any]) -> list[Due]:
        """Restore the tasks that wait, and return them."""
        for item in map(item_from_plain, data.get("ready", [])):
            assert isinstance(item, Due)
            self._ready[item.assignment.id] = item
        return list(self._ready.values())


class ReplayedSums(ReplayExtension):
    """Groups in a replay: masks cancel out, so a sum is computed again from the numbers before they were masked."""

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(coordinator)
        groups = SecureGroups.of(coordinator)
        assert groups is not None
        self._groups = groups

    def trained(self, assignment: Assignment, update: Update, row: JournalRow) -> None:
        """Encode an update that was summed."""
        group = group_from_json(cast(dict[str, Any], row))
        if group is not None:
            self._groups.encode(assignment, update, group.scale)
            update.group = group
