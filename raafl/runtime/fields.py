"""Check single fields of received messages; sign and verify the state of the server's journal that is sent with a task."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any, Final, Literal, Self, get_args

from raafl.core.types import Assignment
from raafl.runfolder.seals import Signer, is_signed
from raafl.sanitize import sanitize_text
from raafl.transport import Refused

Meta = Mapping[str, Any]
"""A JSON object that a peer sent: bounded in size and depth by the codec, and otherwise anything."""
LogLevel = Literal["error", "warning", "info"]
LOG_LEVELS: Final[tuple[LogLevel, ...]] = get_args(LogLevel)
MAX_LOG_LINES: Final = 50
"""Log lines that one message of a client may carry."""
MAX_LOG_TEXT: Final = 500
HEAD_FIELDS: Final = ("head", "head_signature", "head_key")


def count_of(meta: Meta, name: str, least: int = 0) -> int:
    """Read a field of a message that must be a whole number below 2**53.

    Raises:
        Refused: the field is missing, or has another value.
    """
    value = meta.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**53:
        raise Refused("bad-json", f"{name} is {sanitize_text(value)}")
    return value


def text_of(meta: Meta, name: str, longest: int = 1000) -> str:
    """Read an optional text field of a message; return "" if it is missing.

    Raises:
        Refused: the field is no text, is too long, or has unusual characters.
    """
    value = meta.get(name, "")
    if not isinstance(value, str) or len(value) > longest or not (value.isascii() and value.isprintable()):
        raise Refused("bad-json", f"{name} is no text of up to {longest} plain characters")
    return value


_WHOLE = {
    "id": 2**64,
    "client": 2**32,
    "incarnation": 2**32,
    "task": 2**53,
    "version": 2**53,
    "region": 2**53,
    "seed": 2**64,
}
_OPTIONAL = {"num_epochs": 2**53, "num_steps": 2**53, "next_seed": 2**64}
_LEAST = {"region": -1, "num_epochs": 1, "num_steps": 1}
_REAL = {
    "assigned_s": 1e30,
    "pace_s": 1e9,
    "lr_scale": 1e30,
    "next_lr_scale": 1e30,
}  # largest allowed values; nobody can wait for longer than 1e9 s


def check_assignment(assignment: Assignment) -> Assignment:
    """Check the types and bounds of an assignment's numbers, as a peer sent them, and return it.

    Raises:
        Refused: a number is of another type, or out of bounds, or ``extra`` is no mapping.
    """
    values = {one.name: getattr(assignment, one.name) for one in dataclass_fields(assignment)}
    for name, end in (_WHOLE | _OPTIONAL).items():
        value, least = values[name], _LEAST.get(name, 0)
        if (value is not None or name in _WHOLE) and not (type(value) is int and least <= value < end):
            raise Refused("bad-json", f"assignment: {name} is {sanitize_text(value, 40)}")
    for name, bound in _REAL.items():
        value = values[name]
        if type(value) not in (int, float) or not abs(value) < bound:
            raise Refused("bad-json", f"assignment: {name} is {sanitize_text(value, 40)}")
    if not isinstance(assignment.extra, dict):
        raise Refused("bad-json", "assignment: extra is no table")
    return assignment


@dataclass(frozen=True, slots=True)
class LogLine:
    """A log message of a client, as sent to the server."""

    level: LogLevel  # one of `LOG_LEVELS`
    text: str  # one line of at most `MAX_LOG_TEXT` characters that are safe to print


def level_of(number: int) -> LogLevel:
    """Convert a level number of `logging` to the level's name."""
    return "error" if number >= logging.ERROR else "warning" if number >= logging.WARNING else "info"


def logs_to_meta(lines: Sequence[LogLine]) -> dict[str, Any]:
    """Convert log lines to a field of a message."""
    return {"logs": [[line.level, line.text] for line in lines]}


def log_lines_of(meta: Meta) -> tuple[LogLine, ...]:
    """Read the log lines in a message; their text is sanitised and shortened, and at most `MAX_LOG_LINES` are returned."""
    rows = meta.get("logs", [])
    lines = []
    for row in rows[:MAX_LOG_LINES] if isinstance(rows, list) else []:
        if isinstance(row, list) and len(row) == 2 and row[0] in LOG_LEVELS:
            lines.append(LogLine(row[0], sanitize_text(row[1], MAX_LOG_TEXT)))
    return tuple(lines)


@dataclass(frozen=True, slots=True)
class SignedHead:
    """Hash of the server's journal (its log of all events), signed by the server when it assigns a task.

    A client can keep it as evidence against later changes of the journal.
    """

    head: str  # hash of the last row and all rows before it; see `raafl.runfolder.append_file`
    signature: str = ""  # signature of hash and task id; "" = unsigned
    key: str = ""  # public key of the signature; "" = unsigned

    @classmethod
    def sign(cls, head: str, assignment: int, signer: Signer | None) -> Self:
        """Sign the journal's hash, which is sent with a task.

        `signer`: holder of the server's key; None = do not sign.
        """
        return cls(head) if signer is None else cls(head, signer.sign(_signed(head, assignment)), signer.public)

    def is_signed(self, assignment: int) -> bool:
        """Check whether the signature is valid for the task with id ``assignment``."""
        return is_signed(_signed(self.head, assignment), self.signature, self.key)

    def to_meta(self) -> dict[str, Any]:
        """Convert the signed hash to fields of a message."""
        return dict(zip(HEAD_FIELDS, (self.head, self.signature, self.key), strict=True))

    @classmethod
    def from_meta(cls, meta: Meta) -> Self | None:
        """Read the signed hash from a message; None if it has none. Raise `Refused` if a field is not a short text."""
        if "head" not in meta:
            return None
        return cls(*(text_of(meta, name) for name in HEAD_FIELDS))


def _signed(head: str, assignment: int) -> str:
    return f"raafl head 1\n{assignment}\n{head}"
