"""Answer tasks by masked updates: the client's side of secure aggregation."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from raafl.core.types import Assignment, Update
from raafl.local.train import Stopped
from raafl.log import warn_once
from raafl.parts.protect.secure.agreement import check_facts
from raafl.parts.protect.secure.coverage import IntegerLayouts
from raafl.parts.protect.secure.fixed_point import OUT_OF_RANGE, OutOfRange
from raafl.parts.protect.secure.group import CannotOpen, GroupMember, statement
from raafl.parts.protect.secure.member import Member
from raafl.parts.protect.secure.merge import SecureSum
from raafl.parts.trigger import AllReported
from raafl.runtime.client.worker import Client, ClientExtension, Gate, Work
from raafl.runtime.exchange import Questions
from raafl.runtime.identity import Identity
from raafl.runtime.protocol import Answer, Failed
from raafl.runtime.secure_groups import NOT_OPENED, masking
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
from raafl.submodel import FlatTensors

if TYPE_CHECKING:
    from raafl.runtime.client.setup import ClientSetup
    from raafl.runtime.client.site_keys import SiteKeys
    from raafl.transport.tcp.credentials import TlsFiles


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SiteTerms:
    """Contribution of a client's site to its groups."""

    run: str = ""  # digest of the client's config and model, which all members of a group must share
    # signs this client's statements and checks the others'; None = no certificates, so a lying server is not detected
    keys: SiteKeys | None = None
    max_share: float = 1.0  # largest share of an opened sum that one site may have; only counts with ``keys``
    in_rounds: bool = False  # whether all members of a group train from the same version
    # whether all clients of one version and submodel receive the same values, so that they are compared
    names_start: bool = False
    same_values: bool = False  # whether only members that received the same values are taken to hide this client


class MaskedClient(Questions):
    """A client that masks its updates, so that the server learns only the sum of its group's."""

    forbids = frozenset({"begin early", "send beside", "send logs", "send as trained"})

    def __init__(self, client: Client, merge: SecureSum, terms: SiteTerms | None = None) -> None:
        """Store the terms; no group has begun yet.

        `terms`: statements and limits of the client's site; None = the defaults.
        """
        super().__init__(client)
        self._submodels, self._merge, self._terms = client.submodels, merge, terms or SiteTerms()
        self._scale = 1.0

    @classmethod
    def of(cls, setup: ClientSetup, files: TlsFiles | None) -> Callable[[Client], ClientExtension]:
        """Return what makes the extension, with what the client's site contributes."""
        return partial(cls, merge=masking(setup.experiment), terms=_site_terms(setup, files))

    def answer(self, answer: Answer) -> Answer:
        """Leave out what would tell of this client alone."""
        return replace(answer, metrics={}, extra={})

    def send(self, work: Work, plain: Callable[[Work], None]) -> None:
        """Send an update masked, and what opens its group's sum as the task's last message."""
        client, assignment, update = self.client, work.assignment, work.update
        assert work.answer is not None
        if (refusal := self._refusal(update)) is not None:
            client.give_up(assignment, Failed(refusal))
            return
        try:
            revealed = self.mask(assignment, update, work.answer, work.received)
        except CannotOpen as error:
            warn_once(_log, f"client {client.info.id} takes no part in a sum: {error}")
            client.give_up(assignment, Failed(NOT_OPENED, error=str(error)))
        except Stopped:
            pass  # the receiving thread has queued the reason
        else:
            client.deliver(client.message(work, revealed), work)

    def _refusal(self, update: Update) -> str | None:
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

        `update`: trained update, which can be encoded.

        Raises:
            CannotOpen: the group that the server proposes breaks this client's rules, the members do not agree on who is
                in it, or too few are left.
            Stopped: the server has ended the task, or the connection is lost.
        """
        self._assignment, options, key = assignment, self._merge.options, assignment.id
        member, layouts = (
            Member(options.min_cover or 0, options.threshold, self._terms.same_values),
            IntegerLayouts(self._submodels),
        )
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
        """Return this client's statement about itself, and the entry that the server's list of members must have for it."""
        terms = self._terms
        if terms.keys is None:
            claim = Claim(terms.run)
            return claim, claim.member(assignment, keys, answer)
        start = _start_of(assignment, received) if terms.names_start else ""
        claim = Claim(terms.run, start, terms.keys.site, terms.max_share)
        own = claim.member(assignment, keys, answer)
        return replace(claim, proof=terms.keys.prove(statement(terms.run, own))), own

    def _check(self, formed: Formed, own: GroupMember) -> None:
        """Check that a group belongs to this client's run, lists this client unchanged, and has only certified members.

        Raises CannotOpen (bad-group) if it does not.
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
    """Return a digest of a task's received values and learning rate, which must be equal within a group."""
    return hashlib.sha256(f"{received.model_digest()} {assignment.lr_scale!r}".encode()).hexdigest()


def _site_terms(setup: ClientSetup, files: TlsFiles | None) -> SiteTerms:
    """Return the statements and limits of the client's site; ``files``: its certificate files, None = it has none."""
    equal = {name: digest for name, digest in setup.sections.items() if digest != "own"}
    equal.pop("data", None)  # clients may have data of their own
    facts = Identity.of(setup.submodels, equal).to_meta()
    facts.pop("raafl")  # clients of several versions may take part
    run = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    alike = setup.experiment.compress.down == "none"  # compressed values also depend on what a client was sent before
    in_rounds = isinstance(setup.experiment.algorithm.trigger, AllReported)
    return SiteTerms(run, _site_keys(files, setup.gate), setup.gate.max_share, in_rounds, alike, setup.gate.same_values)


def _site_keys(files: TlsFiles | None, gate: Gate) -> SiteKeys | None:
    if files is None:
        return None
    from raafl.certs.revocations import Revocations
    from raafl.runtime.client.site_keys import SiteKeys  # imported here, since ranks of torchrun use no certificates

    revoked = frozenset if files.crl is None else Revocations(files.crl, files.ca).latest
    return SiteKeys(files.ca, files.cert, files.key, revoked, gate.partners)
