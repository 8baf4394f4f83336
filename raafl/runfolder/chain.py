"""Connect the rows of a journal by a hash chain, which shows later changes, and check such a chain.

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
    """Compute a journal row's hash, which depends on all rows before; return the row with its hash, and the hash alone."""
    new = hashlib.sha256(head.encode() + row).hexdigest()
    return b"".join((row[:-2], _FIELD, new.encode(), _END)), new


def unlink(line: bytes) -> tuple[bytes, str] | None:
    """Split a line of a journal into the original row and its hash (``chain``); None for a line without a hash."""
    digest = line[-_LENGTH + len(_FIELD) : -len(_END)]
    if line[-_LENGTH : -_LENGTH + len(_FIELD)] != _FIELD or not line.endswith(_END) or not _DIGITS.issuperset(digest):
        return None
    return line[:-_LENGTH] + b"}\n", digest.decode()


@dataclass
class ChainCheck:
    """Checker of a journal's hash chain; it gets the lines one by one.

    After a row with a wrong hash, the check continues from that hash, so that every wrong row is found.
    """

    num_rows: int = 0  # number of lines checked so far
    num_unlinked: int = 0  # number of rows at the beginning without a hash, written by an earlier version of raafl
    head: str = START  # hash of the last row; `START` before the first row
    # numbers of the rows with a wrong hash, from 1; at most `MAX_NAMED` of them
    broken: list[int] = field(default_factory=list)
    num_broken: int = 0  # number of rows with a wrong hash

    def __post_init__(self) -> None:
        """Begin the digest of rows without a chain, from which the chain behind them starts."""
        self._before = hashlib.sha256()

    def add(self, line: bytes) -> None:
        """Check the next line, which must be complete (with a line end)."""
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
        """Whether the journal is protected by hashes: some row has one, or there is no row yet."""
        return self.num_unlinked < self.num_rows or self.num_rows == 0

    @property
    def next_head(self) -> str:
        """Hash of the last row, from which the next row's hash will be computed."""
        return self._before.hexdigest() if 0 < self.num_unlinked == self.num_rows else self.head


def check_lines(lines: Iterable[bytes]) -> ChainCheck:
    """Check the hashes of a journal's lines; an incomplete last line, as a crash leaves, is ignored."""
    found = ChainCheck()
    for line in lines:
        if line.endswith(b"\n"):
            found.add(line)
    return found


def read_head(path: Path) -> tuple[str, int]:
    """Return the hash of the journal's last row, from which the next row's hash is computed, and the number of rows."""
    with path.open("rb") as file:
        found = check_lines(file)
    return found.next_head, found.num_rows
