"""Answer tasks by masked updates: the client's side of secure aggregation."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from raafl.core.types import Assignment, Update
from raafl.errors import BadInput
from raafl.local.context import Stopped
from raafl.log import warn_once
from raafl.parts.protect.secure.group import (
    OUT_OF_RANGE,
    CannotOpen,
    Group,
    GroupMember,
    IntegerLayouts,
    OutOfRange,
    statement,
)
from raafl.parts.protect.secure.member import Member, check_facts
from raafl.parts.protect.secure.merge import SecureSum
from raafl.parts.trigger import AllReported
from raafl.runfolder.seals import Signer, is_signed
from raafl.runtime.client.worker import Client, ClientExtension, TrainedTask
from raafl.runtime.exchange import Questions
from raafl.runtime.identity import Identity
from raafl.runtime.protocol import Answer, Failed
from raafl.sites.authority import fingerprint, is_for, uris_of
from raafl.sites.certificates import Holder, Revocations, holder_of
from raafl.sites.credentials import TlsFiles
from raafl.sites.gate import policy_of
from raafl.sites.secure_messages import (
    MAX_PROOF_CHARACTERS,
    NOT_OPENED,
    UNCERTIFIED,
    Claim,
    Formed,
    KeyProof,
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
from raafl.transport.tcp.credentials import Credentials

if TYPE_CHECKING:
    from raafl.runtime.client.setup import ClientSetup

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SiteTerms:
    """Contribution of a client's site to its groups."""

    run: str = ""  # digest of the client's config and model, which all members of a group must share
    # signs this client's claims and checks those of others; None = no certificates, so that a lying server goes
    # unnoticed
    keys: SiteKeys | None = None
    max_share: float = 1.0  # largest share of an opened sum that one site may have; only counts with ``keys``
    in_rounds: bool = False  # whether all members of a group train from the same version
    # whether all clients of a version and submodel receive the same values, which members then compare by digest
    names_start: bool = False
    same_values: bool = False  # whether a sum hides this client only among members that received the same values


class MaskedClient(Questions):
    """A client that masks its updates, so that the server learns only the sum of its group's."""

    forbids = frozenset({"begin early", "send beside", "send logs", "send as trained"})

    def __init__(self, client: Client, merge: SecureSum, terms: SiteTerms | None = None) -> None:
        """Store the arguments; ``terms``: what the client's site claims and limits, None = the defaults."""
        super().__init__(client)
        self._submodels, self._merge, self._terms = client.submodels, merge, terms or SiteTerms()
        self._scale = 1.0

    @classmethod
    def notes(cls, *, certified: bool) -> list[str]:
        """Return a warning about what masking does not prevent if clients' keys are not certified."""
        return [] if certified else [UNCERTIFIED]

    @classmethod
    def of(cls, setup: ClientSetup, credentials: Credentials | None) -> Callable[[Client], ClientExtension]:
        """Return a function that creates the extension for a client, with the terms of the client's site."""
        merge = setup.experiment.secured(setup.experiment.algorithm).merge
        assert isinstance(merge, SecureSum)
        files = credentials if isinstance(credentials, TlsFiles) else None
        return partial(cls, merge=merge, terms=_site_terms(setup, files))

    def answer(self, answer: Answer) -> Answer:
        """Remove metrics and extras from the answer, which would describe this client alone."""
        return replace(answer, metrics={}, extra={})

    def send(self, work: TrainedTask, plain: Callable[[TrainedTask], None]) -> None:
        """Send an update masked; the task's last message has the client's part in unmasking its group's sum."""
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
            pass  # the thread that receives messages has queued the reason for the stop
        else:
            client.deliver(client.message(work, revealed), work)

    def _refusal(self, update: Update) -> str | None:
        """Find the weight scale with which an update can be encoded as integers; return a reason for refusal if there is none."""
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
        """Build this client's claim about itself, and the entry that the server's list of members must then have for it."""
        terms = self._terms
        if terms.keys is None:
            claim = Claim(terms.run)
            return claim, claim.member(assignment, keys, answer)
        start = _start_of(assignment, received) if terms.names_start else ""
        claim = Claim(terms.run, start, terms.keys.site, terms.max_share)
        own = claim.member(assignment, keys, answer)
        return replace(claim, proof=terms.keys.prove(statement(terms.run, own))), own

    def _check(self, formed: Formed, own: GroupMember) -> None:
        """Check that a group is of this client's run, lists this client as it claimed, and has only certified members.

        Raises CannotOpen (bad-group) if not.
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
    """Hash a task's received values and learning rate, which must be equal for all members of a group."""
    return hashlib.sha256(f"{received.model_digest()} {assignment.lr_scale!r}".encode()).hexdigest()


