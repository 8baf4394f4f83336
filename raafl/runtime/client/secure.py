"""Answer tasks by masked updates: the client's side of secure aggregation."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raafl.core.types import Assignment, Update
from raafl.parts.protect.secure.agreement import check_facts
from raafl.parts.protect.secure.coverage import IntegerLayouts
from raafl.parts.protect.secure.fixed_point import OUT_OF_RANGE, OutOfRange
from raafl.parts.protect.secure.group import CannotOpen, GroupMember, statement
from raafl.parts.protect.secure.member import Member
from raafl.parts.protect.secure.merge import SecureSum
from raafl.runtime.exchange import Questions
from raafl.runtime.protocol import Answer
from raafl.runtime.secure_protocol import (
    Claim,
    Formed,
    Members,
    Signatures,
    Signed,
    layout_of,
    sizes_for,
    sizes_from,
    split,
    to_bytes,
    to_tensors,
)
from raafl.submodel import FlatTensors, Submodels
from raafl.transport import Connection

if TYPE_CHECKING:
    from raafl.runtime.client.site_keys import SiteKeys


@dataclass(frozen=True, slots=True)
class SiteTerms:
    """Contribution of a client's site to its groups."""

    run: str = ""  # digest of the client's config and model, which all members of a group must share
    # signs this client's statements and checks the others'; None = clients have no certificates, so that nothing
    # protects from a server that lies
    keys: SiteKeys | None = None
    max_share: float = 1.0  # largest share of an opened sum that one site may have; only counts with ``keys``
    in_rounds: bool = False  # whether all members of a group train from the same version
    # whether all clients of one version and submodel receive the same values, so that they are compared
    names_start: bool = False


class SecureSide(Questions):
    """Client's side of secure aggregation: it masks updates so that the server learns only their sum."""

    def __init__(
        self, pair: Connection, submodels: Submodels, merge: SecureSum, terms: SiteTerms | None = None
    ) -> None:
        """Prepare.

        `terms`: what its site contributes; None = nothing.
        """
        super().__init__(pair)
        self._submodels, self._merge, self._terms = submodels, merge, terms or SiteTerms()
        self._scale = 1.0

    def refusal(self, update: Update) -> str | None:
        """Return the reason why an update cannot be encoded for masking; None if it can."""
        if update.refusal is not None:
            return update.refusal
        try:
            self._scale = self._merge.scale(update.tensors)
        except OutOfRange:
            return OUT_OF_RANGE
        return None

    def mask(self, assignment: Assignment, update: Update, answer: Answer, received: FlatTensors) -> FlatTensors:
        """Mask an update and send it; return the secret shares from which the server computes the sum of its group.

        The caller sends the shares in the task's last message.

        `update`: trained update, for which `refusal` returned None.

        Raises:
            CannotOpen: the group that the server proposes breaks this client's rules, the members do not agree on who is
                in it, or too few are left.
            Stopped: the server has ended the task, or the connection is lost.
        """
        self._assignment, options, key = assignment, self._merge.options, assignment.id
        member, layouts = Member(options.min_cover or 0, options.threshold), IntegerLayouts(self._submodels)
        keys = b"".join(member.public)
        claim, own = self._claim(assignment, answer, keys, received)
        meta, _ = self._ask({**answer.to_meta(), **claim.to_meta()}, to_tensors(keys=keys), None)
        formed = Formed.from_meta(meta)
        group = formed.group
        self._check(formed, own)
        weights = self._merge.weights(group)
        encrypted, commitments = member.join(group, key, layouts, weights)
        ids = [one.id for one in group.members]
        shares = b"".join(encrypted[other] for other in sizes_from(member.coverage, key, ids))
        sizes = sizes_for(member.coverage, key, ids)
        meta, arrived = self._ask(
            {}, to_tensors(shares=shares, commitments=commitments), layout_of(shares=sum(sizes.values()))
        )
        senders = Members.from_meta(meta, ids).keys
        assert arrived is not None
        pieces = split(to_bytes(arrived, "shares"), sizes)
        share = min(weights[key] / (max(weights.values()) or 1.0), 1.0)
        numbers = self._merge.encoded(self._submodels, assignment.spec, update.tensors, share, self._scale)
        signature = member.mask_(numbers, {sender: pieces[sender] for sender in senders if sender != key})
        meta, _ = self._ask(Signed(signature).to_meta(), numbers, None)
        signature = member.sign(Signatures.from_meta(meta, senders).by_member)
        meta, _ = self._ask(Signed(signature).to_meta(), to_tensors(nothing=b""), None)
        told = member.reveal(Signatures.from_meta(meta, senders).by_member)
        return to_tensors(revealed=b"".join(told[sender] for sender in senders))

    def _claim(
        self, assignment: Assignment, answer: Answer, keys: bytes, received: FlatTensors
    ) -> tuple[Claim, GroupMember]:
        """Return what this client says of itself, and itself as the member of a group that it expects to find."""
        terms = self._terms
        if terms.keys is None:
            claim = Claim(terms.run)
            return claim, claim.member(assignment, keys, answer)
        start = _start_of(assignment, received) if terms.names_start else ""
        claim = Claim(terms.run, start, terms.keys.site, terms.max_share)
        own = claim.member(assignment, keys, answer)
        return replace(claim, proof=terms.keys.prove(statement(terms.run, own))), own

    def _check(self, formed: Formed, own: GroupMember) -> None:
        """Check that a group is of this client's run, has this client as it is, and only members that sites certify.

        Raises:
            CannotOpen: it is not; bad-group.
        """
        group = formed.group
        listed = group.by_id.get(own.id)
        if group.run != self._terms.run or listed is None or replace(listed, counted=own.counted) != own:
            raise CannotOpen(
                "the server says something else of this client than the client itself, or has members of another run: a "
                "submodel, a number of samples, a version, keys or a config",
                "bad-group",
            )
        check_facts(group)
        if self._terms.in_rounds and any(one.version != group.version for one in group.members):
            raise CannotOpen("members of a round trained from several versions", "bad-group")
        if self._terms.keys is not None:
            self._terms.keys.check(group, formed.proofs)


def _start_of(assignment: Assignment, received: FlatTensors) -> str:
    """Return a digest of what a task began with, which clients of one version and submodel must have in common."""
    return hashlib.sha256(f"{received.model_digest()} {assignment.lr_scale!r}".encode()).hexdigest()
