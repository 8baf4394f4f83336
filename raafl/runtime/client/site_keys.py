"""Sign the public keys that a site uses in secure aggregation, and check that all members of a group are sites.

A server can then neither replace a member's keys by its own nor make members up, unless it has the authority's key.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from raafl.certs.authority import is_for, uris_of
from raafl.certs.names import Holder, holder_of
from raafl.errors import BadInput
from raafl.parts.protect.secure.group import CannotOpen, Group
from raafl.runfolder.signing import Signer, is_signed
from raafl.runtime.secure_protocol import MAX_PROOF_CHARACTERS, KeyProof, signed_text


class SiteKeys:
    """Certificate and key of this site, and the authority that must have issued the certificates of other sites."""

    def __init__(
        self, ca: Path, cert: Path, key: Path, revoked: Callable[[], frozenset[int]] = frozenset
    ) -> None:  # fmt: skip
        """Load the files.

        Args:
            ca: file of the authority's certificates.
            cert: file of this site's certificate, followed by those between it and the authority.
            key: file of the site's private key.
            revoked: function that returns the serial numbers of revoked certificates.

        Raises:
            BadInput: a file is of no use for this.
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
        self._federation = own.federation

    def prove(self, assignment: int, keys: bytes) -> KeyProof:
        """Sign the public keys that this client uses in one task, so that other clients can check whose they are.

        Args:
            assignment: id of the task.
            keys: public key for masks, followed by the public key for secret shares.
        """
        return KeyProof(self._chain, self._signer.sign(signed_text(assignment, keys)))

    def check(self, group: Group, proofs: Mapping[int, KeyProof], min_cover: int) -> None:
        """Check that each member of a group has keys signed by a site of this federation.

        Args:
            group: group whose members' keys are checked.
            proofs: certificate and signature for each member's keys, by the id of the member's task.
            min_cover: smallest number of sites in a group, from the client's own config; with fewer, one site's update
                might be inferred.

        Raises:
            CannotOpen: a member has no valid signature, or there are too few sites.
        """
        sites = set()
        for member in group.members:
            proof = proofs.get(member.id, KeyProof())
            holder, public = self._holder(proof.certificate)
            if holder is None or holder.site is None or holder.federation != self._federation:
                raise CannotOpen(
                    f"the keys of member {member.id} are of no site that the authority certifies", "bad-group"
                )
            if not is_signed(signed_text(member.id, member.mask_key + member.share_key), proof.signature, public):
                raise CannotOpen(f"the keys of member {member.id} are not signed by site '{holder.site}'", "bad-group")
            sites.add(holder.site)
        if len(sites) < min_cover:
            raise CannotOpen(
                f"its clients are of {len(sites)} sites, secure_aggregation.min_cover is {min_cover}", "bad-group"
            )

    def _holder(self, chain: str) -> tuple[Holder | None, str]:
        """Return the holder of a certificate and its public key as `is_signed` takes it; None where it is not valid now."""
        try:
            leaf, *between = [
                x509.load_der_x509_certificate(base64.b64decode(one, validate=True)) for one in chain.split()
            ]
            PolicyBuilder().store(self._authority).build_client_verifier().verify(leaf, between)
            key = leaf.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        except (ValueError, VerificationError, x509.InvalidVersion):
            return None, ""
        if not is_for(leaf, server=False) or leaf.serial_number in self._revoked():
            return None, ""
        return holder_of(uris_of(leaf)), base64.b64encode(key).decode()