def _site_terms(setup: ClientSetup, files: TlsFiles | None) -> SiteTerms:
    """Collect what a client's site claims and limits in secure aggregation.

    ``files``: the site's certificate files; None = the federation has no certificates.
    """
    equal = {name: digest for name, digest in setup.sections.items() if digest != "own"}
    equal.pop("data", None)  # clients may train on different data
    facts = Identity.of(setup.submodels, equal).to_meta()
    facts.pop("raafl")  # clients may have different versions of raafl
    run = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    # with compression, received values also depend on what this client received before
    alike = setup.experiment.compress.down == "none"
    in_rounds = isinstance(setup.experiment.algorithm.trigger, AllReported)
    policy = policy_of(setup.gate)
    keys = None
    if files is not None:
        revoked = frozenset if files.crl is None else Revocations(files.crl, files.ca).latest
        keys = SiteKeys(files.ca, files.cert, files.key, revoked, policy.partners)
    return SiteTerms(run, keys, float(policy.max_share), in_rounds, alike, policy.same_values)


class SiteKeys:
    """Certificate and key of this site, and the authority that must have issued the certificates of other sites.

    `site`: name of this site.
    """

    def __init__(
        self,
        ca: Path,
        cert: Path,
        key: Path,
        revoked: Callable[[], frozenset[int]] = frozenset,
        partners: Collection[str] | None = None,
    ) -> None:
        """Load the certificate and key.

        `partners`: sites that may be members of a group, each ``NAME`` or ``NAME@FINGERPRINT`` of its key; None = all.
        Raises BadInput if a file is not usable for this.
        """
        self._signer, self._revoked = Signer.load(key), revoked
        try:
            self._authority = Store(x509.load_pem_x509_certificates(ca.read_bytes()))
            chain = x509.load_pem_x509_certificates(cert.read_bytes())
        except (OSError, ValueError) as error:
            raise BadInput(
                f"tls_ca is '{ca}' and tls_cert is '{cert}', but one of them cannot be read: {error}"
            ) from None
        self._chain = " ".join(base64.b64encode(one.public_bytes(Encoding.DER)).decode() for one in chain)
        if len(self._chain) > MAX_PROOF_CHARACTERS:
            raise BadInput(
                f"tls_cert is '{cert}', whose certificate chain is too long for secure_aggregation: leave the "
                "authority's certificate out of the file"
            )
        own = holder_of(uris_of(chain[0]))
        if own is None:
            raise BadInput(
                f"tls_cert is '{cert}', which names no federation: its subject alternative names need a raafl URI"
            )
        self._federation, self.site = own.federation, own.site or ""
        self._partners = None if partners is None else {*partners, self.site}

    def prove(self, text: str) -> KeyProof:
        """Sign this client's claim for one task, so that other clients can check which site made it."""
        return KeyProof(self._chain, self._signer.sign(text))

    def check(self, group: Group, proofs: Mapping[int, KeyProof]) -> None:
        """Check that a site of this federation has signed the statement of each member of a group.

        Raises:
            CannotOpen: a member has no valid signature, or its site is not the one that the group names.
        """
        for member in group.members:
            proof = proofs.get(member.id, KeyProof())
            holder, public, key = self._holder(proof.certificate)
            if holder is None or holder.site is None or holder.federation != self._federation:
                raise CannotOpen(
                    f"the keys of member {member.id} are of no site that the authority certifies", "bad-group"
                )
            if holder.site != member.site or not is_signed(group.statement(member), proof.signature, public):
                raise CannotOpen(f"the keys of member {member.id} are not signed by site '{holder.site}'", "bad-group")
            if self._partners is not None and not self._partners & {holder.site, f"{holder.site}@{key}"}:
                raise CannotOpen(
                    f"member {member.id} is of site '{holder.site}', key {key}, which policy.partners does not list: add it "
                    "if you know this key to be that site's",
                    "bad-group",
                )

    def _holder(self, chain: str) -> tuple[Holder | None, str, str]:
        """Verify a certificate chain; return its holder, its public key in base64 and the key's fingerprint.

        The holder is None if the certificate is invalid, expired, revoked or not for clients.
        """
        try:
            leaf, *between = [
                x509.load_der_x509_certificate(base64.b64decode(one, validate=True)) for one in chain.split()
            ]
            PolicyBuilder().store(self._authority).build_client_verifier().verify(leaf, between)
            key = leaf.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        except (ValueError, VerificationError, x509.InvalidVersion):
            return None, "", ""
        if not is_for(leaf, server=False) or leaf.serial_number in self._revoked():
            return None, "", ""
        return holder_of(uris_of(leaf)), base64.b64encode(key).decode(), fingerprint(leaf)
