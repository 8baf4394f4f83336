"""Sign and check the lists of members on which a group agrees before any member reveals a share (Bonawitz et al. 2017, round 3).

A server that tells members different lists could have some reveal the seeds of a client, and others the keys that cancel its
pairwise masks. So each member signs two texts, each once: with its masked numbers, the list of *senders* whose shares it has, which
decides its pairwise masks; and later that list with the list of *survivors*, whose masked numbers have come. It reveals only with
``threshold`` signatures of the second text that it signed itself, and only takes for survivors those that signed its first text.

Why that is enough, with n members of which fewer than ``2 threshold - n`` help the server: two second texts cannot both have
``threshold`` signatures, since an honest member signs one. So all shares that honest members reveal are for one pair of lists: of
each member either its seeds or its key, never both. A survivor has masks with every sender, so that in an opened cell the masks
that its honest holders share in pairs remain, and cancel in the sum alone. Its signature of the first text names the group's
digest, too: keys, weights, versions and submodels of all members, as it saw them when it encoded its numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from raafl.parts.protect.secure.coverage import Coverage
from raafl.parts.protect.secure.group import CannotOpen, Group
from raafl.submodel import Spec

SIGNATURE_BYTES = 64


def senders_text(group: Group, senders: Iterable[int]) -> bytes:
    """Return the text that a member signs with its masked numbers."""
    return f"raafl round senders 1\n{group.run}\n{group.digest}\n{_listed(senders)}".encode()


def lists_text(group: Group, senders: Iterable[int], survivors: Iterable[int]) -> bytes:
    """Return the text that a member signs before it reveals anything."""
    return f"raafl round lists 1\n{group.run}\n{group.digest}\n{_listed(senders)}\n{_listed(survivors)}".encode()


def _listed(members: Iterable[int]) -> str:
    return " ".join(map(str, sorted(members)))


def is_signed(text: bytes, signature: bytes, key: bytes) -> bool:
    """Check whether a text has a member's signature; False for malformed keys and signatures, too."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def check_facts(group: Group) -> None:
    """Check what the weights of a group depend on, and that members that say so started from the same values.

    Raises:
        CannotOpen: bad-group: a member counts for more samples than it says, or trained from a version that is not there
            yet, or members of one version and submodel received different values.
    """
    starts: dict[tuple[int, Spec], str] = {}
    for member in group.members:
        if not 1 <= member.counted <= member.num_samples or not 0 <= member.version <= group.version:
            raise CannotOpen(
                f"the server counts {member.counted} of the {member.num_samples} samples of member {member.id}, which "
                f"trained from version {member.version} of {group.version}",
                "bad-group",
            )
        start = starts.setdefault((member.version, member.spec), member.start)
        # a model sent to one member only would make the sum on it that member's own update
        if member.start and start != member.start:
            raise CannotOpen(
                f"member {member.id} received other values of version {member.version} than another one", "bad-group"
            )


def check_cover(
    group: Group,
    coverage: Coverage,
    weights: Mapping[int, float],
    survivors: frozenset[int],
    min_cover: int,
    alike_to: int | None = None,
) -> None:
    """Check that each cell whose sum these survivors would open hides each of its sites.

    `alike_to`: member whose cells alone are checked, and only members that received the same values as it are taken to
    hide it: a server can give others a model from which they learn nothing. None = all cells and members.

    Raises:
        CannotOpen: bad-group: a cell has survivors of too few sites, or nearly all of its sum would be of one site.
    """
    most = min(member.max_share for member in group.members)
    cells = coverage.open_cells(survivors, min_cover)
    hiding = survivors
    if alike_to is not None:
        cells = [cell for cell in cells if alike_to in coverage.holders[cell]]
        hiding = survivors & _alike(group, alike_to)
    for cell in cells:
        parts: dict[str | int, float] = {}
        for number in sorted(coverage.holders[cell] & hiding):
            member = group.by_id[number]
            if member.site and not member.num_steps:  # a member without steps hides no other member's update
                continue
            parts[member.owner] = parts.get(member.owner, 0.0) + weights[number]
        if len(parts) < min_cover:
            raise CannotOpen(
                f"elements of the model would be summed over clients of {len(parts)} sites that trained"
                f"{'' if alike_to is None else ' from the same values (policy.same_values)'}, and "
                f"secure_aggregation.min_cover is {min_cover}: use clients of more sites",
                "bad-group",
            )
        owner, largest = max(parts.items(), key=lambda part: part[1])
        if largest > most * sum(parts.values()):
            raise CannotOpen(
                f"{largest / (sum(parts.values()) or 1):.1%} of a sum would be of {_named(owner)}, and the policy of a site "
                f"allows max_share {most:g}: use more clients or more equal numbers of samples, or lower guard.max_weight",
                "bad-group",
            )


def _alike(group: Group, member_id: int) -> frozenset[int]:
    """Return the members that received the same submodel, version and values as one; none if it does not state them."""
    own = group.by_id[member_id]
    start = own.version, own.spec, own.start
    return frozenset(one.id for one in group.members if own.start and (one.version, one.spec, one.start) == start)


def _named(owner: str | int) -> str:
    return f"site '{owner}'" if isinstance(owner, str) else f"member {owner}"
