"""Check single fields of messages, and the signed head of the server's journal that goes with an assignment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from raafl.runfolder.signing import Signer, is_signed
from raafl.sanitize import sanitize_text
from raafl.transport import Refused

Meta = Mapping[str, Any]
"""A JSON object that a peer sent: bounded in size and depth by the codec, and otherwise anything."""
HEAD_FIELDS: Final = ("head", "head_signature", "head_key")


def count_of(meta: Meta, name: str, least: int = 0) -> int:
    """Read a field of a message that must be a whole number below 2**53.

    Args:
        meta: plain data of a message.
        name: name of the field.
        least: smallest allowed value.

    Raises:
        Refused: the field is missing, or has another value.
    """
    value = meta.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**53:
        raise Refused("bad-json", f"{name} is {sanitize_text(value)}")
    return value


def text_of(meta: Meta, name: str, longest: int = 1000) -> str:
    """Read an optional text field of a message, of plain characters; "" if it is missing.

    Args:
        meta: plain data of a message.
        name: name of the field.
        longest: largest number of characters.

    Raises:
        Refused: the field has another value.
    """
    value = meta.get(name, "")
    if not isinstance(value, str) or len(value) > longest or not (value.isascii() and value.isprintable()):
        raise Refused("bad-json", f"{name} is no text of up to {longest} plain characters")
    return value


@dataclass(frozen=True, slots=True)
class SignedHead:
    """Head of the server's journal's hash chain after an assignment was recorded, with its signature.

    Attributes:
        head: last ``chain`` of the journal; see `raafl.runfolder.chain`.
        signature: signature of head and assignment; "" = unsigned.
        key: public key of the signature; "" = unsigned.
    """

    head: str
    signature: str = ""
    key: str = ""

    @classmethod
    def sign(cls, head: str, assignment: int, signer: Signer | None) -> Self:
        """Sign the journal's head that is sent with an assignment.

        Args:
            head: head of the journal.
            assignment: id of the assignment.
            signer: signer of the server; None = unsigned.
        """
        return cls(head) if signer is None else cls(head, signer.sign(_signed(head, assignment)), signer.public)

    def is_signed(self, assignment: int) -> bool:
        """Check the signature for an assignment, given by its id."""
        return is_signed(_signed(self.head, assignment), self.signature, self.key)

    def to_meta(self) -> dict[str, Any]:
        """Return the fields of this record for a message."""
        return dict(zip(HEAD_FIELDS, (self.head, self.signature, self.key), strict=True))

    @classmethod
    def from_meta(cls, meta: Meta) -> Self | None:
        """Read the record from a message; None if it has no head. Raise `Refused` for fields that are not short texts."""
        if "head" not in meta:
            return None
        return cls(*(text_of(meta, name) for name in HEAD_FIELDS))


def _signed(head: str, assignment: int) -> str:
    return f"raafl head 1\n{assignment}\n{head}"
