"""Sign what a site's client says of itself in secure aggregation, and check that all members of a group are sites.

A server can then neither replace a member's keys by its own nor make members up, unless it has the authority's key.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from raafl.certs.authority import fingerprint, is_for, uris_of
from raafl.certs.files import Holder, holder_of
from raafl.errors import BadInput
from raafl.parts.protect.secure.group import CannotOpen, Group
from raafl.runfolder.signing import Signer, is_signed
from raafl.runtime.secure_protocol import MAX_PROOF_CHARACTERS, KeyProof


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
        """Sign what this client says of itself in one task, so that other clients can check whose it is."""
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
        """Return a certificate's holder, its public key as `is_signed` takes it, and the key's fingerprint.

        The holder is None if the certificate is not valid now.
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
