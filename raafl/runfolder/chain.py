"""Link the rows of a journal to a hash chain, and check one.

The last field of each row is ``chain``: the hex SHA-256 of the previous row's ``chain`` followed by the row as it is without
that field. So the last ``chain``, the head, stands for the whole journal: a row that is changed, removed, inserted or moved
no longer fits the row before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

START: Final = "0" * 64
"""The head of a journal without rows."""
MAX_NAMED: Final = 20
"""Rows that do not fit which are named one by one; the others are counted."""

_FIELD: Final = b',"chain":"'
_DIGITS: Final = frozenset(b"0123456789abcdef")
_END: Final = b'"}\n'
_LENGTH: Final = len(_FIELD) + 64 + len(_END)


def link(head: str, row: bytes) -> tuple[bytes, str]:
    """Add a row to the hash chain: return it with its ``chain`` field, and the new head.

    Args:
        head: value of ``chain`` in the row before.
        row: a JSON object with at least one field, and a line end, without spaces.
    """
    new = hashlib.sha256(head.encode() + row).hexdigest()
    return b"".join((row[:-2], _FIELD, new.encode(), _END)), new


def unlink(line: bytes) -> tuple[bytes, str] | None:
    """Return a line of a journal as it was before `link`, and its ``chain``; None for a line without one."""
    digest = line[-_LENGTH + len(_FIELD) : -len(_END)]
    if line[-_LENGTH : -_LENGTH + len(_FIELD)] != _FIELD or not line.endswith(_END) or not _DIGITS.issuperset(digest):
        return None
    return line[:-_LENGTH] + b"}\n", digest.decode()


@dataclass
class ChainCheck:
    """Check of a journal's hash chain, line by line.

    After a row that does not fit, the check goes on from that row's own ``chain``, so that every wrong row is found.

    Attributes:
        num_rows: number of complete lines so far.
        num_unlinked: number of rows at the beginning without a chain, written by an earlier version of raafl.
        head: value of ``chain`` in the last row; `START` before the first.
        broken: numbers of the rows that do not fit, from 1; at most `MAX_NAMED` of them.
        num_broken: number of rows that do not fit.
    """

    num_rows: int = 0
    num_unlinked: int = 0
    head: str = START
    broken: list[int] = field(default_factory=list)
    num_broken: int = 0

    def __post_init__(self) -> None:
        """Begin the digest of rows without a chain, from which the chain behind them starts."""
        self._before = hashlib.sha256()

    def add(self, line: bytes) -> None:
        """Check the next line, which must have a line end."""
        self.num_rows += 1
        found = unlink(line)
        if found is None and self.num_unlinked == self.num_rows - 1:
            self.num_unlinked += 1
            self._before.update(line)
            return
        head = self._before.hexdigest() if 0 < self.num_unlinked == self.num_rows - 1 else self.head
        if found is None or link(head, found[0])[1] != found[1]:
            self.num_broken += 1
            if len(self.broken) < MAX_NAMED:
                self.broken.append(self.num_rows)
        self.head = hashlib.sha256(line).hexdigest() if found is None else found[1]

    @property
    def has_chain(self) -> bool:
        """Whether a row has a chain, or there is no row yet."""
        return self.num_unlinked < self.num_rows or self.num_rows == 0

    @property
    def next_head(self) -> str:
        """The head to which the next row is linked."""
        return self._before.hexdigest() if 0 < self.num_unlinked == self.num_rows else self.head


def check_lines(lines: Iterable[bytes]) -> ChainCheck:
    """Check the complete lines of a journal; a last line without an end, as a crash leaves, is ignored."""
    found = ChainCheck()
    for line in lines:
        if line.endswith(b"\n"):
            found.add(line)
    return found


def read_head(path: Path) -> tuple[str, int]:
    """Return the head to which the next row of a journal is linked, and the journal's number of rows."""
    with path.open("rb") as file:
        found = check_lines(file)
    return found.next_head, found.num_rows
