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
    """Read a whole number below 2**53 from a message's field.

    Args:
        meta: plain data of a message.
        name: of the field.
        least: smallest allowed value.

    Raises:
        Refused: it is missing, or anything else.
    """
    value = meta.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**53:
        raise Refused("bad-json", f"{name} is {sanitize_text(value)}")
    return value


def text_of(meta: Meta, name: str, longest: int = 1000) -> str:
    """Read an optional field of plain characters; "" where it is missing.

    Args:
        meta: plain data of a message.
        name: of the field.
        longest: characters allowed.

    Raises:
        Refused: it is anything else.
    """
    value = meta.get(name, "")
    if not isinstance(value, str) or len(value) > longest or not (value.isascii() and value.isprintable()):
        raise Refused("bad-json", f"{name} is no text of up to {longest} plain characters")
    return value


@dataclass(frozen=True, slots=True)
class SignedHead:
    """Head of the server's journal once an assignment was recorded.

    Attributes:
        head: the last ``chain`` of the journal, see `raafl.runfolder.chain`.
        signature: of head and assignment; "" = unsigned.
        key: public key of the signature; "" = unsigned.
    """

    head: str
    signature: str = ""
    key: str = ""

    @classmethod
    def sign(cls, head: str, assignment: int, signer: Signer | None) -> Self:
        """Sign the head that goes with an assignment.

        Args:
            head: of the journal.
            assignment: its id.
            signer: of the server; None = unsigned.
        """
        return cls(head) if signer is None else cls(head, signer.sign(_signed(head, assignment)), signer.public)

    def is_signed(self, assignment: int) -> bool:
        """Check the signature for an assignment, given by its id."""
        return is_signed(_signed(self.head, assignment), self.signature, self.key)

    def to_meta(self) -> dict[str, Any]:
        """Return the message's fields."""
        return dict(zip(HEAD_FIELDS, (self.head, self.signature, self.key), strict=True))

    @classmethod
    def from_meta(cls, meta: Meta) -> Self | None:
        """Read the fields of a message; None where it has no head. Raises `Refused` for what is no short text."""
        if "head" not in meta:
            return None
        return cls(*(text_of(meta, name) for name in HEAD_FIELDS))


def _signed(head: str, assignment: int) -> str:
    return f"raafl head 1\n{assignment}\n{head}"
