"""Answer tasks by masked updates: the client's side of secure aggregation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raafl.core.types import Assignment, Update
from raafl.parts.protect.secure.coverage import IntegerLayouts
from raafl.parts.protect.secure.fixed_point import OUT_OF_RANGE, OutOfRange
from raafl.parts.protect.secure.group import CannotOpen
from raafl.parts.protect.secure.member import Member
from raafl.parts.protect.secure.merge import SecureSum
from raafl.runtime.exchange import Questions
from raafl.runtime.protocol import Answer
from raafl.runtime.secure_protocol import (
    Formed,
    KeyProof,
    Members,
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


class SecureSide(Questions):
    """Client's side of secure aggregation: it masks updates so that the server learns only their sum."""

    def __init__(
        self, pair: Connection, submodels: Submodels, merge: SecureSum, site_keys: SiteKeys | None = None
    ) -> None:
        """Prepare.

        Args:
            pair: connection to the server.
            submodels: of the model.
            merge: of sums, by this client's own config.
            site_keys: signs this client's public keys and checks the others'; None = clients have no certificates.
        """
        super().__init__(pair)
        self._submodels, self._merge, self._site_keys = submodels, merge, site_keys
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

    def mask(self, assignment: Assignment, update: Update, answer: Answer) -> FlatTensors:
        """Mask an update and send it; return the secret shares from which the server computes the sum of its group.

        The caller sends the shares in the task's last message.

        Args:
            assignment: task of the update.
            update: trained update, for which `refusal` returned None.
            answer: fields such as the number of samples, which are sent without a mask.

        Raises:
            CannotOpen: the group that the server proposes breaks this client's rules, or too few members are left.
            Stopped: the server has ended the task, or the connection is lost.
        """
        self._assignment, options, key = assignment, self._merge.options, assignment.id
        member, layouts = Member(options.min_cover or 0, options.threshold), IntegerLayouts(self._submodels)
        own = b"".join(member.public)
        proof = KeyProof() if self._site_keys is None else self._site_keys.prove(key, own)
        meta, _ = self._ask({**answer.to_meta(), **proof.to_meta()}, to_tensors(keys=own), None)
        formed = Formed.from_meta(meta)
        group = formed.group
        if self._site_keys is not None:
            self._site_keys.check(group, formed.proofs, options.min_cover or 0)
        encrypted, commitments = member.join(group, key, layouts)
        if group.by_id[key].spec != assignment.spec.without_base:
            raise CannotOpen("the server names another submodel for this client than it assigned", "bad-group")
        keys = [one.id for one in group.members]
        shares = b"".join(encrypted[other] for other in sizes_from(member.coverage, key, keys))
        sizes = sizes_for(member.coverage, key, keys)
        answer_layout = layout_of(shares=sum(sizes.values()))
        meta, arrived = self._ask({}, to_tensors(shares=shares, commitments=commitments), answer_layout)
        senders = Members.from_meta(meta, keys).keys
        assert arrived is not None
        pieces = split(to_bytes(arrived, "shares"), sizes)
        numbers = self._merge.encoded(self._submodels, assignment.spec, update.tensors, formed.share, self._scale)
        member.mask_(numbers, {sender: pieces[sender] for sender in senders if sender != key})
        meta, _ = self._ask({}, numbers, None)
        told = member.reveal(Members.from_meta(meta, senders).keys)
        return to_tensors(revealed=b"".join(told[sender] for sender in senders))
